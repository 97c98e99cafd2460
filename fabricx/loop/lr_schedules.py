"""Learning rate schedules in the loop: when they advance."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from fabricx.core.optimizers import Schedule
from fabricx.errors import ScheduleWarning, missing_metric

if TYPE_CHECKING:
    from fabricx.distributed.world import World
    from fabricx.metrics.run_metrics import RunMetrics
    from fabricx.session.session import Session


def follow_schedules(session: Session, step: int) -> None:
    """Advance the schedulers with interval "step" to an update, if ranks work at their own pace.

    They advance per global batch, which may make several updates, and never backwards: the dealer keeps their values
    at earlier updates for late gradients.

    Args:
        session: its ranks work at their own pace.
        step: number of the update, from 0.
    """
    dealer, updates = session.dealer, session.serving.updates_per_batch
    while dealer.scheduled // updates < step // updates:
        batch = dealer.scheduled // updates + 1
        dealer.passes(batch * updates)
        step_schedules(session, "step", batch)


def step_plateaus(session: Session) -> None:
    """Advance the schedulers with interval "step" that read a metric, after the hooks and the validation of an update.

    Args:
        session: between two batches; its ranks are in lockstep.

    Raises:
        ValueError: the metric of a strict schedule is missing.
    """
    state = session.state
    reads = session.overridden.metrics_each_step and session.module.automatic_optimization
    if not reads or state.plateau_step == state.step:
        return
    if session.world.size > 1:
        session.metrics.publish_step()
    step_schedules(session, "step", state.step, metrics=True)
    state.plateau_step = state.step


def step_schedules(session: Session, interval: str, count: int, *, metrics: bool | None = None) -> None:
    """Advance the due schedulers of an interval; in manual optimization the user advances them.

    Args:
        session: has made an update, or ends an epoch.
        interval: "step" or "epoch".
        count: number of updates or epochs so far.
        metrics: only schedulers that read a metric, or only those that don't; None for all.

    Raises:
        ValueError: the metric of a strict schedule is missing.
    """
    if not session.lr_schedulers or not session.module.automatic_optimization:
        return
    for schedule in session.lr_schedulers:
        if schedule.interval != interval or count % schedule.frequency:
            continue
        if metrics is not None and metrics != schedule.reduce_on_plateau:
            continue
        metric = None
        if schedule.reduce_on_plateau:
            metric = _monitored(schedule, session.metrics, session.world)
            if metric is None:
                text = missing_metric(str(schedule.monitor), session.metrics.published.metrics, "the scheduler")
                if schedule.strict:
                    raise ValueError(text)
                text = f"{text}\n  strict=False: the scheduler makes no step"
                session.warn_once(f"metric {schedule.monitor}", text, ScheduleWarning)
                continue
        guard = session.checks.guarded("lr_scheduler_step") if session.overridden.lr_scheduler_step else nullcontext()
        with session.gradients.hooks_see_weights("lr_scheduler_step"), guard:
            session.module.lr_scheduler_step(schedule.scheduler, metric)


def _monitored(schedule: Schedule, metrics: RunMetrics, world: World) -> Any:
    """Return the newest value of a schedule's metric on rank 0, so that all ranks have equal learning rates."""
    metric = metrics.newest().metrics.get(schedule.monitor or "")
    return metric if world.size == 1 else world.broadcast_object(metric)
