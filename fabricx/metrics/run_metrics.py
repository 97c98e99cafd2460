"""The metrics of a run: collects what is logged, and publishes reduced values to callbacks and loggers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fabricx.core.state import Phase
from fabricx.core.strategy_parts import HasServers, as_part
from fabricx.metrics.collector import Logbook
from fabricx.metrics.logger_dispatcher import LoggerDispatcher
from fabricx.metrics.objects import reduce_along, reduced_metrics

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fabricx.core.callback import Callback
    from fabricx.core.module import Module
    from fabricx.core.options.trainer_options import TrainerOptions
    from fabricx.core.state import RunState
    from fabricx.core.strategy import Strategy
    from fabricx.distributed.world import World
    from fabricx.telemetry.recorder import NoopRecorder


class Published:
    """The newest published value of everything that was logged; remains after the run.

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
        """Publish values to callbacks, the progress bar and `Trainer.logged_metrics`.

        Args:
            values: reduced values by logged name.
            logbook: collector of the values.
            epoch: values of an epoch; else of a step.
        """
        for name, given in values.items():
            shown = logbook.names(name, epoch=epoch)
            value = given.to(torch.get_default_dtype()) if given.dtype is torch.float64 else given
            if epoch or logbook.training:  # values of an evaluation's batch are of this rank alone
                self.metrics[name] = self.metrics[shown] = value
            series = logbook.series(name)
            if series.bar:
                self.bar[shown] = value
            if series.to_logger:
                self.logged[shown] = value

    def drop(self, names: Iterable[str], logbook: Logbook) -> None:
        """Remove values of names whose next value is not reduced over ranks yet.

        Args:
            names: logged names.
            logbook: collector of the values.
        """
        for name in names:
            for values in (self.metrics, self.logged, self.bar):
                values.pop(name, None)
                values.pop(logbook.names(name, epoch=True), None)

    def clear(self) -> None:
        """Begin with no values; dicts that users hold stay as they are."""
        self.metrics, self.logged, self.bar = {}, {}, {}


