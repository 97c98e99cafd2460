"""Counts the terms of means in a loss: a mean over microbatches that differs from that over the batch is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

_Terms = tuple[str, Any, Any]  # function, number of terms (a tensor or a number), node of the result in the graph
_TARGETS: Final = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
_LOSSES: Final = tuple(
    getattr(F, f"{name}{ending}")
    for ending, names in {
        "_loss": "mse l1 smooth_l1 huber soft_margin multilabel_soft_margin poisson_nll gaussian_nll hinge_embedding "
        "cosine_embedding margin_ranking multi_margin multilabel_margin triplet_margin",
        "": "binary_cross_entropy binary_cross_entropy_with_logits kl_div",
    }.items()
    for name in names.split()
)
_MEANS: Final = (torch.mean, Tensor.mean)
_DIVISIONS: Final = (torch.div, torch.true_divide, Tensor.div, Tensor.div_, Tensor.true_divide)
_SELECTIONS: Final = (
    torch.topk, Tensor.topk, torch.sort, Tensor.sort, torch.kthvalue, Tensor.kthvalue, torch.median, Tensor.median,
    torch.quantile, Tensor.quantile,
)  # fmt: skip
_BY_TARGETS: Final = ("cross_entropy", "nll_loss")
_UNEQUAL: Final = (
    "{function} is a mean over {terms} in the microbatches of this batch, which {have} parts {shares} of it, so "
    "the mean over microbatches is not that of the batch. Let batch_weight(self, batch) of the module return the "
    "number of terms, such as the sum of the weights of the targets that are not ignored; or divide a sum by the "
    "samples; or set microbatches=1"
)
_SELECTED: Final = (
    "the loss depends on {function} over {values} values of {samples} samples: a pipeline computes the samples of a "
    "batch in microbatches, and would select among the samples of each microbatch. Select within each sample, such as "
    "values.view(samples, -1).topk(k, dim=1); or set microbatches=1"
)


@final
class LossTerms(TorchFunctionMode):
    """While active, records the number of terms of each mean that the loss may depend on.

    Means are those of `torch.mean` over the first dimension, losses of `torch.nn.functional` with reduction="mean", and
    divisions of a number by a number. Selections over a vector of all samples, such as `torch.topk`, are recorded too.

    Args:
        weighted: `batch_weight` determines the parts of the microbatches in the batch.
    """

    def __init__(self, *, weighted: bool) -> None:
        super().__init__()
        self._have = "by batch_weight are" if weighted else "are"
        self._terms: list[_Terms] = []  # of the present microbatch, in the order of calls
        self._selected: list[tuple[str, int, Any]] = []  # selections of the present microbatch
        self._recorded: list[tuple[float, Any, list[_Terms]]] = []  # by microbatch: its part, node of its loss, terms

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        result = func(*args, **options)
        if func in _RECORDED:
            first = result if isinstance(result, Tensor) else result[0]
            if first.grad_fn is not None:
                _RECORDED[func](self, func.__name__.strip("_"), args, options, first)
        return result

    def _note_targets(self, function: str, args: tuple[Any, ...], options: Any, result: Tensor) -> None:
        named = dict(zip(_TARGETS, args, strict=False)) | options
        target = named["target"]
        if result.dim() or type(target) is not Tensor or named.get("reduction", "mean") != "mean":
            return
        if target.is_floating_point():  # probabilities of the classes
            self._terms.append((function, target.numel(), result.grad_fn))
            return
        used = target != named.get("ignore_index", -100)
        weight = named.get("weight")
        terms = used.sum() if weight is None else weight.detach()[target[used]].sum()
        self._terms.append((function, terms, result.grad_fn))

    def _note_loss(self, function: str, args: tuple[Any, ...], options: Any, result: Tensor) -> None:
        if not result.dim() and options.get("reduction", "mean") == "mean":
            sizes = [value.numel() for value in (*args, *options.values()) if isinstance(value, Tensor)]
            self._terms.append((function, max(sizes), result.grad_fn))

    def _note_mean(self, function: str, args: tuple[Any, ...], options: Any, result: Tensor) -> None:
        values = args[0] if args else options["input"]
        dim = args[1] if len(args) > 1 else options.get("dim", options.get("axis"))
        dims = range(values.dim()) if dim is None or dim == () else (dim,) if isinstance(dim, int) else dim
        reduced = {number % values.dim() for number in dims} if values.dim() else set()
        if 0 in reduced:
            terms = math.prod(values.shape[number] for number in reduced)
            self._terms.append((function, terms, result.grad_fn))

    def _note_division(self, function: str, args: tuple[Any, ...], options: Any, result: Tensor) -> None:
        terms = args[1] if len(args) > 1 else options["other"]
        if not result.dim() and not options.get("rounding_mode"):
            self._terms.append(("a division", terms.detach() if isinstance(terms, Tensor) else terms, result.grad_fn))

    def _note_selection(self, function: str, args: tuple[Any, ...], options: Any, result: Tensor) -> None:
        values = args[0] if args else options["input"]
        if values.dim() == 1 and len(values) > 1:
            self._selected.append((function, len(values), result.grad_fn))

    def end_microbatch(self, share: float, output: Any, samples: int) -> None:
        """End the step of a microbatch.

        Args:
            share: part of the microbatch in the batch.
            output: of the step: a loss, a mapping with "loss", or None.
            samples: number of samples of the microbatch.

        Raises:
            ValueError: the loss depends on a selection among the samples of the microbatch.
        """
        terms, self._terms = self._terms, []
        selected, self._selected = self._selected, []
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor) or loss.grad_fn is None or not share:
            return
        for function, values, node in selected:
            if values % samples == 0 and _depends(loss.grad_fn, node):
                raise ValueError(_SELECTED.format(function=function, values=values, samples=samples))
        if terms:
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
            counts, precision = _numbers([count for _, count, _ in calls])
            if torch.allclose(counts * shares.sum(), shares * counts.sum(), rtol=precision, atol=0.0):
                continue
            if calls[0][0] not in _BY_TARGETS and bool((counts == counts[0]).all()):
                continue  # a constant, or a mean over parameters
            if any(_depends(loss, node) for (_, loss, _), (*_, node) in zip(recorded, calls, strict=True)):
                raise ValueError(
                    _UNEQUAL.format(
                        function=calls[0][0], terms=_shown(counts.tolist()), shares=_shown(shares.tolist()),
                        have=self._have,
                    )
                )  # fmt: skip


_RECORDED: Final = (
    dict.fromkeys((F.cross_entropy, F.nll_loss), LossTerms._note_targets)
    | dict.fromkeys(_LOSSES, LossTerms._note_loss)
    | dict.fromkeys(_MEANS, LossTerms._note_mean)
    | dict.fromkeys(_DIVISIONS, LossTerms._note_division)
    | dict.fromkeys(_SELECTIONS, LossTerms._note_selection)
)


def _numbers(counts: Sequence[Any]) -> tuple[Tensor, float]:
    """Return counts in float64, and the relative difference that their rounding explains."""
    tensors = [count for count in counts if isinstance(count, Tensor)]
    dtype = tensors[0].dtype if tensors else torch.float64
    precision = max(1e-5, 2 * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0)
    if len(tensors) == len(counts):
        return torch.stack(tensors).double().cpu(), precision
    return torch.tensor([float(count) for count in counts], dtype=torch.float64), precision


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
