"""The values of a logged metric: that of the latest step, and the sum of the epoch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fabricx.core.tensors.reductions import Reduction

EXACT: Final = (torch.float32, torch.float64)  # dtypes whose sums neither overflow nor stop growing
VALUES: Final = ("step", "value", "weight", "total", "weights")  # attributes that `Series.add` changes


class Series:
    """The values of a logged metric: that of the latest step, and the sum of the epoch.

    The value of a step is the weighted mean (or sum, maximum, minimum) over the microbatches of that weight update.
    While a step has a single value, `add` only sets a few attributes: arithmetic is deferred until a value is read.

    Args:
        reduction: "mean", "sum", "max" or "min".
        on_step: keep the value of the latest step.
        on_epoch: accumulate over the epoch.
        bar: show in the progress bar.
        to_logger: write to loggers.
        local: do not reduce over ranks.
    """

    __slots__ = (
        "asked",
        "bar",
        "epoch_batch",
        "inside",
        "local",
        "on_epoch",
        "on_step",
        "reduction",
        "step",
        "step_batch",
        "to_logger",
        "total",
        "value",
        "weight",
        "weights",
    )

    def __init__(
        self, reduction: Reduction, *, on_step: bool, on_epoch: bool, bar: bool, to_logger: bool, local: bool
    ) -> None:
        self.reduction: Reduction = reduction
        self.on_step = on_step
        self.on_epoch = on_epoch
        self.bar = bar
        self.to_logger = to_logger
        self.local = local
        self.asked: Any = None  # arguments of the newest `log` call that was validated against these options
        self.inside: bool | None = None  # logged within a batch (True) or between batches (False); None if unknown
        self.step = -1
        self.value: Any = None  # weighted mean if it comes from several microbatches
        self.weight: float = 0.0
        self.total: Any = None
        self.weights: float = 0.0
        # Number of this rank's batch in the epoch, from 1, that logged the first value of the step, and of the epoch;
        # 0 for a value between batches, infinity for no value.
        self.step_batch = self.epoch_batch = math.inf

    def add(self, value: Any, weight: float, step: int, batch: int = 0) -> None:
        """Add a value.

        Args:
            value: a number or a detached one-element tensor.
            weight: number of samples.
            step: number of the weight update.
            batch: number of the batch in the epoch, from 1; 0 between batches.
        """
        if self.on_step:
            if step != self.step:
                self.step, self.value, self.weight, self.step_batch = step, value, weight, batch
            else:
                self.value = join(self.reduction, self.value, self.weight, value, weight)
                self.weight += weight
        if self.on_epoch:
            tensors = type(value) is Tensor
            if tensors and type(self.total) is not Tensor:
                value = _in_double_precision(value)
            if self.total is None:
                self.total = value * weight if self.reduction == "mean" else value + 0
                self.epoch_batch = batch
            elif self.reduction == "mean":
                if tensors:
                    # A sum that a recovery has restored is a number; `add` with a factor may round once, not twice.
                    total = self.total if type(self.total) is Tensor else value.new_tensor(self.total)
                    self.total = torch.add(total, value, alpha=weight)
                else:
                    self.total = self.total + value * weight
            else:
                self.total = join(self.reduction, self.total, 1.0, value, 1.0)
            self.weights += weight

    def packed(self, *, epoch: bool) -> tuple[Any, float]:
        """Return the operands of the reduction over ranks: (sum, weight) of a mean, (value, weight) otherwise.

        Args:
            epoch: return the sum of the epoch; otherwise the value of the latest step.
        """
        if epoch:
            return self.total, self.weights
        return (self.value * self.weight if self.reduction == "mean" else self.value), self.weight

    def kind(self) -> tuple[Any, ...]:
        """Return the options with which another rank can create the same series."""
        return self.reduction, self.on_step, self.on_epoch, self.bar, self.to_logger, self.local

    def logged_as(self) -> tuple[Any, ...]:
        """Return the properties that are equal on all ranks: `kind`; for a mean, whether it is logged in batches."""
        return *self.kind(), self.inside if self.reduction == "mean" else None

    @classmethod
    def of_kind(cls, kind: tuple[Any, ...]) -> Series:
        """Create an empty series.

        Args:
            kind: result of `kind`.
        """
        reduction, on_step, on_epoch, bar, to_logger, local = kind
        return cls(reduction, on_step=on_step, on_epoch=on_epoch, bar=bar, to_logger=to_logger, local=local)

    @property
    def neutral(self) -> float:
        """Return the value of a rank without a batch, which changes no reduction."""
        return {"max": -math.inf, "min": math.inf}.get(self.reduction, 0.0)

    def contribute_nothing(self) -> None:
        """Set the neutral sum of the epoch, because this rank had no batch."""
        self.total, self.weights = self.neutral, 0.0

    def forget_epoch(self) -> None:
        """Reset the sum of the epoch."""
        self.total, self.weights, self.epoch_batch = None, 0.0, math.inf


def _in_double_precision(value: Tensor) -> Tensor:
    """Convert the first value of an epoch, so that the order of additions has a negligible effect on the sum."""
    return value if value.device.type == "mps" else value.double()  # mps has no double precision


def join(reduction: Reduction, old: Any, old_weight: float, new: Any, new_weight: float) -> Any:
    """Return the reduction of two values.

    Args:
        reduction: "mean", "sum", "max" or "min".
        old, new: a number or a tensor of one element.
        old_weight, new_weight: weights of the values in a mean.
    """
    if reduction == "mean":
        whole = old_weight + new_weight
        return (old * old_weight + new * new_weight) / whole if whole else new
    if reduction == "sum":
        return old + new
    pick: Callable[[Tensor, Tensor], Tensor] = torch.maximum if reduction == "max" else torch.minimum
    exact = [value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64) for value in (old, new)]
    return pick(*exact)


def join_latest(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge results of `Metrics.latest` of several ranks; only values of the newest step are kept.

    Args:
        ranks: result of each rank: (kind, step, value, weight) by name.
    """
    newest = max((step for latest in ranks for _, step, *_ in latest.values()), default=-1)
    merged: dict[str, Any] = {}
    for latest in ranks:
        for name, (kind, step, value, weight) in latest.items():
            if step != newest or value is None:  # a rank without a value may have the series
                continue
            if name in merged and not kind[-1]:  # for a local value, the first rank decides
                _, _, before, weight_before = merged[name]
                merged[name] = [
                    kind, step, join(kind[0], before, weight_before, value, weight), weight_before + weight,
                ]  # fmt: skip
            merged.setdefault(name, [kind, step, value, weight])
    return merged


