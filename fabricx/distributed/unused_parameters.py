"""Parameters without a gradient in a backward whose gradients torch's DDP averages."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fabricx.distributed.world import World


class Unused:
    """Completes the reduction of a backward that has not reached all parameters.

    DDP reduces a bucket when all its parameters have got a gradient, and leaves the gradients of this rank where one
    has got none. A backward of zeros reaches the parameters that are missing. A parameter that has no gradient on any
    rank has none afterwards, as in one process: weight decay and momentum leave it alone.

    Each rank with missing parameters writes them to the store before that backward. When the backward has ended, all
    ranks were in it; a rank that has not written has a gradient for all parameters. So no collective is needed, and
    ranks without missing parameters do nothing.

    Args:
        world: the ranks.
        parameters: that DDP knows, in the same order on all ranks.
        sparse: parameters whose gradients are sparse; DDP takes no dense ones for them.
        before: object of the reductions before, with other parameters.

    Attributes:
        parameters: see above.
        reductions: number of reductions so far, the same on all ranks.
    """

    def __init__(
        self, world: World, parameters: Sequence[nn.Parameter], sparse: Set[Tensor], before: Unused | None = None
    ) -> None:  # fmt: skip
        self.reductions: int = 0 if before is None else before.reductions
        self._world = world
        self.parameters = parameters
        self._sparse = sparse
        self._warned: bool = before is not None and before._warned
        self._written: str = "" if before is None else before._written

    def complete(self, loss: Tensor | None, *, warns: bool) -> None:
        """Take part in the reduction for all parameters that a backward has not reached.

        Args:
            loss: of that backward; None if there was none.
            warns: warn once that there are such parameters.
        """
        found = set() if loss is None else reached(loss)
        missing = [parameter for parameter in self.parameters if parameter not in found]
        if loss is not None and warns and not self._warned:
            self._warned = True
            warnings.warn(
                f"{len(missing)} of {len(self.parameters)} parameters got no gradient in this step. The step is "
                "right, and takes longer than one without them: freeze parameters (requires_grad_(False)) before "
                "training, or say DDP(find_unused_parameters=True) if this is meant",
                stacklevel=2,
            )
        self._write(bytes(parameter.grad is None for parameter in self.parameters))
        with requiring_grad(missing):
            zero(missing, self._sparse).backward()
        for parameter, absent in zip(self.parameters, self._absent_everywhere(), strict=True):
            if absent:
                parameter.grad = None

    def _key(self, rank: int) -> str:
        return self._world.key(f"unused/{self._world.generation}/{self.reductions}/{rank}")

    def _write(self, absent: bytes) -> None:
        store = self._world.store
        assert store is not None
        store.set(self._key(self._world.rank), absent.decode("latin-1"))

    def _absent_everywhere(self) -> list[bool]:
        """Return which parameters have a gradient on no rank; the reduction has ended."""
        store = self._world.store
        assert store is not None
        everywhere = [True] * len(self.parameters)
        for key in map(self._key, range(self._world.size)):
            if not store.check([key]):
                everywhere = [False] * len(self.parameters)
                break
            everywhere = [a and bool(b) for a, b in zip(everywhere, store.get(key), strict=True)]
        if self._written:  # all ranks have read it before they took part in this reduction
            store.delete_key(self._written)
        self._written = self._key(self._world.rank)
        return everywhere


def reached(loss: Tensor) -> set[Tensor]:
    """Return the leaves of a loss's graph that require a gradient, by a walk through it.

    >>> weight, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    >>> found = reached((weight * 2).sum())
    >>> weight in found, other in found
    (True, False)
    """
    nodes: list[Any] = [loss.grad_fn]
    seen: set[Any] = {None}
    leaves: set[Tensor] = set()
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.add(leaf)
        nodes += [following for following, _ in node.next_functions]
    return leaves


def zero(parameters: Sequence[Tensor], sparse: Set[Tensor] = frozenset()) -> Tensor:
    """Return a loss of zero that reaches all given parameters; an empty slice keeps NaN weights out of it.

    Args:
        parameters: to reach.
        sparse: those that get a sparse gradient, without any row.

    >>> weight = torch.ones(3, 2, requires_grad=True)
    >>> zero([weight], {weight}).backward()
    >>> weight.grad.is_sparse, weight.grad._nnz()
    (True, 0)
    """
    terms = [(_no_rows(one) if one in sparse else one.reshape(-1)[:0]).sum() for one in parameters]
    return torch.stack([term.to(terms[0]) for term in terms]).sum()


def _no_rows(table: Tensor) -> Tensor:
    return nn.functional.embedding(torch.empty(0, dtype=torch.long, device=table.device), table, sparse=True)


def with_sparse_gradients(module: nn.Module) -> set[Tensor]:
    """Return the weights of embeddings that get sparse gradients."""
    tables = (part for part in module.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag)))
    return {part.weight for part in tables if part.sparse}


@contextmanager
def requiring_grad(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let parameters require a gradient inside, those too that are frozen."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
