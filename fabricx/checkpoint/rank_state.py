"""Per-rank resume state beside the weights: random states, metric sums, data position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fabricx.core.rng import RandomState
from fabricx.data.own_state import states_of_generators
from fabricx.distributed.metric_sums import merge_sums, plain
from fabricx.metrics.accumulator import Series, join_latest
from fabricx.metrics.objects import metric_objects, set_states, states_of

if TYPE_CHECKING:
    from fabricx.trainer.trainer import Trainer


@final
class RankState:
    """One rank's random numbers, logged sums and place in a stream of its own, as they are when it is made.

    An accumulation window, and a validation, begin again in a run that goes on from a checkpoint written in the middle
    of them. A point is therefore kept where they begin, and saved in the place of what came later.

    Args:
        t: the trainer.
        buffers: for the beginning of a window: copies of the module's buffers, which its batches may change.
        objects: what `metric_objects` has found, if that was asked already.
    """

    def __init__(
        self, t: Trainer, buffers: dict[str, Tensor] | None = None, objects: dict[str, Any] | None = None
    ) -> None:  # fmt: skip
        self.of_window = buffers is not None
        self.buffers = buffers or {}
        self._random, self._own = RandomState(), states_of_generators(t.own_generators)
        metrics = t.train_logbook.metrics
        self._sums, self._shared = metrics.sums(), metrics.shared if metrics.counts_shared else {}
        objects = metric_objects(t.module) if objects is None else objects
        self._objects = {name: states_of(metric) for name, metric in objects.items()}
        self._logged = _logged_objects(t, objects) if objects else {}
        self._position = t.train_feed.state_dict()
        self._latest = t.train_logbook.metrics.latest()

    def put_back_buffers(self, module: nn.Module) -> None:
        """Let the module's buffers be what they were when a window began."""
        live = dict(module.named_buffers())
        for name, copy in self.buffers.items():
            live[name].copy_(copy)

    def word(self) -> dict[str, Any]:
        """Return what `of_word` needs: in a form that is pickled quickly, with the values of the newest step."""
        return {
            "random": self._random.packed(),
            "own": self._own,
            "sums": {name: [kind, plain(total), weights] for name, (kind, total, weights) in self._sums.items()},
            "latest": {
                name: [kind, step, plain(value), weight] for name, (kind, step, value, weight) in self._latest.items()
            },
            "objects": {name: _on_cpu(states) for name, states in self._objects.items()},
            "logged": self._logged,
            "position": self._position,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return plain data and tensors."""
        return {
            "random": self._random.state_dict(),
            "own": self._own,
            "sums": merge_sums(self._sums, self._shared) if self._shared else self._sums,
            "objects": self._objects,
            "logged": self._logged,
            "position": self._position,
            "latest": self._latest,
        }


@final
class LoggedMark:
    """Sums, metric objects and buffers before a batch, to return to if its gradient is dropped: it is trained again.

    Args:
        t: the trainer.
    """

    def __init__(self, t: Trainer) -> None:
        self._t = t
        self._values = t.logbook.metrics.mark()
        self._objects = [(metric, states_of(metric)) for metric in metric_objects(t.module).values()]
        self._buffers = [(buffer, buffer.clone()) for buffer in t.module.buffers()]
        self._batches, self._samples = t.logbook.batches, t.recorder.samples

    def restore(self) -> None:
        """Let all be as it was."""
        t = self._t
        t.logbook.metrics.rewind(self._values)
        for metric, states in self._objects:
            set_states(metric, states)
        for buffer, before in self._buffers:
            buffer.copy_(before)
        t.logbook.batches, t.recorder.samples = self._batches, self._samples


def of_word(word: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a `word`, with the values of the newest step."""
    return {**word, "random": RandomState.unpacked(word["random"]).state_dict()}


def take_up_buffers(module: nn.Module, packed: tuple[tuple[str, ...], bytes] | None) -> None:
    """Let a module's buffers be what `BufferCopies.packed` was taken of."""
    if packed is None:
        return
    names, data = packed
    live = dict(module.named_buffers())
    found = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    for name, part in zip(names, found.split([live[name].nbytes for name in names]), strict=True):
        buffer = live[name]
        buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))  # a copy is aligned


