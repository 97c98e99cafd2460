"""The results of `configure_optimizers`: optimizers, schedules, and handles for manual loops."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, final

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fabricx.core.strategy import OTHER_STATE
from fabricx.errors import did_you_mean, missing_metric

if TYPE_CHECKING:
    from fabricx.trainer.trainer import Trainer


@dataclass
class Schedule:
    """A learning rate scheduler, and when it advances.

    Attributes:
        scheduler: torch's scheduler, or anything with `step` and a state dict.
        interval: advance after weight updates or after epochs.
        frequency: every how many of them.
        monitor: the logged metric that a plateau scheduler looks at.
        strict: a missing metric is an error rather than a skipped advance.
        name: for the learning rate monitor.
        reduce_on_plateau: `step` takes the metric.
    """

    scheduler: Any
    interval: Literal["step", "epoch"] = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    name: str | None = None
    reduce_on_plateau: bool = False

    def __post_init__(self) -> None:
        self.reduce_on_plateau = self.reduce_on_plateau or isinstance(self.scheduler, ReduceLROnPlateau)
        if self.interval not in ("step", "epoch"):
            raise ValueError(f"a scheduler's interval is 'step' or 'epoch', not {self.interval!r}")
        if self.reduce_on_plateau and self.monitor is None:
            raise ValueError(
                f"{type(self.scheduler).__name__} needs a metric to look at: return "
                '{"optimizer": ..., "lr_scheduler": {"scheduler": ..., "monitor": "val_loss"}}'
            )

    @property
    def described(self) -> str:
        """Return what the scheduler's state depends on: another schedule could not go on from it."""
        every = f"{self.frequency} {self.interval}s" if self.frequency > 1 else self.interval
        return f"{type(self.scheduler).__qualname__} by {every}"


_KEYS = tuple(field.name for field in fields(Schedule))


def parse_optimizers(result: Any) -> tuple[list[Optimizer], list[Schedule]]:
    """Read what `configure_optimizers` returned, in any of its forms.

    Returns:
        the optimizers, and the schedules of all of them.

    Raises:
        ValueError: it is none of the forms; the message lists them.
    """
    if result is None:
        return [], []
    if isinstance(result, Optimizer):
        return [result], []
    if isinstance(result, Mapping):
        return _from_dict(result)
    if isinstance(result, Sequence) and result:
        if len(result) == 2 and all(isinstance(part, Sequence) for part in result):
            optimizers, schedulers = result
            if all(isinstance(optimizer, Optimizer) for optimizer in optimizers):
                return list(optimizers), [_schedule(scheduler) for scheduler in schedulers]
        if all(isinstance(part, Optimizer) for part in result):
            return list(result), []
        if all(isinstance(part, Mapping) for part in result):
            pairs = [_from_dict(part) for part in result]
            return [o for found, _ in pairs for o in found], [s for _, found in pairs for s in found]
    raise ValueError(
        f"configure_optimizers returned {type(result).__name__}, which can't be read. It may return an optimizer, a "
        'list of them, (optimizers, schedulers), or {"optimizer": ..., "lr_scheduler": ...}'
    )


def _from_dict(result: Mapping[str, Any]) -> tuple[list[Optimizer], list[Schedule]]:
    known = ("optimizer", "lr_scheduler", "monitor", "frequency")
    unknown = [key for key in result if key not in known]
    if unknown or "optimizer" not in result:
        wrong = f"has the key {unknown[0]!r}.{did_you_mean(unknown[0], known)}" if unknown else "has no 'optimizer'"
        raise ValueError(f"the dict that configure_optimizers returned {wrong}\n  known: {', '.join(known)}")
    scheduler = result.get("lr_scheduler")
    if scheduler is None:
        return [result["optimizer"]], []
    return [result["optimizer"]], [_schedule(scheduler, monitor=result.get("monitor"))]


