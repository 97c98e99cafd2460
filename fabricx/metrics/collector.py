"""The receiver of `self.log`: names, defaults and current values of a phase."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fabricx.core.reductions import check_reduction
from fabricx.core.strategy import Strategy
from fabricx.core.transfer import batch_size_of
from fabricx.metrics.accumulator import EXACT, Metrics, Series, as_value
from fabricx.metrics.objects import metric_objects, set_states, states_of


class Logbook:
    """Takes the values of one phase (training, or one evaluation) and joins them over ranks when they are due.

    Args:
        strategy: whose `reduce` joins.
        training: whether `on_step` is the default.
        weigh: gives the weight of a batch, where that isn't its number of samples.
    """

    def __init__(
        self, strategy: Strategy, *, training: bool, weigh: Callable[[Any], float] | None = None
    ) -> None:  # fmt: skip
        self._weigh = weigh
        self._weight: float | None = None  # of the batch, once known
        world = strategy.world
        self.metrics = Metrics(strategy.reduce, world.gather_objects, world.size, world.device, strategy.module)
        self.metrics.counts_shared = world.main_rank
        self.device = world.device
        self.training = training
        self.in_step = False  # between two batches values belong to the epoch
        self.step = 0  # the weight update that is being worked on
        self.batch: Any = None
        self.size: int | None = None  # samples in `batch`, once known
        self.loader: int | None = None  # number of the loader, where there are several
        self.batches = 0  # of this epoch or evaluation
        self.idle = False  # had this rank no sample of the newest manual batch?
        self._mute = False
        self._alone = strategy.dealer is not None  # values of one step are this rank's

    def begin_batch(self, batch: Any, size: int | None, step: int) -> None:
        """Say which batch the values to come are of."""
        self.batch, self.size, self.step, self.in_step, self.idle = batch, size, step, True, False
        self._weight = None
        self.batches += 1

    def pass_batch(self, step: int) -> None:
        """Note a manual batch of which this rank has no sample: the step's values are those of other ranks."""
        self.step, self.idle = step, True

    def end_batch(self) -> None:
        """Say that the values to come are not of a batch."""
        self.batch, self.in_step = None, False

    def log(
        self, name: str, value: Any, bar: bool, to_logger: bool, on_step: bool | None, on_epoch: bool | None,
        reduce_fx: Any, batch_size: int | None, add_dataloader_idx: bool, joined: bool,
    ) -> None:  # fmt: skip
        """Take one value; the arguments are those of `Module.log`."""
        if self._mute:
            return
        if self.loader is not None and add_dataloader_idx:
            name = f"{name}/dataloader_idx_{self.loader}"
        series = self.metrics.series.get(name)
        if series is None:
            series = self._begin(name, reduce_fx, on_step, on_epoch, bar, to_logger, joined)
        elif series.asked != (reduce_fx, on_step, on_epoch, joined, self.in_step):
            self._check_same(name, series, reduce_fx, on_step, on_epoch, joined)
        if type(value) is not Tensor or value.dim() or value.dtype not in EXACT:
            if hasattr(value, "compute") and hasattr(value, "update"):
                if name not in self.metrics.objects:
                    series.step_batch = series.epoch_batch = self._batch
                self.metrics.objects[name] = (value, series)
                return
            value = as_value(value, name, self.device)
        if not self.in_step:
            weight: float = 1
        elif batch_size is not None:
            weight = batch_size
        elif self._weigh is not None:
            weight = self.weight
            if not weight:  # then it is the mean of nothing
                value = 0.0
        else:
            weight = self.count() if self.size is None else self.size
        series.add(value, weight, self.step, self._batch)

    @property
    def _batch(self) -> int:
        """Return the number of this rank's batch in the epoch, from 1; 0 between two batches."""
        return self.batches if self.in_step else 0

    def count(self) -> int:
        """Return the samples of the batch."""
        if self.size is None:
            self.size = batch_size_of(self.batch)
        return self.size

    @property
    def weight(self) -> float:
        """Return the weight of the batch, where the module says it."""
        if self._weight is None:
            assert self._weigh is not None
            self._weight = self._weigh(self.batch)
        return self._weight

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """Take no values, also not into metric objects: a step runs only so that other ranks don't wait."""
        found = metric_objects(self.metrics.module).values() if self.metrics.module is not None else ()
        before = [(metric, states_of(metric), metric._forward_cache) for metric in found]
        self._mute = True
        try:
            yield
        finally:
            self._mute = False
            for metric, states, latest in before:
                set_states(metric, states)
                metric._forward_cache = latest

    def _begin(
        self, name: str, reduce_fx: Any, on_step: bool | None, on_epoch: bool | None,
        bar: bool, to_logger: bool, joined: bool,
    ) -> Series:  # fmt: skip
        step, epoch = self._moments(name, on_step, on_epoch)
        series = Series(
            check_reduction(name, reduce_fx),
            on_step=step,
            on_epoch=epoch,
            bar=bar,
            to_logger=to_logger,
            local=not joined,
        )
        series.asked, series.inside = (reduce_fx, on_step, on_epoch, joined, self.in_step), self.in_step
        self.metrics.series[name] = series
        return series

    def _moments(self, name: str, on_step: bool | None, on_epoch: bool | None) -> tuple[bool, bool]:
        """Return whether a value is of the step, and whether it is of the epoch."""
        default_step = self.training and self.in_step
        step = default_step if on_step is None else on_step
        epoch = not default_step if on_epoch is None else on_epoch
        if not step and not epoch:
            raise ValueError(f"self.log({name!r}, ..., on_step=False, on_epoch=False) would log nothing")
        if step and not self.in_step:
            return False, True  # there is no step between two batches
        return step, epoch

    def _check_same(
        self, name: str, series: Series, reduce_fx: Any, on_step: bool | None, on_epoch: bool | None, joined: bool
    ) -> None:  # fmt: skip
        """Refuse a name that is logged in two ways, whose values can't be joined into one.

        Raises:
            ValueError: another call of `log` has given the name other options, or means over other things.
        """
        wanted = (check_reduction(name, reduce_fx), *self._moments(name, on_step, on_epoch), not joined)
        same = wanted == (series.reduction, series.on_step, series.on_epoch, series.local)
        mixed = series.reduction == "mean" and series.inside not in (None, self.in_step)
        if not same or mixed:
            where = "within a batch", "between batches"
            raise ValueError(
                f"self.log({name!r}, ...) is called twice in different ways, "
                + (f"{where[0]} and {where[1]}" if mixed else "with another reduce_fx, on_step, on_epoch or sync_dist")
                + ": the values can't be joined; give one of them another name"
            )
        series.asked, series.inside = (reduce_fx, on_step, on_epoch, joined, self.in_step), self.in_step

    def step_values(self, step: int) -> dict[str, Tensor]:
        """Return the joined values of one step; every rank calls it at the same step, where all go together."""
        metrics = self.metrics
        names = [] if self.idle else metrics.due(epoch=False, step=step)
        values = metrics.joined(names, epoch=False, batches=self.batches, alone=self._alone)
        for name, (metric, series) in metrics.objects.items():
            if series.on_step:
                latest = getattr(metric, "_forward_cache", None)  # what the metric's own call has returned
                values[name] = torch.as_tensor(metric.compute() if latest is None else latest)
        return values

    def epoch_values(self) -> dict[str, Tensor]:
        """Return the joined values of the epoch so far, and begin a new one; every rank calls it at the same moment."""
        metrics = self.metrics
        values = metrics.joined(metrics.due(epoch=True), epoch=True, batches=self.batches)
        for name, (metric, series) in metrics.objects.items():
            if series.on_epoch:
                values[name] = torch.as_tensor(metric.compute())  # joins over ranks by itself
                metric.reset()
        metrics.forget_epoch()
        return values

    def local_values(self, step: int) -> dict[str, Any]:
        """Return this rank's newest values for the progress bar, without joining them."""
        return {
            name: series.value for name, series in self.metrics.series.items()
            if series.bar and series.on_step and series.value is not None
        }  # fmt: skip

    def series(self, name: str) -> Series:
        """Return what is known of a name."""
        found = self.metrics.series.get(name)
        return found if found is not None else self.metrics.objects[name][1]

    def names(self, name: str, *, epoch: bool) -> str:
        """Return what the loggers call a value: with both kinds, `name_step` and `name_epoch`."""
        series = self.series(name)
        if not (series.on_step and series.on_epoch):
            return name
        plain, slash, loader = name.partition("/dataloader_idx_")
        return f"{plain}_{'epoch' if epoch else 'step'}{slash}{loader}"