class RunMetrics:
    """Collects the values of a run on a rank, and publishes them.

    Args:
        module: the user's module.
        options: of the run.
        strategy: reduces values over ranks.
        state: steps and phase of the run.
        published: receives the values.
        writes: the run has loggers or checkpoints; equal on all ranks.

    Attributes:
        loggers: writes to the loggers, on the main rank.
        training: collector of the training epoch.
        logbook: present collector: during an evaluation that of the evaluation, else that of the training epoch.
    """

    def __init__(
        self, module: Module, options: TrainerOptions, strategy: Strategy, state: RunState, published: Published,
        *, writes: bool,
    ) -> None:  # fmt: skip
        self._module, self._options, self._strategy, self._state = module, options, strategy, state
        self._weigh: Callable[[Any], float] | None = None
        self._writes = writes
        self.published = published
        self.loggers = LoggerDispatcher()
        self.logbook = self.training = self.new_logbook(training=True)

    def begin(self, weigh: Callable[[Any], float] | None) -> None:
        """Begin to collect, when the strategy has set up the module.

        Args:
            weigh: returns the weight of a batch; None for the number of samples.
        """
        self._weigh = weigh
        self.logbook = self.training = self.new_logbook(training=True)

    def new_logbook(self, *, training: bool) -> Logbook:
        """Return an empty collector.

        Args:
            training: for a training epoch; else for an evaluation.
        """
        return Logbook(self._strategy, training=training, weigh=self._weigh, mute=self._options.barebones)

    def collect(self, logbook: Logbook | None) -> None:
        """Set the destination of the module's `self.log`.

        Args:
            logbook: None where logging is an error.
        """
        self._module.__dict__["_log_to"] = logbook

    @contextmanager
    def not_collecting(self) -> Iterator[None]:
        """Return a context in which `self.log` of the module is an error."""
        before = self._module.__dict__.get("_log_to")
        self.collect(None)
        try:
            yield
        finally:
            self.collect(before)

    @contextmanager
    def evaluation(self) -> Iterator[Logbook]:
        """Return a context of an evaluation, which has a collector of its own."""
        before, self.logbook = self.logbook, self.new_logbook(training=False)
        self.logbook.step = self._state.step
        self.collect(self.logbook)
        try:
            yield self.logbook
        finally:
            self.logbook = before
            self.collect(before)

    def discard_batch(self) -> None:
        """Return to the collector of the training epoch, without the values of an interrupted batch or evaluation."""
        self.logbook = self.training
        self.logbook.end_batch()
        self.collect(self.logbook)

    def world_changed(self, world: World, callbacks: Sequence[Callback]) -> None:
        """Reduce values over other ranks; the main rank has the sums of departed ranks.

        Args:
            world: the ranks.
            callbacks: of the run, which may have metric objects.
        """
        self.training.world_changed(world)
        for metric in reduced_metrics(self._module, callbacks, divided=world.divided):
            reduce_along(metric, world, fits=True)

    def log_step(self, recorder: NoopRecorder, optimizers: Sequence[Optimizer], norm: Tensor | None) -> None:
        """Write the values of this weight update to the loggers, every `log_every_n_steps`; ranks are in lockstep.

        Args:
            recorder: of this rank.
            optimizers: of the module.
            norm: gradient norm, shape [], if the gradient was clipped by its norm.
        """
        step, every, published = self._state.step, self._options.log_every_n_steps, self.published
        self.training.evaluated.clear()  # also on a rank without a sample of this batch
        if not every or step % every or step == published.step:
            return
        world = self._strategy.world
        if self.loggers or world.size > 1 or recorder.on:
            values = self.logbook.step_values(self._step_of_values())
            published.take(values, self.logbook, epoch=False)
            self._to_loggers(values, epoch=False)
        published.step = step
        # The norm of a sharded model is a collective; `writes` is equal on all ranks.
        if (
            self._options.enable_telemetry
            and self._writes
            and (world.main_rank or not self._strategy.traits.replicated)
        ):
            norm = norm if norm is not None else self._strategy.gradient_norm(optimizers)
            _measure(recorder, optimizers, norm, step, main_rank=world.main_rank)

    def log_step_alone(self, recorder: NoopRecorder, optimizers: Sequence[Optimizer]) -> None:
        """Write the main rank's own values every `log_every_n_steps`; ranks work at their own pace.

        The number of updates may pass a multiple of the interval.

        Args:
            recorder: of this rank.
            optimizers: of the module.
        """
        every, step, published = self._options.log_every_n_steps, self._state.step, self.published
        if every and step // every > max(0, published.step) // every:
            published.step = step
            values = self.logbook.step_values(self.logbook.step)
            published.take(values, self.logbook, epoch=False)
            self._to_loggers(values, epoch=False)
            _measure(recorder, optimizers, None, step, main_rank=self._strategy.world.main_rank)

    def publish_step(self) -> None:
        """Publish the values of the latest weight update to callbacks; every rank calls it in the same step."""
        values = self.logbook.step_values(self._step_of_values())
        if not self._strategy.traits.lockstep:
            values = self.logbook.metrics.filled(values)
        self._take_step(values)

    def _take_step(self, values: dict[str, Tensor]) -> None:
        """Publish values of a training step, but for names that a later evaluation has logged, too."""
        later = self.logbook.evaluated
        values = {name: value for name, value in values.items() if name not in later} if later else values
        self.published.take(values, self.logbook, epoch=False)

    def publish_epoch(self, *, ended: bool) -> None:
        """Publish the values of the training epoch to callbacks and loggers; every rank calls it.

        Args:
            ended: the hooks at the end of the epoch have run.
        """
        if self.published.open:
            if self._state.batch or not self._strategy.traits.lockstep:  # else the newest step is of an earlier epoch
                self.publish_step()
            self.published.open = False
        values = self.logbook.epoch_values(ended=ended)
        self.published.take(values, self.logbook, epoch=True)
        self._to_loggers(values, epoch=True)
        self.logbook.ending = not ended

    def log_measured(self) -> None:
        """Write the strategy's measurements to the loggers; every rank calls it in the same step."""
        measured = as_part(self._strategy, HasServers).measured()
        if measured and self.loggers:
            self.loggers.measured({**measured, "epoch": float(self._state.epoch)}, self._state.step)

    def log_evaluation_batch(self) -> None:
        """Write the values that this rank has logged with `on_step` in an evaluation batch, without communication.

        Their step is the number of evaluation batches in the run so far, as updates do not distinguish the batches.
        """
        logbook = self.logbook
        values = logbook.values_of_batch()
        if values and self._state.phase is not Phase.SANITY:
            self.published.take(values, logbook, epoch=False)
            before = self._state.evaluated if self._state.phase is Phase.VALIDATE else 0
            self._to_loggers(values, epoch=False, step=before + logbook.batches)

    def publish_evaluated_steps(self) -> None:
        """Publish the values of an evaluation's steps to the hooks at its end; every rank calls it."""
        self.logbook.published = self.logbook.epoch_values(ended=False)
        self.published.take(self.logbook.published, self.logbook, epoch=True)
        self.training.evaluated |= self.logbook.published.keys()
        self.logbook.ending = True

    def publish_evaluation(self, loaders: int) -> list[dict[str, float]]:
        """Publish the values of an evaluation after its hooks, which may have logged more; every rank calls it.

        Args:
            loaders: number of loaders.

        Returns:
            Values by name, for each loader.
        """
        logbook = self.logbook
        added = logbook.epoch_values(ended=True)
        self.published.take(added, logbook, epoch=True)
        self.training.evaluated |= added.keys()
        values = {**logbook.published, **added}
        if self._state.phase is not Phase.SANITY:
            self._to_loggers(values, epoch=True)
        results: list[dict[str, float]] = [{} for _ in range(max(1, loaders))]
        for name, value in values.items():
            _, marked, number = name.partition("/dataloader_idx_")
            loader = int(number) if marked else logbook.metrics.loaders.get(name)
            for index, result in enumerate(results):
                if loader in (None, index):
                    result[logbook.names(name, epoch=True)] = float(value)
        return results

    def newest(self) -> Published:
        """Return the newest values; of a single rank, also those of the present batch, and of hooks at an epoch's end.

        With several ranks, a name that such a hook has logged has no value until these hooks have ended on all ranks.
        """
        logbook, published = self.logbook, self.published
        if self._strategy.world.size > 1:
            published.drop(logbook.names_of_hooks(), logbook)
            return published
        if published.open and self._state.phase is Phase.TRAIN:
            self._take_step(logbook.step_values(logbook.step))
        published.take(logbook.values_of_hooks(), logbook, epoch=True)
        return published

    def shown_in_bar(self) -> dict[str, float]:
        """Return this rank's newest values for the progress bar; synchronises the device."""
        shown: dict[str, Any] = {**self.newest().bar, **self.logbook.local_values()}
        return {name: float(value) for name, value in shown.items()}

    def _step_of_values(self) -> int:
        """Return the step under which the newest values were logged; a manual batch may make several updates."""
        if not self._strategy.traits.lockstep:  # the newest batch may have returned no loss
            return self.logbook.metrics.newest_step
        return self._state.step if self._module.automatic_optimization else self.logbook.step

    def _to_loggers(self, values: dict[str, Tensor], *, epoch: bool, step: int | None = None) -> None:
        logbook = self.logbook
        wanted = {logbook.names(n, epoch=epoch): v for n, v in values.items() if logbook.series(n).to_logger}
        if wanted and self.loggers:
            row = {name: float(value) for name, value in wanted.items()}
            axis = row.pop("step", None)  # of the user, for the x axis of loggers
            if axis is None:
                row.setdefault("epoch", float(self._state.ended_epochs))
            self.loggers.metrics(row, self._state.step if step is None else step, axis, update=self._state.step)


def _measure(
    recorder: NoopRecorder, optimizers: Sequence[Optimizer], norm: Tensor | None, step: int, *, main_rank: bool
) -> None:  # fmt: skip
    """Record the gradient norm and the learning rates."""
    if not recorder.on or not main_rank:
        return
    gauges = {} if norm is None else {"gradient_norm": float(norm)}
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            several = len(optimizers) > 1 or len(optimizer.param_groups) > 1
            gauges[f"learning_rate/{number}.{index}" if several else "learning_rate"] = float(group["lr"])
    recorder.gauges(gauges, step)