def _schedule(scheduler: Any, monitor: str | None = None) -> Schedule:
    if not isinstance(scheduler, Mapping):
        return Schedule(scheduler, monitor=monitor)
    unknown = [key for key in scheduler if key not in _KEYS]
    if unknown or "scheduler" not in scheduler:
        wrong = f"has the key {unknown[0]!r}.{did_you_mean(unknown[0], _KEYS)}" if unknown else "has no 'scheduler'"
        raise ValueError(f"the lr_scheduler dict of configure_optimizers {wrong}\n  known: {', '.join(_KEYS)}")
    return Schedule(**{"monitor": monitor, **scheduler})


def load_schedules(
    schedules: Sequence[Schedule], states: Sequence[dict[str, Any]], described: Sequence[str] | None
) -> None:  # fmt: skip
    """Take over the states of the schedules of a checkpoint.

    Args:
        schedules: of the module.
        states: of the checkpoint's schedulers.
        described: `Schedule.described` of those; None if the checkpoint does not have it.

    Raises:
        ValueError: the module has other schedules.
    """
    now = [schedule.described for schedule in schedules]
    if len(states) != len(now) or list(described or now) != now:
        before = ", ".join(described) if described is not None else str(len(states))
        raise ValueError(
            f"the learning rate schedules of the checkpoint are: {before or 'none'}; the module's are: "
            f"{', '.join(now) or 'none'}. {OTHER_STATE}"
        )
    for schedule, state in zip(schedules, states, strict=True):
        schedule.scheduler.load_state_dict(state)


def follow_schedules(t: Trainer, step: int) -> None:
    """Let the schedulers that go by steps have the values of an update, where ranks go at their own pace.

    They go by global batches, however many updates those make, and never back: what they were for earlier updates is
    kept for gradients that come later than others.

    Args:
        t: the trainer.
        step: number of the update, from 0.
    """
    dealer, each = t.strategy.dealer, t.strategy.updates_per_batch
    while dealer.scheduled // each < step // each:
        batch = dealer.scheduled // each + 1
        dealer.passes(batch * each)
        step_schedules(t, "step", batch)


def step_schedules(t: Trainer, interval: str, count: int) -> None:
    """Advance the schedulers of an interval that are due; in manual optimization the user does it.

    Args:
        t: the trainer.
        interval: "step" or "epoch".
        count: how many of them there were.
    """
    if not t.lr_schedulers or not t.module.automatic_optimization:
        return
    for schedule in t.lr_schedulers:
        if schedule.interval != interval or count % schedule.frequency:
            continue
        metric = None
        if schedule.reduce_on_plateau:
            metric = _monitored(t, schedule)
            if metric is None:
                if schedule.strict:
                    raise ValueError(missing_metric(str(schedule.monitor), t.published.metrics, "the scheduler"))
                continue
        t.module.lr_scheduler_step(schedule.scheduler, metric)


def _monitored(t: Trainer, schedule: Schedule) -> Any:
    """Return the newest value of a schedule's metric, the same on all ranks: else their learning rates would part."""
    metric = t.callback_metrics.get(schedule.monitor or "")
    return metric if t.world.size == 1 else t.world.broadcast_object(metric)


def need_metrics_each_step(t: Trainer) -> bool:
    """Return whether a schedule looks at a metric after each weight update.

    Raises:
        ValueError: there is one where each rank goes at its own pace.
    """
    found = any(schedule.reduce_on_plateau and schedule.interval == "step" for schedule in t.lr_schedulers)
    if found and t.strategy.dealer is not None:
        raise ValueError(
            f"a plateau scheduler with interval='step' looks at a metric of all ranks after each update, and under "
            f"{type(t.strategy).__name__} they meet at the end of sections only: take interval='epoch'"
        )
    return found


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer computes the loss by itself, several times a step, as L-BFGS does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


@final
class OptimizerHandle:
    """What `self.optimizers()` gives: the optimizer, whose `step` also does what the trainer has to do.

    Everything else is the optimizer's own.
    """

    def __init__(self, optimizer: Optimizer, trainer: Trainer) -> None:
        self.__dict__["optimizer"] = optimizer
        self.__dict__["_trainer"] = trainer

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update the weights, through the strategy and the precision; counts as a weight update."""
        self._trainer.optimizer_step(self.optimizer, closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.optimizer, name, value)

    def __repr__(self) -> str:
        return f"OptimizerHandle({self.optimizer!r})"
