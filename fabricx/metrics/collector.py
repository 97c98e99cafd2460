"""Collector of `self.log`: names, defaults and current values of a phase."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from fabricx.core.strategy import Strategy
from fabricx.core.tensors.reductions import check_reduction
from fabricx.core.tensors.transfer import batch_size_of
from fabricx.distributed.sharding.dtensors import is_dtensor
from fabricx.distributed.world import World
from fabricx.errors import WrongArgument
from fabricx.metrics.accumulator import Metrics, position
from fabricx.metrics.objects import computed_alone, computed_together, metric_objects, set_states, states_of
from fabricx.metrics.series import EXACT, Series, as_single, as_value

_LOADER: Final = "/dataloader_idx_"  # start of the suffix of names that several loaders log


class Logbook:
    """Collects the logged values of a phase (training, or an evaluation) and reduces them over ranks when due.

    Args:
        strategy: provides the reduction over ranks.
        training: in training, `on_step` is the default.
        weigh: returns the weight of a batch; None for the number of samples.
        mute: discard all values.

    Attributes:
        in_step: a batch is being processed; values between two batches belong to the epoch.
        step: number of the weight update in progress.
        batch: the user's batch; None between two batches.
        size: samples of `batch`; None if they are counted when a value needs them.
        loader: number of the evaluation loader; None if there are not several.
        batches: number of batches in this epoch or evaluation.
        idle: this rank had no sample of the newest manual batch.
        updated: step and samples of the newest update, for metric objects that log values of steps.
        logs_batches: a name is logged with `on_step`.
        ending: values of the epoch's steps are published, and the hooks at its end may log more.
        published: values of the evaluation's steps.
        evaluated: names to which an evaluation after the newest batch has given a value.
    """

    def __init__(
        self, strategy: Strategy, *, training: bool, weigh: Callable[[Any], float] | None = None, mute: bool = False
    ) -> None:
        self._weigh = weigh
        self._weight: float | None = None  # of the batch; None before the first use, which computes it
        world = strategy.world.axis("metrics")
        self.metrics = Metrics(world.all_reduce, world.gather_objects, world.size, world.device, strategy.module)
        self.metrics.counts_shared = world.main_rank
        self.training = training
        self.in_step = False
        self.step = 0
        self.batch: Any = None
        self.size: int | None = None
        self.loader: int | None = None
        self.batches = 0
        self._of_loaders: list[int] = []  # numbers of batches of the loaders before the present loader
        self._offset = 0  # between the number of a batch in this epoch and its `position`
        self._of_parts: dict[str, tuple[Tensor, int]] = {}  # mean of metric objects over parts of a batch, and weight
        self.updated: dict[str, tuple[int, int]] = {}
        self._batch = 0  # `position` of this rank's batch; 0 between two batches
        self.idle = False
        self.logs_batches = self.ending = False
        self.published: dict[str, Tensor] = {}
        self.evaluated: set[str] = set()
        self._silent, self._warned = mute, not world.main_rank
        self._staged = strategy.world.axis("pipeline").size > 1  # then the main rank has no outputs of the step
        self._reports = strategy.world.reports  # else another stage of a pipeline has the outputs of the step
        self._mute = mute or not self._reports
        self._alone = not strategy.traits.lockstep  # values of a step are this rank's, not reduced

    def world_changed(self, world: World) -> None:
        """Reduce values over other ranks.

        Args:
            world: all ranks; the main rank has the sums of departed ranks.
        """
        self.metrics.world_changed(world.axis("metrics"))
        self.metrics.counts_shared = world.axis("metrics").main_rank
        self._reports = world.reports
        self._mute = self._silent or not self._reports

    def begin_batch(self, batch: Any, size: int | None, step: int) -> None:
        """Begin a batch, to which the following values belong.

        Args:
            batch: the user's batch.
            size: samples; None to count them when needed.
            step: number of the weight update.
        """
        self.batch, self.size, self.step, self.in_step, self.idle = batch, size, step, True, False
        self._weight, self.ending = None, False
        self._of_parts.clear()
        self.evaluated.clear()
        self.batches += 1
        self._batch = self.batches + self._offset

    def begin_loader(self, number: int, *, several: bool) -> None:
        """Begin the batches of a loader of an evaluation.

        Args:
            number: index of the loader.
            several: there are several; names receive the index.
        """
        if number:
            self._of_loaders.append(self.batches - sum(self._of_loaders))
        self.loader = number if several else None
        self._offset = position(number, 0) - self.batches

    def pass_batch(self, step: int) -> None:
        """Record a manual batch without a sample for this rank: the step's values are those of other ranks.

        Args:
            step: number of the weight update.
        """
        self.step, self.idle = step, True

    def forget_step(self, step: int) -> None:
        """Forget the values of a step that was not made.

        Args:
            step: number of the weight update.
        """
        self.metrics.forget_step(step)
        self.updated = {name: newest for name, newest in self.updated.items() if newest[0] != step}

    def end_batch(self) -> None:
        """End a batch; the following values belong to the epoch."""
        self.batch, self.in_step, self._batch = None, False, 0

    def log(
        self, name: str, value: Any, bar: bool, to_logger: bool, on_step: bool | None, on_epoch: bool | None,
        reduce_fx: Any, batch_size: int | None, add_dataloader_idx: bool, joined: bool,
    ) -> None:  # fmt: skip
        """Add a value; the arguments are those of `Module.log`.

        Args:
            name, value, on_step, on_epoch, reduce_fx, batch_size, add_dataloader_idx: see `Module.log`.
            bar: the progress bar shows the value.
            to_logger: loggers receive the value.
            joined: the value is reduced over ranks.

        Raises:
            ValueError: a stage of a pipeline logs a value that is not reduced; the name is logged differently; or with
                another metric object than before in the epoch.
        """
        if self._staged and not joined:
            raise ValueError(
                f"self.log({name!r}, ..., sync_dist=False or rank_zero_only=True): the main rank of a pipeline has no "
                "outputs of a step, and its values would be lost. Remove the argument: values of the last stage "
                "are reduced over data ranks"
            )
        if type(value) is not Tensor and is_dtensor(value):  # a norm of shards, such as under fsdp
            value = value.full_tensor().detach()  # a collective: also on ranks whose value is discarded
        if self._mute:
            if self._silent and self._reports and not self._warned:
                self._warned = True
                warnings.warn("Trainer(barebones=True): self.log has no effect", stacklevel=3)
            return
        if self.loader is not None:
            if add_dataloader_idx:
                name = f"{name}{_LOADER}{self.loader}"
            else:
                self.metrics.of_loader(name, self.loader)
        series = self.metrics.series.get(name)
        if series is None:
            self._check_name(name, completed=self.loader is not None and add_dataloader_idx)
            series = self._begin(name, reduce_fx, on_step, on_epoch, bar, to_logger, joined)
        elif series.asked != (reduce_fx, on_step, on_epoch, joined, self.in_step):
            if self._begins_again(series):
                series = self._begin(name, reduce_fx, on_step, on_epoch, bar, to_logger, joined)
            else:
                self._check_same(name, series, reduce_fx, on_step, on_epoch, joined)
        if (bar and not series.bar) or (to_logger and not series.to_logger):  # an earlier call has not asked for it
            series.bar, series.to_logger = bar or series.bar, to_logger or series.to_logger
        if type(value) is not Tensor or value.dim() or value.dtype not in EXACT:
            if hasattr(value, "compute") and hasattr(value, "update"):
                self._add_object(name, value, series, batch_size)
                return
            value = as_value(value, name)
        if not self.in_step:
            weight: float = 1
        elif batch_size is not None:
            weight = batch_size
        elif self._weigh is not None:
            weight = self.weight
        else:
            weight = self.count() if self.size is None else self.size
        if not weight and series.reduction == "mean":  # of no elements, perhaps NaN
            value = 0.0
        if series.on_step and isinstance(value, Tensor):  # read after the batch; the user may change it in place before
            value = value.clone()
        series.add(value, weight, self.step, self._batch)

    @staticmethod
    def _check_name(name: Any, *, completed: bool) -> None:
        """Refuse a name that is not text, or that is reserved for values of several loaders.

        Args:
            name: of a value that is logged for the first time.
            completed: `log` has added the number of the loader to the name.

        Raises:
            ValueError: it has the name and the remedy.
        """
        if not isinstance(name, str):
            raise WrongArgument(f"self.log({name!r}, ...): the name must be text, such as {str(name)!r}")
        if name.count(_LOADER) > completed:
            raise ValueError(
                f"self.log({name!r}, ...): names with {_LOADER!r} are those of values of several loaders, which "
                "self.log completes itself: remove this part of the name"
            )

    def _begins_again(self, series: Series) -> bool:
        """Return whether values with other arguments begin a new series.

        They do in a hook at the end of an epoch, after the values of its steps are published, and in a step of the next
        epoch.
        """
        moved = series.inside is not None and series.inside is not self.in_step
        return moved and series.total is None and series.epoch_batch == math.inf

    def _add_object(self, name: str, metric: Any, series: Series, batch_size: int | None) -> None:
        """Keep a metric object, whose value is computed when the series is published.

        Raises:
            ValueError: an earlier batch of the epoch has logged another object.
        """
        before, _ = self.metrics.objects.get(name, (None, None))
        if before is None:
            self._check_of_one_loader(name, metric, series)
            series.step_batch = series.epoch_batch = self._batch
        elif before is not metric and series.on_epoch:
            raise ValueError(
                f"self.log({name!r}, metric): this is another {type(metric).__name__} than that of an earlier "
                "batch, whose samples would be missing from the value of the epoch. Create the metric in "
                "__init__ and assign it to self, or log metric.compute() for a mean over batches"
            )
        self.metrics.objects[name] = (metric, series)
        if series.on_step:
            self.updated[name] = self.step, self.count() if batch_size is None else batch_size

    def _check_of_one_loader(self, name: str, metric: Any, series: Series) -> None:
        """Refuse a metric object for the values of several loaders: each would have the samples of all.

        Raises:
            ValueError: an earlier loader has logged this metric object.
        """
        if self.loader is None or not series.on_epoch:
            return
        logged = self.metrics.objects.items()
        others = {self._loader_of(other) for other, (known, its) in logged if known is metric and its.on_epoch}
        if shared := {loader for loader in others if loader not in (None, self.loader)}:
            raise ValueError(
                f"self.log({name.partition(_LOADER)[0]!r}, metric): the same {type(metric).__name__} is logged for the "
                f"loaders {', '.join(map(str, sorted(shared)))} and {self.loader}, and its values would mix their "
                "samples. Use a metric for each loader (an nn.ModuleList with dataloader_idx as the index), or "
                "the same name and add_dataloader_idx=False for the value of all loaders together"
            )

    def _loader_of(self, name: str) -> int | None:
        """Return the index of the only loader that logs a name so far; None for a name of several loaders."""
        plain, _, number = name.partition(_LOADER)
        return int(number) if number else self.metrics.loaders.get(plain)

    def count(self) -> int:
        """Return the number of samples of the batch."""
        if self.size is None:
            self.size = batch_size_of(self.batch)
        return self.size

    @property
    def weight(self) -> float:
        """Return the weight of the batch as defined by the module."""
        if self._weight is None:
            assert self._weigh is not None
            self._weight = self._weigh(self.batch)
        return self._weight

    @contextlib.contextmanager
    def part(self, part: Any) -> Iterator[None]:
        """Context of the step for a part of a batch, whose samples are the weight of logged values.

        Args:
            part: the part.
        """
        whole = self.batch, self.size, self._weight
        self.batch, self.size, self._weight = part, None, None
        self.updated.clear()
        try:
            yield
            self._add_part()
        finally:
            self.batch, self.size, self._weight = whole

    def _add_part(self) -> None:
        """Add the values that metric objects have for a part of a batch."""
        for name, (_, weight) in self.updated.items():
            cached = getattr(self.metrics.objects[name][0], "_forward_cache", None)
            if weight and isinstance(cached, Tensor) and cached.numel() == 1:
                mean, before = self._of_parts.get(name, (torch.zeros_like(cached), 0))
                share = weight / (before + weight)
                self._of_parts[name] = mean * (1 - share) + cached * share, before + weight

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """Discard logged values and updates of metric objects: a step that runs only for its collectives."""
        metrics = metric_objects(self.metrics.module).values() if self.metrics.module is not None else ()
        before = [(metric, states_of(metric), metric._forward_cache) for metric in metrics]
        mute, self._mute = self._mute, True
        try:
            yield
        finally:
            self._mute = mute
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
        self.logs_batches = self.logs_batches or step
        return series

    def _moments(self, name: str, on_step: bool | None, on_epoch: bool | None) -> tuple[bool, bool]:
        """Return (on_step, on_epoch) of a value, with defaults resolved."""
        default_step = self.training and self.in_step
        step = default_step if on_step is None else on_step
        epoch = not default_step if on_epoch is None else on_epoch
        if not step and not epoch:
            raise ValueError(
                f"self.log({name!r}, ..., on_step=False, on_epoch=False) would log nothing; set one to True"
            )
        if step and not self.in_step:
            raise ValueError(
                f"self.log({name!r}, ..., on_step=True) was called between two batches, where there is no step: "
                "remove on_step=True"
            )
        return step, epoch

    def _check_same(
        self, name: str, series: Series, reduce_fx: Any, on_step: bool | None, on_epoch: bool | None, joined: bool
    ) -> None:  # fmt: skip
        """Refuse a name that is logged with different options, whose values can't be combined.

        Raises:
            ValueError: an earlier call of `log` had other options, or was not also within (or between) batches.
        """
        wanted = (check_reduction(name, reduce_fx), *self._moments(name, on_step, on_epoch), not joined)
        same = wanted == (series.reduction, series.on_step, series.on_epoch, series.local)
        mixed = series.reduction == "mean" and series.inside not in (None, self.in_step)
        if not same or mixed:
            where = "within a batch", "between batches"
            raise ValueError(
                f"self.log({name!r}, ...) is called twice in different ways, "
                + (f"{where[0]} and {where[1]}" if mixed else "with another reduce_fx, on_step, on_epoch or sync_dist")
                + ": the values can't be combined; use another name for one of them"
            )
        series.asked, series.inside = (reduce_fx, on_step, on_epoch, joined, self.in_step), self.in_step

    @property
    def _had(self) -> list[int] | None:
        """Return the numbers of batches, by loader, in which this rank must have logged names of other ranks."""
        return [*self._of_loaders, self.batches - sum(self._of_loaders)] if self._reports else None

    def step_values(self, step: int) -> dict[str, Tensor]:
        """Return the values of a step, reduced over ranks; in lockstep, every rank calls it in the same step.

        Args:
            step: number of the weight update.
        """
        metrics = self.metrics
        values = metrics.joined(metrics.due(epoch=False, step=step), epoch=False, batches=self._had, alone=self._alone)
        latest: dict[str, tuple[Tensor, int]] = {}  # results of the metrics' own forward, with their weights
        for name, (metric, series) in sorted(metrics.objects.items()):
            if series.on_step:
                cached = getattr(metric, "_forward_cache", None)
                if self._alone and name not in self.updated:  # loaded from a checkpoint: this rank has no batch since
                    continue
                if cached is None:
                    computed = computed_alone(metric) if self._alone else computed_together(metric)
                    if computed is not None:
                        values[name] = as_single(name, computed)
                else:
                    updated, weight = self.updated.get(name, (-1, 0))
                    value = torch.as_tensor(cached)
                    if name in self._of_parts:
                        value, weight = self._of_parts[name]
                    latest[name] = value, weight if updated == step and not self.idle else 0
        return values | metrics.means(latest, alone=self._alone)

    def values_of_batch(self) -> dict[str, Tensor]:
        """Return this rank's values of the present evaluation batch that were logged with `on_step`."""
        metrics = self.metrics
        if not self.logs_batches:
            return {}
        names = metrics.due(epoch=False, step=self.step)
        values = metrics.joined(names, epoch=False, alone=True)
        for name, (metric, series) in sorted(metrics.objects.items()):
            now = series.on_step and name in self.updated and self.updated[name][0] == self.step
            latest = getattr(metric, "_forward_cache", None) if now else None
            if latest is not None:  # else the value needs a collective
                values[name] = torch.as_tensor(latest)
        return values

    def epoch_values(self, *, ended: bool) -> dict[str, Tensor]:
        """Return the values since the last call, reduced over ranks; every rank calls it in the same step.

        Args:
            ended: reset the metric objects: the hooks at the end of the epoch, which may compute them, have run.
        """
        metrics = self.metrics
        values = metrics.joined(metrics.due(epoch=True), epoch=True, batches=self._had)
        for name, (metric, series) in sorted(metrics.objects.items()):  # ranks may have logged in different orders
            if series.on_epoch:
                computed = computed_together(metric)
                if computed is not None:  # a metric without an update may have no value
                    values[name] = as_single(name, computed)
            metrics.computed.append(metric)  # also of steps alone: hooks compute its value of the epoch
        metrics.forget_epoch()
        if ended:
            for metric in metrics.computed:
                metric.reset()
            metrics.computed.clear()
        return {name: values[name] for name in metrics.series if name in values} | values  # in the order of the calls

    def names_of_hooks(self) -> list[str]:
        """Return the names that hooks at the end of the epoch have logged so far, and that are not published yet."""
        return [*self.metrics.due(epoch=True), *self.metrics.objects] if self.ending else []

    def values_of_hooks(self) -> dict[str, Tensor]:
        """Return the values of `names_of_hooks`; of a single rank, without communication."""
        names, objects = self.names_of_hooks(), self.metrics.objects
        values = self.metrics.joined([name for name in names if name not in objects], epoch=True, alone=True)
        computed = {name: objects[name][0].compute() for name in names if name in objects}
        return values | {name: as_single(name, value) for name, value in computed.items() if value is not None}

    def local_values(self) -> dict[str, Any]:
        """Return this rank's newest values for the progress bar, without communication."""
        if not self._reports:  # only reduced values are known here
            return {}
        return {
            self.names(name, epoch=False): series.value for name, series in self.metrics.series.items()
            if series.bar and series.on_step and series.value is not None
        }  # fmt: skip

    def series(self, name: str) -> Series:
        """Return the series of a name.

        Args:
            name: a logged name.
        """
        series = self.metrics.series.get(name)
        return series if series is not None else self.metrics.objects[name][1]

    def names(self, name: str, *, epoch: bool) -> str:
        """Return a value's name for loggers: a name with both kinds of values becomes `name_step` and `name_epoch`.

        Args:
            name: a logged name.
            epoch: of the epoch's value; else of the step's.
        """
        series = self.series(name)
        if not (series.on_step and series.on_epoch):
            return name
        plain, slash, loader = name.partition(_LOADER)
        return f"{plain}_{'epoch' if epoch else 'step'}{slash}{loader}"
