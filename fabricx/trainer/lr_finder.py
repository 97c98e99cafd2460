"""A learning rate by a range test (Smith, 2017): the rate rises at each step, and the loss shows which rates train."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, final

import torch
from torch.optim import Optimizer

from fabricx.core.callback import Callback
from fabricx.core.tensors.transfer import batch_size_of

Sweep = Literal["exponential", "linear"]
SWEEPS: Final = ("exponential", "linear")
_SMOOTHING: Final = 0.98  # of the loss, in a step
_SETTLED: Final = 10  # steps after which the smoothed loss is no longer that of single batches


def rate_at(step: int, steps: int, least: float, most: float, mode: Sweep) -> float:
    """Return the learning rate of a step of the test.

    >>> [round(rate_at(step, 3, 0.01, 1.0, "exponential"), 6) for step in range(3)]
    [0.01, 0.1, 1.0]

    Args:
        step: from 0.
        steps: steps of the whole test.
        least, most: first and last rate.
        mode: mode of the rise.
    """
    part = step / max(1, steps - 1)
    return least + (most - least) * part if mode == "linear" else least * (most / least) ** part


@dataclass
class LRFinder:
    """The result of a learning rate test.

    Attributes:
        mode, lr_min, lr_max, num_training: arguments of the test.
        results: "lr" and "loss" of each step; the loss is smoothed exponentially.
    """

    mode: Sweep
    lr_min: float
    lr_max: float
    num_training: int
    results: dict[str, list[float]] = field(default_factory=lambda: {"lr": [], "loss": []})

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return the rate at which the loss falls fastest from step to step.

        Args:
            skip_begin, skip_end: steps at the ends of the test that do not count.

        Returns:
            the rate; None if fewer than 2 steps have a finite loss.
        """
        index = steepest(self.results["loss"], skip_begin, skip_end)
        return None if index is None else self.results["lr"][index]

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Plot the loss against the rate with matplotlib.

        Args:
            suggest: mark the suggestion.
            show: open a window.
            ax: axes to draw in; None for a new figure.

        Returns:
            the figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]

        figure, axes = plt.subplots() if ax is None else (ax.figure, ax)
        axes.plot(self.results["lr"], self.results["loss"])
        axes.set_xscale("log" if self.mode == "exponential" else "linear")
        axes.set(xlabel="learning rate", ylabel="loss")
        if suggest and (index := steepest(self.results["loss"], 10, 1)) is not None:
            axes.plot(self.results["lr"][index], self.results["loss"][index], "ro")
        if show:
            plt.show()
        return figure


def steepest(losses: Sequence[float], skip_begin: int, skip_end: int) -> int | None:
    """Return the position at which a curve falls fastest, or None if it has fewer than 2 finite values.

    >>> steepest([9.0, 8.0, 4.0, 3.0, 3.5], 0, 0)
    1

    Args:
        losses: losses by step.
        skip_begin, skip_end: number of values at the ends that do not count.
    """
    kept = range(len(losses))[skip_begin : len(losses) - skip_end]
    finite = [index for index in kept if math.isfinite(losses[index])]
    if len(finite) < 2:
        return None
    [slopes] = torch.gradient(torch.tensor([losses[index] for index in finite], dtype=torch.float64))
    return finite[int(slopes.argmin())]


@final
class RateSweep(Callback):
    """Raises the learning rate of all groups at each step, and records the mean loss over all ranks.

    Args:
        finder: receives the rates and losses.
        early_stop_threshold: the test ends when the loss exceeds the least loss by this factor, unless the least loss
            is negative; None: never.
    """

    needs_all_ranks: ClassVar[bool] = True
    every_batch: ClassVar[bool] = True  # a rank without a sample takes part in the sum over ranks

    def __init__(self, finder: LRFinder, early_stop_threshold: float | None) -> None:
        self.finder = finder
        self.early_stop_threshold = early_stop_threshold
        self._step = 0
        self._sum, self._weight = 0.0, 0.0  # of the present window
        self._average = 0.0
        self._least = math.inf

    def check_fit(self, trainer: Any, pl_module: Any, global_batch: int | None) -> None:
        if not trainer.strategy.traits.lockstep:
            raise ValueError(
                f"lr_find: under {type(trainer.strategy).__name__} ranks work at their own pace, so no loss has "
                "a single learning rate: call lr_find with a Trainer(strategy='ddp', devices=...) or with one device"
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._step = trainer.global_step
        if pl_module.automatic_optimization:  # else the module may read them
            trainer.lr_schedulers.clear()  # they would set other rates, or need metrics that a trial does not have
        self._set_rate(trainer.optimizers)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor):
            size = float(batch_size_of(batch) or 1)
            self._sum, self._weight = self._sum + float(loss.detach()) * size, self._weight + size
        if trainer.global_step == self._step:  # within an accumulation window
            return
        self._record(trainer)
        self._step = trainer.global_step
        self._set_rate(trainer.optimizers)

    def _record(self, trainer: Any) -> None:
        world = trainer.world.axis("data")
        total = torch.tensor([self._sum, self._weight], dtype=torch.float64, device=world.device)
        if world.size > 1:
            total = world.all_reduce(total)
        loss = float(total[0] / total[1]) if total[1] > 0 else math.nan
        self._sum = self._weight = 0.0
        results, count = self.finder.results, len(self.finder.results["lr"]) + 1
        self._average = _SMOOTHING * self._average + (1 - _SMOOTHING) * loss
        smooth = self._average / (1 - _SMOOTHING**count)
        results["lr"].append(self._rate(count - 1))
        results["loss"].append(smooth)
        factor = self.early_stop_threshold
        most = factor * self._least if factor is not None and self._least > 0 else math.inf
        diverges = factor is not None and not smooth <= most
        if count > _SETTLED and diverges:  # on all ranks: the loss is that of all
            trainer.should_stop = True
        if smooth < self._least:
            self._least = smooth

    def _rate(self, step: int) -> float:
        finder = self.finder
        return rate_at(step, finder.num_training, finder.lr_min, finder.lr_max, finder.mode)

    def _set_rate(self, optimizers: Iterable[Optimizer]) -> None:
        rate = self._rate(len(self.finder.results["lr"]))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
