"""Counts the terms of means in a loss: a mean over microbatches that differs from that over the batch is refused."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

_Site = tuple[Any, ...]  # function, and calls of the user's code that lead to it
_Terms = tuple[_Site, Any, Any]  # site, number of terms (a tensor or a number), node of the result in the graph
_PIPELINE: Final = str(Path(__file__).with_name("stages.py"))
_PARAMETRIZATIONS: Final = ("torch.nn.utils.parametri", "torch.nn.utils.spectral_norm", "torch.nn.utils.weight_norm")
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
_MEANS: Final = (torch.mean, Tensor.mean, torch.nanmean, Tensor.nanmean)
_DIVISIONS: Final = (
    torch.div, torch.divide, torch.true_divide, Tensor.div, Tensor.divide, Tensor.true_divide, Tensor.div_,
    Tensor.divide_, Tensor.true_divide_,
)  # fmt: skip
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


@dataclass(frozen=True)
class _Microbatch:
    """A microbatch with a loss: its part in the batch, samples, node of the loss, and counts and nodes by site."""

    share: float
    samples: int
    loss: Any
    terms: dict[_Site, list[tuple[Any, Any]]]


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
        self._selected: list[_Terms] = []  # selections of the present microbatch, with the number of values
        self._recorded: list[_Microbatch] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        result = func(*args, **options)
        if func in _RECORDED:
            first = result if isinstance(result, Tensor) else result[0]
            calls = _calls() if first.grad_fn is not None else None
            if calls is not None:
                _RECORDED[func](self, (func.__name__.strip("_"), *calls), args, options, first)
        return result

    def _note_targets(self, site: _Site, args: tuple[Any, ...], options: Any, result: Tensor) -> None:
        named = dict(zip(_TARGETS, args, strict=False)) | options
        target = named["target"]
        if result.dim() or type(target) is not Tensor or not _is_mean(named):
            return
        if target.is_floating_point():  # probabilities of the classes
            self._terms.append((site, target.numel(), result.grad_fn))
            return
        used = target != named.get("ignore_index", -100)
        weight = named.get("weight")
        terms = used.sum() if weight is None else weight.detach()[target[used]].sum()
        self._terms.append((site, terms, result.grad_fn))

    def _note_loss(self, site: _Site, args: tuple[Any, ...], options: Any, result: Tensor) -> None:
        options = dict(zip(("size_average", "reduce", "reduction"), args[2:], strict=False)) | options
        if not result.dim() and _is_mean(options):
            terms = max(value.numel() for value in (*args, *options.values()) if isinstance(value, Tensor))
            self._terms.append((site, terms, result.grad_fn))
        elif options.get("reduction") == "batchmean":
            self._terms.append((site, len(args[0] if args else options["input"]), result.grad_fn))

    def _note_mean(self, site: _Site, args: tuple[Any, ...], options: Any, result: Tensor) -> None:
        values = args[0] if args else options["input"]
        dim = args[1] if len(args) > 1 else options.get("dim", options.get("axis"))
        dims = range(values.dim()) if dim is None or dim == () else (dim,) if hasattr(dim, "__index__") else dim
        reduced = {operator.index(number) % values.dim() for number in dims} if values.dim() else set()
        if 0 in reduced:
            terms: Any = math.prod(values.shape[number] for number in reduced)
            if site[0] == "nanmean":
                terms = values.detach().isnan().logical_not_().sum()
            self._terms.append((site, terms, result.grad_fn))

    def _note_division(self, site: _Site, args: tuple[Any, ...], options: Any, result: Tensor) -> None:
        terms = args[1] if len(args) > 1 else options["other"]
        if options.get("rounding_mode") or (isinstance(terms, Tensor) and terms.dim()):
            return
        if isinstance(terms, Tensor):
            terms = terms.detach().clone()  # it may change in place
        elif result.dim():
            return
        self._terms.append((("a division", *site[1:]), terms, result.grad_fn))

    def _note_selection(self, site: _Site, args: tuple[Any, ...], options: Any, result: Tensor) -> None:
        values = args[0] if args else options["input"]
        if values.dim() == 1 and len(values) > 1:
            self._selected.append((site, len(values), result.grad_fn))

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
        for site, calls in _by_site(selected).items():
            if _is_loop([len(calls)], [samples]):
                continue
            for values, node in calls:
                if values % samples == 0 and _depends(loss.grad_fn, node) and not _of_parameters(node):
                    raise ValueError(_SELECTED.format(function=site[0], values=values, samples=samples))
        self._recorded.append(_Microbatch(share, samples, loss.grad_fn, _by_site(terms)))

    def check(self) -> None:
        """Compare the microbatches of a batch, and forget them.

        Raises:
            ValueError: a loss is a mean over terms whose part in the batch differs from that of the microbatch.
        """
        recorded, self._recorded = self._recorded, []
        shares = torch.tensor([microbatch.share for microbatch in recorded], dtype=torch.float64)
        for site in dict.fromkeys(site for microbatch in recorded for site in microbatch.terms):
            calls = [microbatch.terms.get(site, []) for microbatch in recorded]
            if _is_loop([len(of) for of in calls], [microbatch.samples for microbatch in recorded]):
                continue  # over the samples: a mean of each
            counts, precision = _sums([[count for count, _ in of] for of in calls])
            if torch.allclose(counts * shares.sum(), shares * counts.sum(), rtol=precision, atol=0.0):
                continue
            if site[0] not in _BY_TARGETS and bool((counts == counts[0]).all()):
                continue  # a constant, or a mean over parameters
            if any(
                _depends(microbatch.loss, node)
                for microbatch, of in zip(recorded, calls, strict=True)
                for _, node in of
            ):
                raise ValueError(
                    _UNEQUAL.format(
                        function=site[0], terms=_shown(counts.tolist()), shares=_shown(shares.tolist()),
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


def _calls() -> tuple[Any, ...] | None:
    """Return the calls of the user's code that are being executed, from the innermost; alike in each pass of a loop.

    None in a parametrization, such as spectral normalisation, which computes weights and no mean over samples.
    """
    calls: list[Any] = []
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename != _PIPELINE:
        if frame.f_globals.get("__name__", "").startswith(_PARAMETRIZATIONS):
            return None
        calls.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(calls)


def _is_mean(options: Mapping[str, Any]) -> bool:
    """Return whether a loss is a mean, by its arguments, of which two are from former versions of torch."""
    sums = options.get("size_average") is False or options.get("reduce") is False
    return options.get("reduction", "mean") == "mean" and not sums


def _is_loop(calls: Sequence[int], samples: Sequence[int]) -> bool:
    """Return whether a site is called for each sample, by its calls in microbatches; unknown for single samples."""
    whole = all(count and count % size == 0 for count, size in zip(calls, samples, strict=True))
    return whole and max(samples) > 1


def _by_site(terms: Sequence[_Terms]) -> dict[_Site, list[tuple[Any, Any]]]:
    """Return the counts and nodes of each site, in the order of calls."""
    sites: dict[_Site, list[tuple[Any, Any]]] = {}
    for site, count, node in terms:
        sites.setdefault(site, []).append((count, node))
    return sites


def _sums(counts: Sequence[Sequence[Any]]) -> tuple[Tensor, float]:
    """Return the sum of the counts of each microbatch in float64, and a relative difference that rounding explains."""
    numbers = [count for of in counts for count in of]
    tensors = [count for count in numbers if isinstance(count, Tensor)]
    dtype = tensors[0].dtype if tensors else torch.float64
    precision = max(1e-5, 2 * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0)
    values = iter(torch.stack(tensors).double().tolist() if len(tensors) == len(numbers) else map(float, numbers))
    return torch.tensor([sum(next(values) for _ in of) for of in counts], dtype=torch.float64), precision


def _nodes(result: Any) -> Iterator[Any]:
    """Yield the nodes of autograd's graph on which a result depends, by its node, which is the first."""
    seen, following = {result}, [result]
    while following:
        present = following.pop()
        yield present
        new = [other for other, _ in present.next_functions if other is not None and other not in seen]
        seen.update(new)
        following += new


def _depends(loss: Any, node: Any) -> bool:
    """Return whether a loss depends on a result, by their nodes; a metric may not."""
    return any(present is node for present in _nodes(loss))


def _of_parameters(node: Any) -> bool:
    """Return whether a result depends on parameters of the module only, by its node."""
    leaves = (getattr(present, "variable", None) for present in _nodes(node))
    return all(leaf is None or isinstance(leaf, nn.Parameter) for leaf in leaves)


def _shown(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers)
