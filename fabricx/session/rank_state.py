"""Per-rank resume state without weights: random states, metric sums, data position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fabricx.core.module_state.attribute_copies import Key
from fabricx.core.module_state.buffers import BufferMark
from fabricx.core.module_state.packed_attributes import packed
from fabricx.core.module_state.rng import RandomState
from fabricx.data.data_state import states_of_generators
from fabricx.distributed.messages.tensor_bytes import as_bytes
from fabricx.distributed.statistics.metric_sums import merge_sums, plain
from fabricx.metrics.objects import (
    has_first_state,
    merge_states,
    metric_objects,
    set_states,
    states_of,
    states_on_cpu,
)
from fabricx.metrics.series import Series, join_latest

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.data.run_data import RunData
    from fabricx.distributed.world import World
    from fabricx.metrics.run_metrics import RunMetrics
    from fabricx.telemetry.recorder import NoopRecorder


@final
class RankState:
    """Snapshot of a rank's random states, metric sums and position in its own stream, and of states of callbacks.

    A run that resumes from a checkpoint within an accumulation window or a validation repeats the window or validation
    from its start. Therefore a snapshot is taken at the start, and saved in place of the later state.

    Args:
        module: module of a fit.
        data, metrics: of the fit.
        buffers: copies of the module's buffers at the start of a window, whose batches may change them; None otherwise.
        objects: result of `metric_objects`, if available.
        states: result of `states_before`, for checkpoints in place of the later states; None for these.
        attributes: changed attributes of the module and of callbacks, for recovery.

    Attributes:
        states, attributes: see above.
        buffers: copies of buffers at the start of a window, by name.
        of_window: this is the start of a window.
    """

    def __init__(
        self, module: Module, data: RunData, metrics: RunMetrics, buffers: dict[str, Tensor] | None = None,
        objects: dict[str, Any] | None = None, states: dict[str, Any] | None = None,
        attributes: dict[Key, Any] | None = None,
    ) -> None:  # fmt: skip
        self.states = states
        self.attributes = attributes or {}
        self.of_window = buffers is not None
        self.buffers = buffers or {}
        self._random, self._own = RandomState(), states_of_generators(data.own_generators)
        sums = metrics.training.metrics
        self._sums, self._shared = sums.sums(), sums.shared if sums.counts_shared else {}
        objects = metric_objects(module) if objects is None else objects
        computed = {id(metric) for metric in sums.computed}
        self._objects = {name: states_of(metric) for name, metric in objects.items()}
        self._computed = [name for name, metric in objects.items() if id(metric) in computed]
        self._logged = _logged_objects(metrics, objects) if objects else {}
        self._position = data.train_feed.state_dict()
        self._latest = sums.latest()
        self._batches = metrics.training.batches

    def with_states(self, run: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a run with the states of callbacks and the data module at this point.

        Args:
            run: result of `run_state`, perhaps with other entries.
        """
        before = self.states or {}
        return {**run, **before, "callbacks": {**run["callbacks"], **before.get("callbacks", {})}}

    def restore_buffers(self, module: nn.Module) -> None:
        """Restore the module's buffers from the start of the window.

        Args:
            module: changed in place.
        """
        live = dict(module.named_buffers(remove_duplicate=False))
        for name, copy in self.buffers.items():
            live[name].copy_(copy)

    def record(self) -> dict[str, Any]:
        """Return the state in a form that is pickled fast, for the records in shared memory; see `from_record`."""
        return {
            "random": self._random.packed(),
            "own": self._own,
            "sums": {name: [kind, plain(total), weights] for name, (kind, total, weights) in self._sums.items()},
            "latest": {
                name: [kind, step, plain(value), weight] for name, (kind, step, value, weight) in self._latest.items()
            },
            "objects": {name: states_on_cpu(states) for name, states in self._objects.items()},
            "computed": self._computed,
            "logged": {
                name: [attribute, kind, step and [step[0].tolist(), *step[1:]]]
                for name, (attribute, kind, step) in self._logged.items()
            },
            "position": self._position,
            "batches": self._batches,
            "attributes": packed(self.attributes),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data and tensors, for checkpoints."""
        return {
            "random": self._random.state_dict(),
            "own": self._own,
            "sums": merge_sums(self._sums, self._shared) if self._shared else self._sums,
            "objects": self._objects,
            "computed": self._computed,
            "logged": self._logged,
            "position": self._position,
            "latest": self._latest,
            "batches": self._batches,
            **({"attributes": packed(self.attributes)} if self.attributes else {}),
        }


@final
class LoggedMark:
    """Snapshot of metric sums, metric objects and buffers before a batch whose gradient may be dropped.

    Args:
        module: module of a fit.
        metrics, recorder: of the fit.
    """

    def __init__(self, module: Module, metrics: RunMetrics, recorder: NoopRecorder) -> None:
        self._metrics, self._recorder = metrics, recorder
        self._values = metrics.logbook.metrics.mark()
        self._objects = [(metric, states_of(metric)) for metric in metric_objects(module).values()]
        self._buffers = BufferMark(module)
        self._batches, self._samples = metrics.logbook.batches, recorder.samples

    def restore(self) -> None:
        """Restore the state from before the batch, which will be trained again."""
        self._metrics.logbook.metrics.rewind(self._values)
        for metric, states in self._objects:
            set_states(metric, states)
        self._buffers.restore()
        self._metrics.logbook.batches, self._recorder.samples = self._batches, self._samples


def from_record(record: dict[str, Any]) -> dict[str, Any]:
    """Convert a result of `RankState.record` to that of `state_dict`.

    Args:
        record: record of a rank.
    """
    return {**record, "random": RandomState.unpacked(record["random"]).state_dict()}


def load_buffers(module: nn.Module, packed: dict[str, bytes] | None) -> None:
    """Write packed buffers to a module.

    Args:
        module: changed in place.
        packed: result of `BufferCopies.packed`.
    """
    live = dict(module.named_buffers(remove_duplicate=False)) if packed else {}
    for name, data in (packed or {}).items():
        if data:
            live[name].copy_(torch.frombuffer(bytearray(data), dtype=live[name].dtype).view(live[name].shape))


def restore_rank_states(
    module: Module, data: RunData, metrics: RunMetrics, world: World, ranks: list[dict[str, Any]], *, rank: int | None
) -> None:  # fmt: skip
    """Restore metric sums, metric objects, buffers and stream positions of ranks, without random states.

    Args:
        module: module of a fit.
        data, metrics: of the fit.
        world: the present ranks.
        ranks: `state_dict` of each rank of the earlier run.
        rank: index of this rank's state; None if the ranks have changed: the main rank then merges the sums of all
            ranks, and stream positions are lost.
    """
    merges = rank is None and world.axis("metrics").main_rank
    states = ranks if merges else [ranks[rank]] if rank is not None and world.reports else []
    sums = metrics.training.metrics
    sums.forget_epoch()
    sums.computed.clear()
    sums.set_latest({})  # also on a rank without a state: its values are on the main rank, or of an interrupted batch
    for saved in states:
        sums.add_sums(saved["sums"])
    if states:
        latest = [saved.get("latest", {}) for saved in states]
        sums.set_latest(join_latest(latest) if merges else latest[0])
        # Without this step the rank would count as a rank without a batch, and its values would be skipped.
        steps = [step for values in latest for _, step, *_ in values.values()]
        metrics.training.step = max(steps, default=metrics.training.step)
    objects = metric_objects(module)
    for metric in objects.values():
        metric.reset()
    # At its own pace, a rank may have trained no batch of the epoch; all ranks reduce an object that any has logged.
    logged = {name: way for saved in ranks for name, way in saved["logged"].items()}
    for name, (attribute, kind, *_) in logged.items():
        if attribute in objects:
            sums.series[name] = Series.of_kind(tuple(kind))
            sums.objects[name] = (objects[attribute], sums.series[name])
    # The hooks at the end of an epoch run again: they may compute these objects, which are reset then.
    published = {name for saved in ranks for name in saved.get("computed", ())}
    sums.computed.extend(metric for name, metric in objects.items() if name in published)
    of_objects = states if rank is not None else ranks if has_first_state(world, fits=True) else []
    for name, metric in objects.items():
        saved_states = [saved["objects"][name] for saved in of_objects if name in saved["objects"]]
        if saved_states and not merge_states(metric, saved_states):
            raise ValueError(
                f"the states of self.{name} on several ranks can't be joined into a state that further batches update: "
                f"{type(metric).__name__} has a tensor state with dist_reduce_fx=None. Resume with as many ranks as "
                "the run had, or from a checkpoint between two epochs"
            )
    _restore_steps(metrics, ranks, states)
    if rank is not None:
        metrics.training.batches = ranks[rank].get("batches", 0)
        load_buffers(module, ranks[rank].get("buffers"))
        if ranks[rank]["position"] is not None:
            data.train_feed.load_state_dict(ranks[rank]["position"])


def _restore_steps(metrics: RunMetrics, ranks: list[dict[str, Any]], states: list[dict[str, Any]]) -> None:
    """Restore the values that metric objects had in the newest step.

    Args:
        metrics: of the fit, with the objects that are logged.
        ranks: states of all ranks of the earlier run.
        states: those that this rank continues; several are joined.
    """
    logbook = metrics.training
    logbook.updated.clear()
    # A rank without a value has one, too: otherwise it would compute the value, which is a collective.
    called = {name for saved in ranks for name, (_, _, *step) in saved["logged"].items() if step and step[0]}
    for name in called & logbook.metrics.objects.keys():
        metric: Any = logbook.metrics.objects[name][0]
        ways = [saved["logged"][name] for saved in states if name in saved["logged"]]
        steps = [step[0] for _, _, *step in ways if step and step[0]]
        newest = max((step for _, step, _ in steps), default=-1)
        weighted = [(torch.as_tensor(value), weight) for value, step, weight in steps if step == newest]
        weights = sum(weight for _, weight in weighted)
        mean = sum((value * (weight / weights) for value, weight in weighted), torch.zeros(())) if weights else None
        metric._forward_cache = (torch.zeros(()) if mean is None else mean).to(metric.device)
        if mean is not None:
            logbook.updated[name] = newest, weights


def _logged_objects(metrics: RunMetrics, objects: dict[str, Any]) -> dict[str, Any]:
    """Return the metric objects logged in this epoch, by logged name.

    Each has its attribute, the kind of the series, and [value, step, samples] of the newest step; None if the value of
    a step is computed from the state.
    """
    names = {id(metric): name for name, metric in objects.items()}
    logged = {}
    for name, (metric, series) in metrics.training.metrics.objects.items():
        if id(metric) in names:
            value = getattr(metric, "_forward_cache", None) if series.on_step else None
            step = (
                None
                if value is None
                else [torch.as_tensor(value).detach(), *metrics.training.updated.get(name, (-1, 0))]
            )
            logged[name] = [names[id(metric)], list(series.kind()), step]
    return logged


@final
class BufferCopies:
    """Reusable copies of a module's persistent buffers, such as running statistics.

    All buffers are copied each time: batch normalisation changes buffers without counting versions.

    Args:
        module: module with buffers.
        before: copies of the previous epoch, if any.
    """

    def __init__(self, module: nn.Module, before: BufferCopies | None = None) -> None:
        self._where = [
            (f"{prefix}.{name}" if prefix else name, owner._buffers, name, isinstance(owner, _NormBase))
            for prefix, owner in module.named_modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None and name not in owner._non_persistent_buffers_set
        ]
        known: dict[str, int] = {} if before is None else before._versions
        self._versions: dict[str, int] = {
            name: known.get(name, buffer._version)
            for name, buffers, key, _ in self._where
            if (buffer := buffers[key]) is not None
        }
        self._copies: dict[str, Tensor] = {}

    def packed(self, point: RankState | None = None) -> dict[str, bytes] | None:
        """Return the bytes of the buffers that batches have changed on this rank, by name; None without a change.

        Args:
            point: use its copies, from the start of a window; None for the present values.
        """
        kept = point.buffers if point is not None and point.of_window else {}
        live = {
            name: kept.get(name, buffer)
            for name, buffers, key, counts in self._where
            if (buffer := buffers.get(key)) is not None and (counts or buffer._version != self._versions[name])
        }
        if not live:
            return None
        values = (as_bytes(buffer.cpu()) for buffer in live.values())
        return {name: value.numpy().tobytes() for name, value in zip(live, values, strict=True)}

    def take(self) -> dict[str, Tensor]:
        """Copy the present values of all buffers; overwrites the copies of the last call."""
        live = {
            name: buffer.detach() for name, buffers, key, _ in self._where if (buffer := buffers.get(key)) is not None
        }
        if {n: b.shape for n, b in live.items()} != {n: copy.shape for n, copy in self._copies.items()}:
            self._copies = {name: buffer.clone() for name, buffer in live.items()}
        elif live:
            torch._foreach_copy_(list(self._copies.values()), list(live.values()))
        return self._copies
