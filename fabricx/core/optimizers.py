"""The results of `configure_optimizers`: optimizers, schedules, and handles for manual loops."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, final

from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from fabricx.core.strategy_support.optimizer_state import OTHER_STATE, extend_schedule, grows
from fabricx.errors import PossibleUserWarning, ScheduleWarning, did_you_mean

if TYPE_CHECKING:
    from fabricx.core.strategy import Strategy


@dataclass
class Schedule:
    """A learning rate scheduler, and the times at which it advances.

    Attributes:
        scheduler: torch's scheduler, or an object with `step`, `state_dict` and `load_state_dict`.
        interval: advance after weight updates ("step") or after epochs ("epoch").
        frequency: updates or epochs between two advances.
        monitor: name of the logged metric of a plateau scheduler.
        strict: a missing metric raises an error; otherwise the advance is skipped.
        name: for the learning rate monitor.
        reduce_on_plateau: the scheduler's `step` has the metric as an argument.
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
            raise ValueError(f"interval={self.interval!r} of a scheduler: must be 'step' or 'epoch'")
        if not isinstance(self.frequency, int) or self.frequency < 1:
            raise ValueError(f"frequency={self.frequency!r} of a scheduler: must be a whole number, 1 or more")

    @property
    def described(self) -> str:
        """Return a description of the schedule; a scheduler's state fits only schedules of equal description."""
        every = f"{self.frequency} {self.interval}s" if self.frequency > 1 else self.interval
        return f"{type(self.scheduler).__qualname__} by {every}"


_KEYS = tuple(field.name for field in fields(Schedule))


def parse_optimizers(result: Any, *, manual: bool = False) -> tuple[list[Optimizer], list[Schedule]]:
    """Parse the result of `configure_optimizers`.

    Args:
        result: in any of the supported forms.
        manual: the user advances the schedules, so they need no metric.

    Returns:
        the optimizers, and the schedules of all optimizers.

    Raises:
        ValueError: the form is not supported; the message lists the supported forms.
    """
    optimizers, schedules = _parsed(result)
    for schedule in schedules:
        unfit = isinstance(schedule.scheduler, Optimizer | type)
        if not manual and (unfit or not callable(getattr(schedule.scheduler, "step", None))):
            raise ValueError(
                f"configure_optimizers returned {type(schedule.scheduler).__name__} as a learning rate scheduler: it "
                "must be an object with a method step. For several schedulers return lists: [optimizer], [scheduler_a, "
                "scheduler_b]"
            )
        if schedule.reduce_on_plateau and schedule.monitor is None and not manual:
            raise ValueError(
                f"{type(schedule.scheduler).__name__} needs the name of a metric; return "
                '{"optimizer": ..., "lr_scheduler": {"scheduler": ..., "monitor": "val_loss"}}'
            )
        if manual and (schedule.interval, schedule.frequency, schedule.monitor) != ("epoch", 1, None):
            warnings.warn(
                f"interval, frequency and monitor of {type(schedule.scheduler).__name__} have no effect with "
                "automatic_optimization = False: call self.lr_schedulers().step() in the module",
                PossibleUserWarning if schedule.monitor is None else ScheduleWarning,
                stacklevel=2,
            )
        if isinstance(schedule.scheduler, OneCycleLR) and schedule.interval == "epoch" and not manual:
            warnings.warn(
                f"OneCycleLR makes a step each epoch, {schedule.scheduler.total_steps} in all: for a step each update "
                'return {"scheduler": ..., "interval": "step"}',
                ScheduleWarning,
                stacklevel=2,
            )
        of = getattr(schedule.scheduler, "optimizer", None)
        if isinstance(of, Optimizer) and not any(of is optimizer for optimizer in optimizers):
            raise ValueError(
                f"configure_optimizers returned a {type(schedule.scheduler).__name__} of another optimizer than it "
                "returned: create the scheduler with the optimizer that is returned"
            )
    return optimizers, schedules


def _parsed(result: Any) -> tuple[list[Optimizer], list[Schedule]]:
    if result is None:
        return [], []
    if isinstance(result, Optimizer):
        return [result], []
    if isinstance(result, Mapping):
        return _from_dict(result)
    if isinstance(result, Sequence) and result:
        if len(result) == 2 and isinstance(result[0], Sequence):
            optimizers, schedulers = result
            several = schedulers if isinstance(schedulers, Sequence) else [schedulers]
            if all(isinstance(optimizer, Optimizer) for optimizer in optimizers):
                return list(optimizers), [_schedule(scheduler) for scheduler in several]
        if all(isinstance(part, Optimizer) for part in result):
            return list(result), []
        if all(isinstance(part, Mapping) for part in result):
            pairs = [_from_dict(part) for part in result]
            return (
                [optimizer for optimizers, _ in pairs for optimizer in optimizers],
                [schedule for _, schedules in pairs for schedule in schedules],
            )
    raise ValueError(
        f"configure_optimizers returned {type(result).__name__}, which is not supported. Return an optimizer, a list "
        'of optimizers, (optimizers, schedulers), or {"optimizer": ..., "lr_scheduler": ...}'
    )


def _from_dict(result: Mapping[str, Any]) -> tuple[list[Optimizer], list[Schedule]]:
    known = ("optimizer", "lr_scheduler", "monitor")
    if result.get("frequency") is not None:
        raise ValueError(
            "the dict that configure_optimizers returned has the key 'frequency', by which optimizers took turns in "
            "Lightning 1: step them in turn in training_step, with self.automatic_optimization = False in __init__. "
            'The frequency of a scheduler belongs in "lr_scheduler": {"scheduler": ..., "frequency": ...}'
        )
    _check_keys(result, "optimizer", known, "the dict that configure_optimizers returned")
    scheduler = result.get("lr_scheduler")
    if scheduler is None:
        return [result["optimizer"]], []
    return [result["optimizer"]], [_schedule(scheduler, monitor=result.get("monitor"))]


