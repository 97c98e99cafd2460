"""Counts the terms of mean losses: a mean over microbatches that differs from that over the batch is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

_PARAMETERS: Final = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
_UNEQUAL: Final = (
    "{function} is a mean over {terms} in the microbatches of this batch, which {have} parts {shares} of it, so "
    "the mean over microbatches is not that of the batch. Let batch_weight(self, batch) of the module return the sum "
    "of the weights of the targets that are not ignored; or divide a sum by the samples; or set microbatches=1"
)


@final
class LossTerms(TorchFunctionMode):
    """While active, records of how many terms `F.cross_entropy` and `F.nll_loss` compute the mean.

    Args:
        weighted: the parts of the microbatches in the batch are those of `batch_weight`.
    """

    def __init__(self, *, weighted: bool) -> None:
        super().__init__()
        self._have = "by batch_weight are" if weighted else "are"
        self._terms: list[tuple[str, Tensor]] = []  # of the present microbatch, in the order of calls
        self._recorded: list[tuple[float, list[tuple[str, Tensor]]]] = []  # with the parts of the microbatches

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is F.cross_entropy or func is F.nll_loss:
            self._note(func.__name__, dict(zip(_PARAMETERS, args, strict=False)) | options)
        return func(*args, **options)

    def _note(self, function: str, named: dict[str, Any]) -> None:
        target = named["target"]
        counts = named["input"].requires_grad and type(target) is Tensor and not target.is_floating_point()
        if not counts or named.get("reduction", "mean") != "mean":
            return
        used = target != named.get("ignore_index", -100)
        weight = named.get("weight")
        self._terms.append((function, used.sum() if weight is None else weight.detach()[target[used]].sum()))

    @contextlib.contextmanager
    def counted(self, share: float) -> Iterator[None]:
        """Return a context of the step of a microbatch.

        Args:
            share: part of the microbatch in the batch.
        """
        self._terms = []
        with self:
            yield
        self._recorded.append((share, self._terms))

    def check(self) -> None:
        """Compare the microbatches of a batch, and forget them.

        Raises:
            ValueError: a loss is a mean over another part of the terms than the microbatch is of the batch.
        """
        recorded = [(share, terms) for share, terms in self._recorded if terms]
        self._recorded = []
        if len({tuple(function for function, _ in terms) for _, terms in recorded}) != 1:
            return  # other losses for other microbatches
        shares = torch.tensor([share for share, _ in recorded], dtype=torch.float64)
        for calls in zip(*(terms for _, terms in recorded), strict=True):
            counts = torch.stack([count for _, count in calls]).double().cpu()
            if not torch.allclose(counts * shares.sum(), shares * counts.sum(), rtol=1e-5, atol=0.0):
                raise ValueError(
                    _UNEQUAL.format(
                        function=calls[0][0], terms=_shown(counts.tolist()), shares=_shown(shares.tolist()),
                        have=self._have,
                    )
                )  # fmt: skip


def _shown(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers)