def go_on_from(t: Trainer, ranks: list[dict[str, Any]], *, own: int | None) -> None:
    """Take over what ranks have left; the random numbers aside.

    With `own`, this rank goes on from the one of that number. Without, sums that belong together go to the main rank,
    and places in streams are lost.
    """
    same = own is not None
    mine = [ranks[own]] if own is not None else ranks if t.world.main_rank else []
    sums = t.train_logbook.metrics
    sums.forget_epoch()
    for saved in mine:
        sums.add_sums(saved["sums"])
    if mine:
        latest = [saved.get("latest", {}) for saved in mine]
        sums.set_latest(latest[0] if same else join_latest(latest))
        # Else it would count as one that had no batch, and what was logged in this step would be left out.
        steps = [step for one in latest for _, step, *_ in one.values()]
        t.train_logbook.step = max(steps, default=t.train_logbook.step)
    objects = metric_objects(t.module)
    for metric in objects.values():
        metric.reset()
    for name, (attribute, kind) in ranks[0]["logged"].items() if ranks else ():
        if attribute in objects:
            sums.series[name] = Series.of_kind(tuple(kind))
            sums.objects[name] = (objects[attribute], sums.series[name])
    for name, metric in objects.items():
        found = [saved["objects"][name] for saved in mine if name in saved["objects"]]
        if found:
            set_states(metric, found[0])
        for other in found[1:]:
            incoming = metric.clone()
            set_states(incoming, other)
            metric.merge_state(incoming)
    if same:
        take_up_buffers(t.module, mine[0].get("buffers"))
    if same and mine[0]["position"] is not None:
        t.train_feed.load_state_dict(mine[0]["position"])


def _logged_objects(t: Trainer, objects: dict[str, Any]) -> dict[str, Any]:
    """Return under which names metric objects were logged in this epoch: (attribute, kind of the series)."""
    names = {id(one): name for name, one in objects.items()}
    logged = t.train_logbook.metrics.objects.items()
    return {name: [names[id(one)], list(series.kind())] for name, (one, series) in logged if id(one) in names}


def _on_cpu(states: dict[str, Any]) -> dict[str, Any]:
    """Return them where any process can read them."""
    values = {
        name: [item.cpu() for item in value] if isinstance(value, list) else value.cpu()
        for name, value in states["values"].items()
    }
    return {**states, "values": values}


@final
class BufferCopies:
    """Room for copies of a module's persistent buffers, such as running statistics.

    All are copied each time: whether one was changed isn't known, since batch normalisation doesn't count versions.

    Args:
        module: whose.
        before: those of the epoch before, if any.
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

    def packed(self, point: RankState | None = None) -> tuple[tuple[str, ...], bytes] | None:
        """Return the buffers that batches have changed on this rank, in a form that is pickled quickly.

        Args:
            point: as they were there, where a window began; as they are now, if not given.

        Returns:
            names, and the bytes of their values; None if there are none.
        """
        kept = point.buffers if point is not None and point.of_window else {}
        live = {
            name: kept.get(name, buffer)
            for name, buffers, key, counts in self._where
            if (buffer := buffers[key]) is not None and (counts or buffer._version != self._versions[name])
        }
        if not live:
            return None
        values = (buffer.detach().cpu().reshape(-1).view(torch.uint8) for buffer in live.values())
        return tuple(live), b"".join(part.numpy().tobytes() for part in values)

    def take(self) -> dict[str, Tensor]:
        """Return what the buffers are now, in the place of what was returned before."""
        live = {name: buffer.detach() for name, buffers, key, _ in self._where if (buffer := buffers[key]) is not None}
        if {n: b.shape for n, b in live.items()} != {n: copy.shape for n, copy in self._copies.items()}:
            self._copies = {name: buffer.clone() for name, buffer in live.items()}
        elif live:
            torch._foreach_copy_(list(self._copies.values()), list(live.values()))
        return self._copies