def _schedule(scheduler: Any, monitor: str | None = None) -> Schedule:
    if not isinstance(scheduler, Mapping):
        return Schedule(scheduler, monitor=monitor)
    _check_keys(scheduler, "scheduler", _KEYS, "the lr_scheduler dict of configure_optimizers")
    return Schedule(**{"monitor": monitor, **{key: value for key, value in scheduler.items() if key in _KEYS}})


def _check_keys(config: Mapping[str, Any], needed: str, known: Sequence[str], owner: str) -> None:
    """Refuse a dict without a needed key, or with a misspelt key; warn of other keys.

    Raises:
        ValueError: the message has the known keys.
    """
    for key in config:
        if key in known:
            continue
        meant = did_you_mean(key, known)
        text = f"{owner} has the key {key!r}.{meant}\n  known: {', '.join(known)}"
        if meant:
            raise ValueError(text)
        warnings.warn(f"{text}\n  it is ignored", ScheduleWarning, stacklevel=2)
    if needed not in config:
        raise ValueError(f"{owner} has no {needed!r}\n  known: {', '.join(known)}")


def load_schedules(
    schedules: Sequence[Schedule], states: Sequence[dict[str, Any]], described: Sequence[str] | None
) -> None:  # fmt: skip
    """Load the states of a checkpoint's schedulers.

    Args:
        schedules: of the module.
        states: of the checkpoint's schedulers.
        described: `Schedule.described` of the checkpoint's schedules; None if the checkpoint does not have it.

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
        if isinstance(of := getattr(schedule.scheduler, "optimizer", None), Optimizer) and grows(of):
            extend_schedule(schedule.scheduler)
        if len(state.get("lr_lambdas") or ()) > len(getattr(schedule.scheduler, "lr_lambdas", ())):
            raise ValueError(
                f"a hook has added a function to {schedule.described} for another group of the optimizer, and "
                "functions can't be restored: add the group in configure_optimizers, with requires_grad=False until "
                "it is trained; or by a callback that derives from BaseFinetuning"
            )
        schedule.scheduler.load_state_dict(state)


def need_metrics_each_step(schedules: Sequence[Schedule], strategy: Strategy) -> bool:
    """Return whether a schedule reads a metric after each weight update.

    Args:
        schedules: of the module.
        strategy: of the run.

    Raises:
        ValueError: there is such a schedule, and ranks work at their own pace.
    """
    reads_metric = any(schedule.reduce_on_plateau and schedule.interval == "step" for schedule in schedules)
    if reads_metric and not strategy.traits.lockstep:
        raise ValueError(
            f"a plateau scheduler with interval='step' reads a metric of all ranks after each update, and under "
            f"{type(strategy).__name__} ranks do not synchronise at each update; set interval='epoch'"
        )
    return reads_metric


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's `step` requires a closure, which it calls several times, as L-BFGS does.

    Args:
        optimizer: of the module.
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


@final
class OptimizerHandle:
    """Proxy of an optimizer, returned by `self.optimizers()`; its `step` runs through the strategy and the precision.

    All other attributes are those of the optimizer.

    Args:
        optimizer: of the module.
        step: updates the weights of an optimizer, which it receives with the closure or None, and further arguments.
        toggled: context in which only the parameters of an optimizer get gradients.
        called: calls a method that the optimizer's class adds to those of torch, and that may update weights; it
            receives the optimizer, the method and its arguments.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        step: Callable[..., Any],
        toggled: Callable[[Optimizer], AbstractContextManager[Any]] = nullcontext,
        called: Callable[..., Any] | None = None,
    ) -> None:
        self.__dict__["optimizer"] = optimizer
        self.__dict__["_called"] = called
        self.__dict__["_step"] = step
        self.__dict__["_toggled"] = toggled

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Return the class of the optimizer, so that `isinstance` holds for it."""
        return type(self.__dict__["optimizer"])

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Update the weights through the strategy and the precision, and count the update.

        Args:
            closure: recomputes the loss; None without.
            options: further arguments of the optimizer's `step`.

        Returns:
            the loss of the first call of the closure; None without.
        """
        results: list[Any] = []

        def recorded() -> Any:
            assert closure is not None
            results.append(closure())
            return results[-1]

        self.__dict__["_step"](self.optimizer, None if closure is None else recorded, **options)
        return results[0] if results else None

    def toggle_model(self, sync_grad: bool = True) -> AbstractContextManager[None]:
        """Return the context `Module.toggled_optimizer` of this optimizer.

        Args:
            sync_grad: without an effect: gradients are averaged over ranks by each `manual_backward`.
        """
        return self.__dict__["_toggled"](self.optimizer)  # type: ignore[no-any-return]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients.

        Args:
            set_to_none: set them to None instead of zero.
        """
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def __getattr__(self, name: str) -> Any:
        optimizer, called = self.__dict__["optimizer"], self.__dict__["_called"]
        value = getattr(optimizer, name)
        added = inspect.ismethod(value) and not name.startswith("_") and not hasattr(Optimizer, name)
        return functools.partial(called, optimizer, value) if added and called is not None else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.optimizer, name, value)

    def __repr__(self) -> str:
        return f"OptimizerHandle({self.optimizer!r})"
