"""Publishes reduced values to callbacks, progress bar and loggers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from fabricx.core.state import Phase
from fabricx.metrics.collector import Logbook

if TYPE_CHECKING:
    from fabricx.trainer.trainer import Trainer


class Published:
    """The newest value of everything that was logged, and who has it.

    Attributes:
        metrics: what callbacks see.
        logged: what the loggers got last.
        bar: what the progress bar shows, joined over ranks.
        step: weight update of the newest row in the loggers.
        open: the training epoch has values that nobody has joined yet.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, Tensor] = {}
        self.logged: dict[str, Tensor] = {}
        self.bar: dict[str, Tensor] = {}
        self.step = -1
        self.open = False

    def take(self, values: dict[str, Tensor], logbook: Logbook, *, epoch: bool) -> None:
        """Show values to callbacks and to the bar."""
        for name, value in values.items():
            self.metrics[name] = self.metrics[logbook.names(name, epoch=epoch)] = value
            if logbook.series(name).bar:
                self.bar[name] = value

    def clear(self) -> None:
        """Forget all values."""
        self.metrics.clear()
        self.logged.clear()
        self.bar.clear()


def log_step(t: Trainer) -> None:
    """Give the values of this weight update to the loggers, when they are due."""
    step = t.state.step
    if not t.log_every_n_steps or step % t.log_every_n_steps or step == t.published.step:
        return
    if t.loggers or t.world.size > 1 or t.recorder.on:
        values = t.logbook.step_values(_step_of_values(t))
        t.published.take(values, t.logbook, epoch=False)
        _to_loggers(t, values, epoch=False)
    t.published.step = step
    if t.enable_telemetry and t.writes and (t.is_global_zero or t.strategy.traits.sharded):  # all ranks the same
        _measure(t, t.window.norm if t.window.norm is not None else t.strategy.gradient_norm(t.optimizers))


def _measure(t: Trainer, norm: Tensor | None) -> None:
    """Record what is to be seen of the optimizers."""
    if not t.recorder.on or not t.is_global_zero:
        return
    found = {} if norm is None else {"gradient_norm": float(norm)}
    for number, optimizer in enumerate(t.optimizers):
        for place, group in enumerate(optimizer.param_groups):
            several = len(t.optimizers) > 1 or len(optimizer.param_groups) > 1
            found[f"learning_rate/{number}.{place}" if several else "learning_rate"] = float(group["lr"])
    t.recorder.gauges(found, t.state.step)


def log_step_alone(t: Trainer) -> None:
    """Give the main rank's own values to the loggers, when the updates have passed a multiple of what is due."""
    every, step = t.log_every_n_steps, t.state.step
    if every and step // every > max(0, t.published.step) // every:
        t.published.step = step
        values = t.logbook.step_values(t.logbook.step)
        t.published.take(values, t.logbook, epoch=False)
        _to_loggers(t, values, epoch=False)
        _measure(t, None)


def publish_step(t: Trainer) -> None:
    """Join the values of the latest weight update for the callbacks; every rank calls it at the same moment."""
    t.published.take(t.logbook.step_values(_step_of_values(t)), t.logbook, epoch=False)


def publish_epoch(t: Trainer) -> None:
    """Join the values of the training epoch, and give them to callbacks and loggers."""
    if t.published.open:
        publish_step(t)
        t.published.open = False
    values = t.logbook.epoch_values()
    t.published.take(values, t.logbook, epoch=True)
    _to_loggers(t, values, epoch=True)


def log_measured(t: Trainer) -> None:
    """Give what the strategy has measured of itself to the loggers; every rank calls it at the same moment."""
    found = t.strategy.measured()
    if found and t.logger_dispatcher:
        t.logger_dispatcher.measured({**found, "epoch": float(t.state.epoch)}, t.state.step)


def publish_evaluation(t: Trainer, loaders: int) -> list[dict[str, float]]:
    """Join the values of an evaluation, and return them by loader."""
    logbook = t.logbook
    values = logbook.epoch_values()
    t.published.take(values, logbook, epoch=True)
    if t.state.phase is not Phase.SANITY:
        _to_loggers(t, values, epoch=True)
    results: list[dict[str, float]] = [{} for _ in range(max(1, loaders))]
    for name, value in values.items():
        _, marked, number = name.partition("/dataloader_idx_")
        for place, found in enumerate(results):
            if not marked or int(number) == place:
                found[logbook.names(name, epoch=True)] = float(value)
    return results


def newest_metrics(t: Trainer) -> dict[str, Tensor]:
    """Return what callbacks may see now; where there is one rank, that includes this very batch."""
    if t.published.open and t.world.size == 1 and t.state.phase is Phase.TRAIN:
        t.published.take(t.logbook.step_values(t.logbook.step), t.logbook, epoch=False)
    return dict(t.published.metrics)


def shown_in_bar(t: Trainer) -> dict[str, float]:
    """Return this rank's newest values for the bar; waits for the device."""
    shown: dict[str, Any] = dict(t.published.bar)
    if t.logbook is not None:
        shown.update(t.logbook.local_values(t.state.step))
    return {name: float(value) for name, value in shown.items()}


def _step_of_values(t: Trainer) -> int:
    """Return under which step the newest values were logged; a manual batch may have made several updates."""
    if t.strategy.dealer is not None:  # the newest batch may have given no loss
        return t.logbook.metrics.newest_step
    return t.state.step if t.module.automatic_optimization else t.logbook.step


def _to_loggers(t: Trainer, values: dict[str, Tensor], *, epoch: bool) -> None:
    logbook = t.logbook
    wanted = {logbook.names(n, epoch=epoch): v for n, v in values.items() if logbook.series(n).to_logger}
    if not wanted:
        return
    t.published.logged.update(wanted)
    if t.logger_dispatcher:
        row = {**{name: float(value) for name, value in wanted.items()}, "epoch": float(t.state.epoch)}
        t.logger_dispatcher.metrics(row, t.state.step)
