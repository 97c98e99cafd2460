"""Counts the terms of mean losses: a mean over microbatches that differs from that over the batch is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

_Terms = tuple[str, Tensor, Any]  # function, number of terms, node of the result in the graph
_PARAMETERS: Final = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
_UNEQUAL: Final = (
    "{function} is a mean over {terms} in the microbatches of this batch, which {have} parts {shares} of it, so "
    "the mean over microbatches is not that of the batch. Let batch_weight(self, batch) of the module return the sum "
    "of the weights of the targets that are not ignored; or divide a sum by the samples; or set microbatches=1"
)


@final
class LossTerms(TorchFunctionMode):
    """While active, records the number of terms of each mean of `F.cross_entropy` and `F.nll_loss`.

    Args:
        weighted: `batch_weight` determines the parts of the microbatches in the batch.
    """

    def __init__(self, *, weighted: bool) -> None:
        super().__init__()
        self._have = "by batch_weight are" if weighted else "are"
        self._terms: list[_Terms] = []  # of the present microbatch, in the order of calls
        self._recorded: list[tuple[float, Any, list[_Terms]]] = []  # by microbatch: its part, node of its loss, terms

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        result = func(*args, **options)
        if (func is F.cross_entropy or func is F.nll_loss) and result.grad_fn is not None and not result.dim():
            self._note(func.__name__, dict(zip(_PARAMETERS, args, strict=False)) | options, result.grad_fn)
        return result

    def _note(self, function: str, named: dict[str, Any], node: Any) -> None:
        target = named["target"]
        if type(target) is not Tensor or target.is_floating_point() or named.get("reduction", "mean") != "mean":
            return
        used = target != named.get("ignore_index", -100)
        weight = named.get("weight")
        self._terms.append((function, used.sum() if weight is None else weight.detach()[target[used]].sum(), node))

    def end_microbatch(self, share: float, output: Any) -> None:
        """End the step of a microbatch.

        Args:
            share: part of the microbatch in the batch.
            output: of the step: a loss, a mapping with "loss", or None.
        """
        terms, self._terms = self._terms, []
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, Tensor) and loss.grad_fn is not None and terms:
            self._recorded.append((share, loss.grad_fn, terms))

    def check(self) -> None:
        """Compare the microbatches of a batch, and forget them.

        Raises:
            ValueError: a loss is a mean over terms whose part in the batch differs from that of the microbatch.
        """
        recorded, self._recorded = self._recorded, []
        if len({tuple(function for function, *_ in terms) for _, _, terms in recorded}) != 1:
            return  # other losses for other microbatches
        shares = torch.tensor([share for share, *_ in recorded], dtype=torch.float64)
        for calls in zip(*(terms for *_, terms in recorded), strict=True):
            counts = torch.stack([count for _, count, _ in calls]).double().cpu()
            if torch.allclose(counts * shares.sum(), shares * counts.sum(), rtol=1e-5, atol=0.0):
                continue
            if any(_depends(loss, node) for (_, loss, _), (*_, node) in zip(recorded, calls, strict=True)):
                raise ValueError(
                    _UNEQUAL.format(
                        function=calls[0][0], terms=_shown(counts.tolist()), shares=_shown(shares.tolist()),
                        have=self._have,
                    )
                )  # fmt: skip


def _depends(loss: Any, node: Any) -> bool:
    """Return whether a loss depends on a result, by their nodes in the graph of autograd; a metric may not."""
    seen, following = {loss}, [loss]
    while following:
        present = following.pop()
        if present is node:
            return True
        new = [other for other, _ in present.next_functions if other is not None and other not in seen]
        seen.update(new)
        following += new
    return False


def _shown(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers)
