"""Stop training once a metric no longer improves."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

import torch
from torch import Tensor

from fabricx.callbacks.metric_timing import has_validation, reads_at_epoch_end
from fabricx.core.callback import Callback
from fabricx.core.hook_calls.former_names import renamed
from fabricx.errors import MissingMetric, did_you_mean

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.core.trainer import TrainerProtocol

Mode = Literal["min", "max"]


class EarlyStoppingReason(Enum):
    """Criteria by which training stops early, with Lightning's names and numbers."""

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4


@dataclass(frozen=True)
class Rule:
    """Arguments of `EarlyStopping` that determine the decision.

    Attributes:
        mode, min_delta, patience, check_finite, stopping_threshold, divergence_threshold: see `EarlyStopping`.
    """

    mode: Mode = "min"
    min_delta: float = 0.0
    patience: int = 3
    check_finite: bool = True
    stopping_threshold: float | None = None
    divergence_threshold: float | None = None


@dataclass(frozen=True)
class Decision:
    """Result of a check.

    Attributes:
        best: best score so far.
        checks_waited: consecutive checks without improvement.
        reason: why training stops, a text after the name of the metric; None to continue.
        kind: kind of the reason.
    """

    best: float
    checks_waited: int
    reason: str | None = None
    kind: EarlyStoppingReason = field(default=EarlyStoppingReason.NOT_STOPPED, repr=False)


def judge(rule: Rule, score: float, best: float, checks_waited: int) -> Decision:
    """Decide whether training stops after a new score.

    >>> judge(Rule(patience=2), 0.5, best=0.4, checks_waited=1)
    Decision(best=0.4, checks_waited=2, reason='did not improve on 0.4 in the last 2 checks')

    Args:
        rule: the criteria.
        score: the new value of the metric.
        best: the best value of the earlier checks; an infinity of the worse sign before the first check.
        checks_waited: consecutive earlier checks without improvement.

    Returns:
        the updated best score and number of checks, and the reason to stop, if any.
    """
    sign = 1.0 if rule.mode == "max" else -1.0
    kinds = EarlyStoppingReason
    if rule.check_finite and not math.isfinite(score):
        reason = f"= {score} is not finite"
        return Decision(best, checks_waited, reason, kinds.NON_FINITE_METRIC)
    if rule.stopping_threshold is not None and sign * score > sign * rule.stopping_threshold:
        reason = f"= {score:.4g}. Stopping threshold reached: better than {rule.stopping_threshold:.4g}"
        return Decision(best, checks_waited, reason, kinds.STOPPING_THRESHOLD)
    if rule.divergence_threshold is not None and sign * score < sign * rule.divergence_threshold:
        reason = f"= {score:.4g}. Divergence threshold reached: worse than {rule.divergence_threshold:.4g}"
        return Decision(best, checks_waited, reason, kinds.DIVERGENCE_THRESHOLD)
    if sign * score - rule.min_delta > sign * best:
        return Decision(score, 0)
    checks_waited += 1
    if checks_waited < rule.patience:
        return Decision(best, checks_waited)
    enough = f" by at least {rule.min_delta:.4g}" if rule.min_delta > 0 else ""
    reason = f"did not improve on {best:.4g}{enough} in the last {checks_waited} checks"
    return Decision(best, checks_waited, reason, kinds.PATIENCE_EXHAUSTED)