def as_value(value: Any, name: str) -> Any:
    """Convert a logged value to a number, or a detached tensor of one element and an exact dtype.

    Args:
        value: argument of `log`.
        name: name for the message.

    Raises:
        ValueError: the value is neither a real number nor a tensor of one.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"self.log({name!r}, ...) got a tensor of shape {tuple(value.shape)}; log one number, "
                "such as its mean()"
            )
        detached = value.detach()
        if detached.is_complex():
            raise ValueError(f"self.log({name!r}, ...) got a complex number; log its abs(), or real and imag")
        if detached.dtype not in EXACT:
            # A mean of integers would be in float32, which has 24 bits.
            detached = detached.float() if detached.is_floating_point() else _in_double_precision(detached.long())
        return detached if detached.dim() == 0 else detached.reshape(())
    if isinstance(value, (bool, int, float)):
        return float(value)
    if hasattr(value, "__float__"):
        return float(value)
    raise ValueError(
        f"self.log({name!r}, ...) got {type(value).__name__}; it accepts a number, a tensor of one element or a "
        "torchmetrics.Metric"
    )


def as_single(name: str, computed: Any) -> Tensor:
    """Return the value of a metric object as a tensor of one element.

    Args:
        name: name for the message.
        computed: result of its `compute`.

    Raises:
        ValueError: the result is not a single number.
    """
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        value = torch.as_tensor(computed)
        if value.numel() == 1:
            return value
    kind = f"a tensor of shape {tuple(computed.shape)}" if isinstance(computed, Tensor) else type(computed).__name__
    raise ValueError(
        f"self.log({name!r}, ...): compute() of the metric object returns {kind} instead of one number; call compute() "
        "at the end of the epoch, and log its parts by names of their own"
    )
