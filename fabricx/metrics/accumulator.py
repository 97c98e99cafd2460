"""Accumulates logged values as (sum, weight) on the device, and reduces them over ranks in one packed reduction."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from fabricx.core.tensors.reductions import Reduction
from fabricx.distributed.statistics.metric_sums import merge_sums, plain
from fabricx.distributed.world import World
from fabricx.errors import RanksDisagree
from fabricx.metrics.series import VALUES, Series, join

_PER_LOADER: Final = 2**40  # more batches than a loader has


def position(loader: int, batch: int) -> int:
    """Return a number that increases with the batches of all loaders.

    Args:
        loader: index of the loader.
        batch: number of the batch among this rank's batches of the loader, from 1.
    """
    return loader * _PER_LOADER + batch


class Metrics:
    """All series of a phase. `Module.log` adds values; the trainer reduces them over ranks when they are due.

    Args:
        reduce: all-reduces a packed tensor in place, with "sum", "max" or "min".
        gather: gathers an object of each rank; called only if ranks have logged different names.
        size: number of ranks.
        device: device of the packed tensors.
        module: module whose attributes contain the metric objects.

    Attributes:
        series: series by name.
        objects: torchmetrics objects with their series, by name.
        computed: metric objects whose values of the epoch are published, and that are not reset yet.
        shared: sums of the epoch that are equal on all ranks, in addition to the ranks' own; see `merge_sums`.
        counts_shared: this rank contributes `shared` to the reduction; exactly one rank does.
        loaders: index of the loader that a name without an index belongs to; None for a name of several loaders.
    """

    def __init__(
        self,
        reduce: Callable[[Tensor, Any], Tensor],
        gather: Callable[[Any], list[Any]],
        size: int,
        device: torch.device,
        module: nn.Module | None = None,
    ) -> None:
        self.module = module
        self._reduce = reduce
        self._gather = gather
        self._size = size
        self._device = device
        self.series: dict[str, Series] = {}
        self.objects: dict[str, tuple[Any, Series]] = {}
        self.computed: list[Any] = []
        self.shared: dict[str, Any] = {}
        self.counts_shared = True
        self.loaders: dict[str, int | None] = {}

    def of_loader(self, name: str, loader: int | None) -> None:
        """Note that a loader's batches log a name.

        Args:
            name: name without an index of the loader.
            loader: index of the loader; None for several loaders.
        """
        if self.loaders.setdefault(name, loader) != loader:
            self.loaders[name] = None

    def mark(self) -> dict[str, tuple[Any, ...]]:
        """Return the values of all series, for `rewind`."""
        return {name: tuple(getattr(s, slot) for slot in VALUES) for name, s in self.series.items()}

    def rewind(self, mark: dict[str, tuple[Any, ...]]) -> None:
        """Restore the values of a `mark`.

        Args:
            mark: result of `mark`.
        """
        for name, series in self.series.items():
            for slot, value in zip(VALUES, mark.get(name, (-1, None, 0.0, None, 0.0)), strict=True):
                setattr(series, slot, value)

    def world_changed(self, world: World) -> None:
        """Reduce over other ranks from now on.

        Args:
            world: the new ranks.
        """
        self._reduce, self._gather, self._size = world.all_reduce, world.gather_objects, world.size

    def due(self, *, epoch: bool, step: int | None = None) -> list[str]:
        """Return the names that have a value.

        Args:
            epoch: in the epoch; else in a step.
            step: number of the weight update.
        """
        if epoch:
            for name, (kind, *_) in self.shared.items():
                self.series.setdefault(name, Series.of_kind(tuple(kind)))
            names = [name for name, series in self.series.items() if series.on_epoch and series.total is not None]
            return [*names, *(name for name in self.shared if name not in names)]
        made = {name: series for name, series in self.series.items() if series.on_step and series.step == step}
        return [name for name, series in made.items() if series.value is not None]  # None: its batch was rewound

    def joined(
        self, names: Iterable[str], *, epoch: bool, batches: Sequence[int] | None = (), alone: bool = False
    ) -> dict[str, Tensor]:  # fmt: skip
        """Reduce values over all ranks, to one-element tensors by name; whole numbers are exact.

        Every rank calls this in the same step, with whatever names it has logged, except with `alone`.

        Args:
            names: names that this rank has logged.
            epoch: values of the epoch; else of the latest step.
            batches: numbers of batches of this rank in the epoch, by loader. Names that other ranks have logged first
                in a later batch of a loader may be missing on this rank; None if any names may be missing.
            alone: return this rank's values without communication.

        Raises:
            RanksDisagree: ranks logged different names in batches that all of them had.
        """
        logged = wanted = sorted(names)
        together = self._size > 1 and not alone
        if together:
            local = [name for name in logged if self.series[name].local]
            shared = [name for name in logged if not self.series[name].local]
            wanted = sorted(local + self._agree(shared, epoch=epoch, batches=batches))
        values: dict[str, Tensor] = {}
        for op in ("sum", "max", "min"):
            chosen = [n for n in wanted if _operation(self.series[n].reduction) == op]
            if not chosen:
                continue
            packed = self._pack(chosen, logged, epoch=epoch)
            rows = [row for row, name in enumerate(chosen) if not self.series[name].local]
            if together and rows:
                packed[rows] = self._over_ranks(packed[rows], op)
            for row, name in enumerate(chosen):
                mean = self.series[name].reduction == "mean"
                values[name] = _rounded(packed[row, 0] / packed[row, 1] if mean else packed[row, 0])
        return {name: values[name] for name in wanted}

    def _over_ranks(self, packed: Tensor, op: Literal["sum", "max", "min"]) -> Tensor:
        """Reduce values over all ranks; a maximum or minimum is NaN if the value of a rank is NaN.

        Backends of torch.distributed may lose NaN in these. Their weights are not used, and carry it.

        Args:
            packed: values and weights, shape [values, 2].
            op: operation.
        """
        if op == "sum":
            return self._reduce(packed.contiguous(), op)
        sign, nan = (1.0 if op == "max" else -1.0), packed[:, 0].isnan()
        values = packed[:, 0].masked_fill(nan, -sign * math.inf)
        values, marks = self._reduce(torch.stack([values, nan * sign]).to(packed.dtype), op)
        return torch.stack([values.masked_fill(marks != 0, math.nan), packed[:, 1]], dim=1)

    def means(self, latest: Mapping[str, tuple[Tensor, int]], *, alone: bool) -> dict[str, Tensor]:
        """Return the means over ranks of the step's values of metric objects; every rank calls it, except with `alone`.

        A metric object computes its value of a step from the samples of a rank. Values with several elements are those
        of this rank.

        Args:
            latest: (value, weight) by name; a rank without a sample has weight 0.
            alone: return this rank's values without communication.
        """
        values = {name: value for name, (value, _) in latest.items()}
        names = [name for name, value in values.items() if value.numel() == 1]
        if self._size == 1 or alone or not names:
            return values
        kind = self._exact
        weights = torch.tensor([latest[name][1] for name in names], dtype=kind, device=self._device)
        local = torch.stack([values[name].detach().to(self._device, kind).reshape(()) for name in names])
        total, weight = self._reduce(torch.stack([torch.where(weights > 0, local * weights, 0.0), weights]), "sum")
        for name, mean in zip(names, torch.where(weight > 0, total / weight, local), strict=True):
            values[name] = mean.to(torch.get_default_dtype()).reshape(values[name].shape)
        return values

    @property
    def _exact(self) -> torch.dtype:
        """Return the dtype of sums. A number of Python has 53 bits, and the default dtype only 24."""
        return torch.float32 if self._device.type == "mps" else torch.float64

    def _pack(self, names: list[str], logged: list[str], *, epoch: bool) -> Tensor:
        """Return values and weights, shape [values, 2]; neutral values for names that this rank has not logged."""
        pairs = [
            self._epoch_pair(name) if epoch
            else self.series[name].packed(epoch=False) if name in logged
            else (self.series[name].neutral, 0.0)
            for name in names
        ]  # fmt: skip
        kind = self._exact
        sums = torch.stack([torch.as_tensor(total, dtype=kind, device=self._device).reshape(()) for total, _ in pairs])
        weights = torch.tensor([weight for _, weight in pairs], dtype=kind, device=self._device)
        return torch.stack([sums, weights], dim=1)

    def _epoch_pair(self, name: str) -> tuple[Any, float]:
        """Return (sum, weight) of an epoch, with the shared sums if this rank contributes them."""
        series = self.series[name]
        if series.total is None:
            series.contribute_nothing()
        if name not in self.shared or not self.counts_shared:
            return series.packed(epoch=True)
        sums = {name: [list(series.kind()), plain(series.total), series.weights]}
        _, total, weights = merge_sums(sums, {name: self.shared[name]})[name]
        return total, weights

    def _agree(self, names: list[str], *, epoch: bool, batches: Sequence[int] | None) -> list[str]:
        """Return the names to reduce: this rank's, and names that only ranks with more batches have logged."""
        logged_series = {name: self.series[name] for name in names}
        logged_series.update({name: series for name, (_, series) in self.objects.items()})
        kinds = {name: series.logged_as() for name, series in logged_series.items()}
        if self._equal("\n".join([f"{name} {kind[:3]} {kind[-1]}" for name, kind in kinds.items()])):
            return names
        first = {name: series.epoch_batch if epoch else series.step_batch for name, series in logged_series.items()}
        by_rank = self._gather((batches, kinds, first, self._attributes(), self.loaders))
        known: dict[str, tuple[Any, ...]] = {}
        attributes: dict[str, tuple[str, bool]] = {}  # of metric objects, by name
        begins: dict[str, float] = {}  # position of the batch from which every rank must have logged a name
        for _, logged, firsts, paths, loaders in by_rank:
            for name, loader in loaders.items():
                self.of_loader(name, loader)
            known.update(logged)
            attributes.update(paths)
            begins.update({name: min(number, begins.get(name, math.inf)) for name, number in firsts.items()})
        if any(name not in logged and _has_had(begins[name], had) for had, logged, *_ in by_rank for name in known):
            lines = "\n".join(
                f"  rank {r}: {', '.join(map(repr, n)) or 'nothing'}" for r, (_, n, *_) in enumerate(by_rank)
            )
            raise RanksDisagree(
                f"ranks logged different names, so their values can't be joined:\n{lines}\n"
                "  log the same names on every rank, or pass sync_dist=False to keep a value on the main rank"
            )
        for name, kind in known.items():
            _check_alike(name, [logged.get(name) for _, logged, *_ in by_rank])
            if name in attributes:
                self._take_part(name, *attributes[name], kind)
            elif name not in names:
                series = self.series.setdefault(name, Series.of_kind(kind[:-1]))
                if epoch:  # the value of a step may be that of a later step, which is not complete
                    series.contribute_nothing()
        return sorted(known.keys() - attributes.keys())

    def _equal(self, text: str) -> bool:
        """Return whether a text is the same on all ranks."""
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")
        highest, lowest = self._reduce(torch.tensor([digest, -digest], device=self._device), "max").tolist()
        return bool(highest == -lowest)

    def filled(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add values of a step that only other ranks have to those of this rank; every rank calls it.

        Of ranks that work at their own pace, some may have trained no batch, the main rank among them.

        Args:
            values: this rank's values of its latest step, by name.
        """
        if self._size == 1:
            return values
        series = {name: self.series.get(name) or self.objects[name][1] for name in values}
        shared = sorted(name for name in values if not series[name].local and values[name].numel() == 1)
        if self._equal("\n".join(shared)):
            return values
        filled = dict(values)
        for known in self._gather({name: (series[name].kind(), plain(values[name])) for name in shared}):
            for name, (kind, value) in known.items():
                if name not in filled:
                    self.series.setdefault(name, Series.of_kind(kind))
                    filled[name] = torch.tensor(value, dtype=self._exact, device=self._device)
        return filled

    def _attributes(self) -> dict[str, tuple[str, bool]]:
        """Return (path in the module or "", has a value of the step) for each metric object."""
        parts = self.module.named_modules() if self.module is not None and self.objects else ()
        paths = {id(part): path for path, part in parts}
        return {
            name: (paths.get(id(metric), ""), getattr(metric, "_forward_cache", None) is not None)
            for name, (metric, _) in self.objects.items()
        }

    def _take_part(self, name: str, path: str, cached: bool, kind: tuple[Any, ...]) -> None:
        """Make this rank join a metric object that only other ranks have updated, since `compute` is a collective.

        Raises:
            ValueError: the metric object is no attribute of the module.
        """
        if name in self.objects:
            return
        if not path or self.module is None:
            raise ValueError(
                f"self.log({name!r}, metric): a rank without a batch has to take part in the reduction of this "
                "metric, and finds only metrics that are attributes of the module: assign it to self in __init__"
            )
        metric: Any = self.module.get_submodule(path)
        if cached:  # the value of the step is then available without a collective
            metric._forward_cache = torch.zeros((), device=self._device)
        self.objects[name] = (metric, self.series.setdefault(name, Series.of_kind(kind[:-1])))

    def sums(self) -> dict[str, Any]:
        """Return this rank's sums of the epoch so far; later values do not change the result."""
        return {
            name: [list(series.kind()), series.total, series.weights]
            for name, series in self.series.items()
            if series.on_epoch and series.total is not None
        }

    def take_sums(self) -> dict[str, Any]:
        """Return this rank's sums since the last call as plain numbers, and reset them.

        Values that are not reduced over ranks are kept.
        """
        taken = {}
        for name, series in self.series.items():
            if series.on_epoch and series.total is not None and not series.local:
                taken[name] = [list(series.kind()), plain(series.total), series.weights]
                series.forget_epoch()
        return taken

    def share(self, sums: dict[str, Any]) -> None:
        """Add sums that all ranks have; every rank calls it with the same sums.

        Args:
            sums: see `merge_sums`.
        """
        self.shared = merge_sums(self.shared, sums)

    @property
    def newest_step(self) -> int:
        """Return the newest step for which this rank has values; -1 for none."""
        return max((series.step for series in self.series.values() if series.on_step), default=-1)

    def forget_step(self, step: int) -> None:
        """Forget the values of a step that was not made.

        Args:
            step: number of the weight update.
        """
        for series in self.series.values():
            if series.step == step:
                series.step = -1

    def forget_steps(self) -> None:
        """Forget the latest values of all series."""
        for series in self.series.values():
            series.step, series.value, series.weight, series.step_batch = -1, None, 0.0, math.inf

    def latest(self) -> dict[str, Any]:
        """Return the latest value of each series of this rank."""
        return {
            name: [list(series.kind()), series.step, series.value, series.weight]
            for name, series in self.series.items()
            if series.on_step
        }

    def set_latest(self, latest: dict[str, Any]) -> None:
        """Restore the latest values.

        Args:
            latest: result of `latest` or `join_latest`.
        """
        self.forget_steps()
        for name, (kind, step, value, weight) in latest.items():
            series = self.series.setdefault(name, Series.of_kind(tuple(kind)))
            series.step, series.value, series.weight = step, value, weight

    def add_sums(self, sums: dict[str, Any]) -> None:
        """Add sums to those of the epoch.

        Args:
            sums: result of `sums`, of this or another rank.
        """
        for name, (kind, added, weights) in sums.items():
            series = self.series.setdefault(name, Series.of_kind(tuple(kind)))
            total = added.to(self._device) if isinstance(added, Tensor) else added
            joins = "sum" if series.reduction == "mean" else series.reduction
            series.total = total if series.total is None else join(joins, series.total, 1.0, total, 1.0)
            series.weights += weights

    def forget_epoch(self) -> None:
        """Begin a new epoch: reset all sums, metric objects and shared sums."""
        for series in self.series.values():
            series.forget_epoch()
        self.objects.clear()
        self.shared = {}


def _check_alike(name: str, ways: list[tuple[Any, ...] | None]) -> None:
    """Refuse values of a name that ranks have logged with different options; None for a rank without values.

    Raises:
        RanksDisagree: the message lists the options of each rank.
    """
    present = [way for way in ways if way is not None]
    if len({way[:3] for way in present}) == 1 and len({way[-1] for way in present} - {None}) <= 1:
        return
    where = {True: ", within batches", False: ", between batches", None: ""}
    lines = [
        f"  rank {rank}: "
        + (f"reduce_fx={way[0]}, on_step={way[1]}, on_epoch={way[2]}{where[way[-1]]}" if way else "-")
        for rank, way in enumerate(ways)
    ]
    raise RanksDisagree(
        f"ranks logged {name!r} in different ways, so its values can't be joined:\n"
        + "\n".join(lines)
        + "\n  log it in the same hook with the same reduce_fx, on_step and on_epoch on every rank"
    )


def _rounded(value: Tensor) -> Tensor:
    """Round a value to the default dtype, but for whole numbers, which may have more digits: counts of tokens."""
    return torch.where(value == value.round(), value, value.to(torch.get_default_dtype()).to(value.dtype))


def _has_had(first: float, batches: Sequence[int] | None) -> bool:
    """Return whether a rank with these numbers of batches, by loader, has had the batch at position `first`."""
    if batches is None or first == math.inf:
        return False
    loader, number = divmod(int(first), _PER_LOADER)
    return number <= (batches[loader] if loader < len(batches) else 0)


def _operation(reduction: Reduction) -> str:
    return reduction if reduction in ("max", "min") else "sum"
