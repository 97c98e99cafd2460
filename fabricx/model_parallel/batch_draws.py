"""Random numbers that a step draws for a batch, of which the parts of the batch receive those of their samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fabricx.core.module_state.rng import RandomState

_DRAWS: Final = frozenset(
    f"aten::{name}{ending}"
    for name in (
        "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "uniform",
        "random", "exponential", "geometric", "log_normal", "cauchy", "multinomial", "poisson", "binomial",
        "_standard_gamma", "_sample_dirichlet",
    )
    for ending in ("", "_")
)  # fmt: skip
_PERMUTATION: Final = "aten::randperm"


class DifferentDraws(Exception):
    """A part of a batch draws other random numbers than the batch, so that their losses can't be compared."""


@final
class BatchDraws:
    """Random numbers that a step has drawn for a batch.

    A random tensor of a part differs from that of the batch in the size of one dim, which is that of the samples.

    Args:
        rows: samples of the batch.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._drawn: list[Tensor] = []
        self._after: RandomState | None = None

    @contextmanager
    def record(self) -> Iterator[None]:
        """Context of the step for the batch."""
        with _Draws(lambda tensor, permutes: self._drawn.append(tensor.clone())):
            yield
            self._after = RandomState()

    @contextmanager
    def replay(self, begin: int, rows: int) -> Iterator[None]:
        """Context of the step for a part, with the state of random numbers that the batch began with.

        Args:
            begin: first sample of the part.
            rows: samples of the part.

        Raises:
            DifferentDraws: the part draws other numbers.
        """
        remaining = iter(self._drawn)

        def replace(tensor: Tensor, permutes: bool) -> None:
            drawn = next(remaining, None)
            part = None if drawn is None else rows_of_draw(drawn, tensor.shape, begin, rows, self._rows)
            if part is None or (permutes and part is not drawn):
                raise DifferentDraws("random numbers are drawn for a batch in another way than for its samples")
            tensor.copy_(part)

        with _Draws(replace):
            yield
            after = RandomState()
        if next(remaining, None) is not None:
            raise DifferentDraws("a batch draws more random numbers than one of its samples")
        if self._after is not None and (after.python != self._after.python or _numpy(after) != _numpy(self._after)):
            raise DifferentDraws("random numbers of Python or NumPy depend on the number of samples")


def rows_of_draw(
    drawn: Tensor, shape: Sequence[int], begin: int, rows: int, total: int
) -> Tensor | None:  # fmt: skip
    """Return the random numbers of some samples; None if they can't be found.

    Args:
        drawn: random numbers of a batch.
        shape: shape of those of a part of the batch.
        begin: first sample of the part.
        rows: samples of the part.
        total: samples of the batch.

    >>> rows_of_draw(torch.arange(6), [2], begin=1, rows=1, total=3)
    tensor([2, 3])
    """
    if tuple(drawn.shape) == tuple(shape):
        return drawn
    differing = [dim for dim, sizes in enumerate(zip(drawn.shape, shape, strict=False)) if sizes[0] != sizes[1]]
    if drawn.dim() != len(shape) or len(differing) != 1:
        return None
    (dim,) = differing
    per_sample, rest = divmod(drawn.shape[dim], total)
    return None if rest or shape[dim] != per_sample * rows else drawn.narrow(dim, begin * per_sample, shape[dim])


class _Draws(TorchDispatchMode):
    """Passes each tensor of new random numbers to a function.

    Args:
        replace: called with the tensor, which it may change, and with whether it is a permutation.
    """

    def __init__(self, replace: Callable[[Tensor, bool], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._replace = replace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        draws, before = func._schema.name in (*_DRAWS, _PERMUTATION), RandomState()
        output = func(*args, **(kwargs or {}))
        if draws:
            for leaf in tree_leaves(output):
                self._replace(leaf, func._schema.name == _PERMUTATION)
        elif before.differs(RandomState()):  # such as attention with dropout
            raise DifferentDraws(f"{func._schema.name} draws other random numbers for a batch than for its samples")
        return output


def _numpy(state: RandomState) -> Any:
    return state.numpy and (*state.numpy[2:], state.numpy[1].tobytes())