@final
class EarlyStopping(Callback):
    """Stop training once a metric has not improved for `patience` consecutive checks.

    Attributes:
        stopped_epoch: epoch in which training stopped early; 0 if it did not.
        wait_count: checks since the last improvement.
        best_score: best value so far, a scalar tensor.
        reason: sentence that explains why training stopped, or None.
        stopping_reason: the criterion by which training stopped.

    Args:
        monitor: name of a logged metric; the main rank's value counts.
        min_delta: smallest change of the metric that counts as an improvement; a negative value also counts a small
            deterioration.
        patience: consecutive checks without improvement before training stops. The unit is checks, not epochs:
            validation may run more or less often than once per epoch.
        verbose: print improvements and the reason for stopping.
        mode: "min" if smaller is better, "max" if larger is better.
        strict: raise an error if the metric was not logged; False skips the check.
        check_finite: stop immediately if the metric is NaN or infinite.
        stopping_threshold: stop immediately when the metric is better than this value.
        divergence_threshold: stop immediately when the metric is worse than this value.
        check_on_train_epoch_end: check at the end of training epochs instead of after validation. The default is True
            if validation runs once at the end of every epoch, or never.
        log_rank_zero_only: without an effect; messages are printed on the main rank.

    Raises:
        ValueError: an argument is out of range, or (during training) `monitor` was not logged and `strict` is True.
    """

    trainer_role: ClassVar = "early_stopping"
    watches_metrics: ClassVar[bool] = True
    needs_all_ranks: ClassVar[bool] = True
    former_methods: ClassVar = renamed(
        "_run_early_stopping_check _should_skip_check _evaluate_stopping_criteria _validate_condition_metric "
        "_improvement_message _log_info monitor_op",
        "on_validation_end or on_train_epoch_end, which calls its super() for a check, and may set trainer.should_stop",
    )

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: Mode = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f'EarlyStopping(mode={mode!r}): must be "min" or "max"')
        if not isinstance(patience, int) or patience < 0:
            raise ValueError(f"EarlyStopping(patience={patience!r}): must be a whole number, 0 or more")
        if not isinstance(min_delta, (int, float)):
            raise ValueError(f"EarlyStopping(min_delta={min_delta!r}): must be a number")
        self.monitor = monitor
        self.mode: Mode = mode
        self.patience = patience
        self.strict = strict
        self.verbose = verbose
        self.check_on_train_epoch_end = check_on_train_epoch_end
        self.rule = Rule(mode, min_delta, patience, check_finite, stopping_threshold, divergence_threshold)
        self.wait_count = 0
        self.stopped_epoch = 0
        self.reason: str | None = None
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self._fitting = False
        self._validated = False
        self._stopped_before = False  # the checkpoint's run stopped early under the same rule
        self._best = -math.inf if mode == "max" else math.inf

    @property
    def min_delta(self) -> float:
        """Return the smallest change that counts as an improvement."""
        return self.rule.min_delta

    @property
    def stopping_reason_message(self) -> str | None:
        """Return the sentence that explains why training stopped, or None; it can be set, as `reason`."""
        return self.reason

    @stopping_reason_message.setter
    def stopping_reason_message(self, text: str | None) -> None:
        self.reason = text

    @property
    def best_score(self) -> Tensor:
        """Return the best value so far as a scalar tensor; an infinity of the worse sign before the first check."""
        return torch.tensor(self._best)

    @property
    def state_key(self) -> str:
        """Return a key that distinguishes several `EarlyStopping` callbacks of the same run."""
        values = {"monitor": self.monitor, "mode": self.mode}
        return f"EarlyStopping{values}"

    def setup(self, trainer: TrainerProtocol, pl_module: Module, stage: str) -> None:
        self._fitting, self._validated = stage == "fit", False  # at the start of a fit nothing is logged

    def on_train_start(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        if self._stopped_before:
            trainer.print(f"the resumed run had stopped early ({self.reason}); change `patience` to continue training")
            trainer.should_stop, self._stopped_before = True, False
        else:  # an earlier fit, or the resumed run under another rule, may have stopped
            self.reason, self.stopping_reason, self.stopped_epoch = None, EarlyStoppingReason.NOT_STOPPED, 0

    def on_validation_end(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        if not self._fitting or trainer.sanity_checking:
            return
        self._validated = True
        if not reads_at_epoch_end(trainer, self.check_on_train_epoch_end):
            self._check(trainer)

    def on_train_epoch_end(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        if reads_at_epoch_end(trainer, self.check_on_train_epoch_end):
            self._check(trainer)

    def _check(self, trainer: TrainerProtocol) -> None:
        if trainer.fast_dev_run:
            return
        logged = trainer.callback_metrics
        # Ranks may have other values: with sync_dist=False, or logged on the main rank only.
        score = trainer.world.broadcast_object(float(logged[self.monitor]) if self.monitor in logged else None)
        if score is None:
            # A run that ends in the middle of its first epoch has not validated yet, which is not an error.
            if self.strict and (self._validated or not has_validation(trainer)):
                raise MissingMetric(
                    f"EarlyStopping(monitor={self.monitor!r}): no metric of that name was logged."
                    f"{did_you_mean(self.monitor, logged)}\n  logged: {', '.join(sorted(logged)) or 'nothing'}\n"
                    "  log it with self.log(...), or pass strict=False to skip the check until it is logged"
                )
            if not self.strict and (self._validated or trainer.state.closing):
                trainer.session.warn_once(
                    f"early stopping {self.monitor}",
                    f"EarlyStopping(monitor={self.monitor!r}, strict=False): no metric of that name was logged, so "
                    f"nothing is checked.{did_you_mean(self.monitor, logged)} Logged: {', '.join(sorted(logged))}",
                )
            return
        decision = judge(self.rule, score, self._best, self.wait_count)
        if self.verbose and decision.best != self._best:
            trainer.print(f"{self.monitor} improved from {self._best:.4g} to {decision.best:.4g}")
        self._best, self.wait_count = decision.best, decision.checks_waited
        if decision.reason is not None:
            self.reason, self.stopping_reason = f"{self.monitor} {decision.reason}", decision.kind
            self.stopped_epoch = trainer.current_epoch
            trainer.should_stop = True
            if self.verbose:
                trainer.print(f"training stops early: {self.reason}")

    def state_dict(self) -> dict[str, Any]:
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": self._best,
            "reason": self.reason,
            "stopping_reason": self.stopping_reason.value,
            "rule": asdict(self.rule),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.wait_count = state_dict["wait_count"]
        self.stopped_epoch = state_dict["stopped_epoch"]
        self._best = float(state_dict["best_score"])
        self.reason = state_dict.get("reason")  # absent in a state of Lightning
        self.stopping_reason = EarlyStoppingReason(state_dict.get("stopping_reason", 0))
        self._stopped_before = self.reason is not None and state_dict.get("rule") == asdict(self.rule)
