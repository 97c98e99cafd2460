"""Stop training once a metric no longer improves."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

import torch
from torch import Tensor

from fabricx.callbacks.metric_timing import has_validation, looks_at_epoch_end
from fabricx.core.callback import Callback
from fabricx.errors import did_you_mean

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.trainer.trainer import Trainer

Mode = Literal["min", "max"]


@dataclass(frozen=True)
class Rule:
    """When to stop: the arguments of `EarlyStopping` that a decision depends on."""

    mode: Mode = "min"
    min_delta: float = 0.0
    patience: int = 3
    check_finite: bool = True
    stopping_threshold: float | None = None
    divergence_threshold: float | None = None


@dataclass(frozen=True)
class Verdict:
    """What a new score means: the best so far, checks without improvement, and why to stop, or None to go on."""

    best: float
    waited: int
    reason: str | None = None


def judge(rule: Rule, score: float, best: float, waited: int) -> Verdict:
    """Decide about one new score.

    >>> judge(Rule(patience=2), 0.5, best=0.4, waited=1)
    Verdict(best=0.4, waited=2, reason='it has not improved on 0.4 in the last 2 checks')

    Args:
        rule: when to stop.
        score: the new value of the metric.
        best: the best value before; infinitely bad at the beginning.
        waited: checks without improvement before this one.
    """
    sign = 1.0 if rule.mode == "max" else -1.0
    if rule.check_finite and not math.isfinite(score):
        return Verdict(best, waited, f"it is {score}, which is not a finite number")
    if rule.stopping_threshold is not None and sign * score > sign * rule.stopping_threshold:
        return Verdict(score, 0, f"{score:.4g} is better than the threshold of {rule.stopping_threshold:.4g}")
    if rule.divergence_threshold is not None and sign * score < sign * rule.divergence_threshold:
        return Verdict(best, waited, f"{score:.4g} is worse than the threshold of {rule.divergence_threshold:.4g}")
    if sign * score - rule.min_delta > sign * best:
        return Verdict(score, 0)
    waited += 1
    if waited < rule.patience:
        return Verdict(best, waited)
    enough = f" by at least {rule.min_delta:.4g}" if rule.min_delta else ""
    return Verdict(best, waited, f"it has not improved on {best:.4g}{enough} in the last {waited} checks")


@final
class EarlyStopping(Callback):
    """Watch a metric and stop training once it has not improved for `patience` checks.

    Attributes:
        stopped_epoch: the epoch in which training was stopped; 0 if it wasn't.
        wait_count: checks since the last improvement.
        best_score: the best value so far, a tensor of one element.
        reason: why training was stopped, in words, or None.

    Args:
        monitor: the name of a logged metric.
        min_delta: a smaller improvement counts as none.
        patience: how many checks in a row may pass without improvement. Checks, not epochs: validation may run more
            or less often than once an epoch.
        mode: "min" if smaller is better, "max" if larger is.
        strict: raise if the metric was not logged; otherwise that check is left out.
        check_finite: stop at once if the metric is NaN or infinite.
        stopping_threshold: stop at once when the metric is better than this.
        divergence_threshold: stop at once when the metric is worse than this.
        check_on_train_epoch_end: check at the end of training epochs instead of after validation. By default that is
            so where validation runs once, at the end of every epoch, or not at all.
        verbose: print improvements and the reason for stopping.

    Raises:
        ValueError: an argument is out of its range.
    """

    watches_metrics: ClassVar[bool] = True
    needs_all_ranks: ClassVar[bool] = True

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        mode: Mode = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        verbose: bool = False,
    ) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f'EarlyStopping(mode={mode!r}): it can be "min" or "max"')
        if patience < 0:
            raise ValueError(f"EarlyStopping(patience={patience}): it can't be negative")
        self.monitor = monitor
        self.mode: Mode = mode
        self.patience = patience
        self.strict = strict
        self.verbose = verbose
        self.check_on_train_epoch_end = check_on_train_epoch_end
        self.rule = Rule(mode, abs(min_delta), patience, check_finite, stopping_threshold, divergence_threshold)
        self.wait_count = 0
        self.stopped_epoch = 0
        self.reason: str | None = None
        self._fitting = False
        self._validated = False
        self._stops = False  # has the run of the checkpoint stopped, by the same rule?
        self._best = -math.inf if mode == "max" else math.inf

    @property
    def min_delta(self) -> float:
        """Return the smallest improvement that counts."""
        return self.rule.min_delta

    @property
    def best_score(self) -> Tensor:
        """Return the best value so far, as a tensor of one element; infinitely bad before the first check."""
        return torch.tensor(self._best)

    @property
    def state_key(self) -> str:
        """Return a name that tells apart several of this class in one run."""
        return f"EarlyStopping(monitor={self.monitor!r}, mode={self.mode!r})"

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._fitting = stage == "fit"

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        if self._stops:
            trainer.print(f"an earlier run has stopped early, because of {self.reason}; another patience continues it")
            trainer.should_stop, self._stops = True, False

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        if not self._fitting or trainer.sanity_checking:
            return
        self._validated = True
        if not looks_at_epoch_end(trainer, self.check_on_train_epoch_end):
            self._check(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        if looks_at_epoch_end(trainer, self.check_on_train_epoch_end):
            self._check(trainer)

    def _check(self, trainer: Trainer) -> None:
        if trainer.fast_dev_run:
            return
        logged = trainer.callback_metrics
        if self.monitor not in logged:
            # A run that ends in the middle of its first epoch has not come to validation yet: nothing is wrong.
            if self.strict and (self._validated or not has_validation(trainer)):
                raise ValueError(
                    f"EarlyStopping(monitor={self.monitor!r}): no metric of that name was logged."
                    f"{did_you_mean(self.monitor, logged)}\n  logged: {', '.join(sorted(logged)) or 'nothing'}\n"
                    "  log it with self.log(...), or give strict=False to wait until it is"
                )
            return
        score = float(logged[self.monitor])
        verdict = judge(self.rule, score, self._best, self.wait_count)
        if self.verbose and verdict.best != self._best:
            trainer.print(f"{self.monitor} improved from {self._best:.4g} to {verdict.best:.4g}")
        self._best, self.wait_count = verdict.best, verdict.waited
        if verdict.reason is not None:
            self.reason = f"{self.monitor}: {verdict.reason}"
            self.stopped_epoch = trainer.current_epoch
            trainer.should_stop = True
            if self.verbose:
                trainer.print(f"training stops early, because of {self.reason}")

    def state_dict(self) -> dict[str, Any]:
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": self._best,
            "reason": self.reason,
            "rule": asdict(self.rule),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.wait_count = state_dict["wait_count"]
        self.stopped_epoch = state_dict["stopped_epoch"]
        self._best = float(state_dict["best_score"])
        self.reason = state_dict["reason"]
        self._stops = self.reason is not None and state_dict.get("rule") == asdict(self.rule)
