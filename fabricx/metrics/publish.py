"""Publishes reduced values to callbacks, the progress bar and loggers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from fabricx.core.state import Phase
from fabricx.metrics.collector import Logbook

if TYPE_CHECKING:
    from fabricx.trainer.trainer import Trainer


class Published:
    """The newest published value of everything that was logged.

    Attributes:
        metrics: for callbacks.
        logged: newest values for the loggers.
        bar: values for the progress bar, reduced over ranks.
        step: weight update of the newest row of the loggers.
        open: the training epoch has values that are not reduced yet.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, Tensor] = {}
        self.logged: dict[str, Tensor] = {}
        self.bar: dict[str, Tensor] = {}
        self.step = -1
        self.open = False

    def take(self, values: dict[str, Tensor], logbook: Logbook, *, epoch: bool) -> None:
        """Publish values to callbacks and the progress bar.

        Args:
            values: reduced values by logged name.
            logbook: collector of the values.
            epoch: values of an epoch; else of a step.
        """
        for name, value in values.items():
            self.metrics[name] = self.metrics[logbook.names(name, epoch=epoch)] = value
            if logbook.series(name).bar:
                self.bar[name] = value

    def clear(self) -> None:
        """Remove all values."""
        self.metrics.clear()
        self.logged.clear()
        self.bar.clear()


def log_step(trainer: Trainer) -> None:
    """Write the values of this weight update to the loggers, every `log_every_n_steps`.

    Args:
        trainer: of a fit in lockstep.
    """
    step = trainer.state.step
    if not trainer.log_every_n_steps or step % trainer.log_every_n_steps or step == trainer.published.step:
        return
    if trainer.loggers or trainer.world.size > 1 or trainer.recorder.on:
        values = trainer.logbook.step_values(_step_of_values(trainer))
        trainer.published.take(values, trainer.logbook, epoch=False)
        _to_loggers(trainer, values, epoch=False)
    trainer.published.step = step
    if (
        trainer.enable_telemetry and trainer.writes and (trainer.is_global_zero or trainer.strategy.traits.sharded)
    ):  # the norm of a sharded model is a collective; `writes` is equal on all ranks
        _measure(
            trainer,
            trainer.window.norm
            if trainer.window.norm is not None
            else trainer.strategy.gradient_norm(trainer.optimizers),
        )


def _measure(trainer: Trainer, norm: Tensor | None) -> None:
    """Record the gradient norm and the learning rates."""
    if not trainer.recorder.on or not trainer.is_global_zero:
        return
    gauges = {} if norm is None else {"gradient_norm": float(norm)}
    for number, optimizer in enumerate(trainer.optimizers):
        for index, group in enumerate(optimizer.param_groups):
            several = len(trainer.optimizers) > 1 or len(optimizer.param_groups) > 1
            gauges[f"learning_rate/{number}.{index}" if several else "learning_rate"] = float(group["lr"])
    trainer.recorder.gauges(gauges, trainer.state.step)


def log_step_alone(trainer: Trainer) -> None:
    """Write the main rank's own values, when the number of updates has passed a multiple of `log_every_n_steps`.

    Args:
        trainer: of a fit with ranks at their own pace.
    """
    every, step = trainer.log_every_n_steps, trainer.state.step
    if every and step // every > max(0, trainer.published.step) // every:
        trainer.published.step = step
        values = trainer.logbook.step_values(trainer.logbook.step)
        trainer.published.take(values, trainer.logbook, epoch=False)
        _to_loggers(trainer, values, epoch=False)
        _measure(trainer, None)


def publish_step(trainer: Trainer) -> None:
    """Publish the values of the latest weight update to callbacks; every rank calls it in the same step.

    Args:
        trainer: of a fit.
    """
    trainer.published.take(trainer.logbook.step_values(_step_of_values(trainer)), trainer.logbook, epoch=False)


def publish_epoch(trainer: Trainer) -> None:
    """Publish the values of the training epoch to callbacks and loggers; every rank calls it.

    Args:
        trainer: of a fit.
    """
    if trainer.published.open:
        publish_step(trainer)
        trainer.published.open = False
    values = trainer.logbook.epoch_values()
    trainer.published.take(values, trainer.logbook, epoch=True)
    _to_loggers(trainer, values, epoch=True)


def log_measured(trainer: Trainer) -> None:
    """Write the strategy's measurements to the loggers; every rank calls it in the same step.

    Args:
        trainer: of a fit.
    """
    measured = trainer.strategy.measured()
    if measured and trainer.logger_dispatcher:
        trainer.logger_dispatcher.measured({**measured, "epoch": float(trainer.state.epoch)}, trainer.state.step)


def publish_evaluation(trainer: Trainer, loaders: int) -> list[dict[str, float]]:
    """Publish the values of an evaluation; every rank calls it.

    Args:
        trainer: of the evaluation.
        loaders: number of loaders.

    Returns:
        Values by name, for each loader.
    """
    logbook = trainer.logbook
    values = logbook.epoch_values()
    trainer.published.take(values, logbook, epoch=True)
    if trainer.state.phase is not Phase.SANITY:
        _to_loggers(trainer, values, epoch=True)
    results: list[dict[str, float]] = [{} for _ in range(max(1, loaders))]
    for name, value in values.items():
        _, marked, number = name.partition("/dataloader_idx_")
        for index, result in enumerate(results):
            if not marked or int(number) == index:
                result[logbook.names(name, epoch=True)] = float(value)
    return results


def newest_metrics(trainer: Trainer) -> dict[str, Tensor]:
    """Return the values for callbacks; with a single rank, they include the present batch.

    Args:
        trainer: of the run.
    """
    if trainer.published.open and trainer.world.size == 1 and trainer.state.phase is Phase.TRAIN:
        trainer.published.take(trainer.logbook.step_values(trainer.logbook.step), trainer.logbook, epoch=False)
    return dict(trainer.published.metrics)


def shown_in_bar(trainer: Trainer) -> dict[str, float]:
    """Return this rank's newest values for the progress bar; synchronises the device.

    Args:
        trainer: of the run.
    """
    shown: dict[str, Any] = dict(trainer.published.bar)
    if trainer.logbook is not None:
        shown.update(trainer.logbook.local_values(trainer.state.step))
    return {name: float(value) for name, value in shown.items()}


def _step_of_values(trainer: Trainer) -> int:
    """Return the step under which the newest values were logged; a manual batch may make several updates."""
    if trainer.strategy.dealer is not None:  # the newest batch may have returned no loss
        return trainer.logbook.metrics.newest_step
    return trainer.state.step if trainer.module.automatic_optimization else trainer.logbook.step


def _to_loggers(trainer: Trainer, values: dict[str, Tensor], *, epoch: bool) -> None:
    logbook = trainer.logbook
    wanted = {logbook.names(n, epoch=epoch): v for n, v in values.items() if logbook.series(n).to_logger}
    if not wanted:
        return
    trainer.published.logged.update(wanted)
    if trainer.logger_dispatcher:
        row = {**{name: float(value) for name, value in wanted.items()}, "epoch": float(trainer.state.epoch)}
        trainer.logger_dispatcher.metrics(row, trainer.state.step)
