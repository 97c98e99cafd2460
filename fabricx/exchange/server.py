"""A server as a state machine: what a message waits for, and what comes of it. No process, no socket, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from fabricx.exchange.compression import Codec
from fabricx.exchange.layout import together
from fabricx.exchange.leases import Leases
from fabricx.exchange.messages import (
    Apply,
    Ask,
    Begin,
    Close,
    Counts,
    Granted,
    Groups,
    Have,
    Norm,
    Open,
    Pull,
    Push,
    Reply,
    Settings,
    Tell,
)
from fabricx.exchange.rules import Correction, Gradient, Outer, Rule, Step, Sum, add_up, joined, make_rule


@dataclass(slots=True)
class _Part:
    """What one lease adds to an update, with which version it was computed, and where its worker wants the sum."""

    gradient: Gradient
    push: Push
    base: int
    box: Tensor


@final
class Server:
    """Keeps a part of the weights for several workers.

    Each message is handled when it is `ready`; until then its worker waits, and all that wait are asked again whenever
    something has been handled. So whatever carries messages (threads, a simulation) decides nothing.

    Attributes:
        version: updates that were made.
        trained: leases that are in the weights.
        counts: what was seen so far.
    """

    def __init__(self, workers: int, *, deals: bool = True) -> None:
        self.version = self.trained = 0
        self._deals = deals
        self._restored = False  # then updates may be missing, and are not waited for
        self.counts = Counts()
        self._workers = set(range(workers))
        self._gone: set[int] = set()  # those that have left
        self._settings = Settings(workers)
        self._rule: Rule | None = None
        self._codec: Codec | None = None
        self._back: Codec | None = None
        self._seen: dict[int, Tensor] = {}  # which weights a worker has, where it is sent differences
        self._scale: float | None = None  # of the newest sum
        self._begun: Begin
        self._total = torch.empty(0)
        self._sums: dict[int, Gradient] = {}  # held, by clock
        self._applied: set[int] = set()  # workers that want the held update to be made
        self._correction = Correction(self._settings)
        self._leases = Leases(-1, 0, self._workers)
        self._bases: dict[int, int] = {}  # with which version a worker computes
        self._parts: dict[int, dict[int, _Part]] = {}  # by clock and lease

    @property
    def broken(self) -> bool:
        """Return whether somebody is gone for whom the others wait: those that go together."""
        return bool(self._gone) and self._leases.section < 0

    @property
    def snapshot_every(self) -> int:
        """Return how many updates may be lost."""
        return self._settings.snapshot_every

    @property
    def values(self) -> Tensor:
        """Return what workers pull, flat."""
        assert self._rule is not None
        return self._rule.values

    def ready(self, worker: int, message: Any) -> bool:
        """Return whether a message can be handled now."""
        if isinstance(message, Begin):
            return True
        if self._rule is None:
            return False
        if isinstance(message, Pull):
            waits = message.to_train and self._settings.orders_updates and len(self._bases) > self._bound
            return (self._restored or self.version >= message.version) and not waits
        if isinstance(message, Ask):
            leases = self._leases
            if message.section != leases.section or not message.wait:
                return True
            return leases.available(worker) or leases.over
        if isinstance(message, Push):
            return not self._settings.orders_updates or not self._holds_up(worker)
        if isinstance(message, (Norm, Apply)):
            parts = self._parts.get(message.clock, {})
            return self.version > message.clock or (bool(parts) and len(parts) >= self._wanted(parts))
        return True

    def handle(self, worker: int, message: Any, inbox: Tensor, outbox: Tensor) -> Any:
        """Do what a message asks for.

        Args:
            worker: whose it is.
            message: one that is `ready`.
            inbox: the worker's vector, if it sent one.
            outbox: what the worker was last sent; the answer to a `Pull` is put there.

        Returns:
            the answer; None where there is none.
        """
        if isinstance(message, Pull):
            return self._pull(worker, message, inbox, outbox)
        if isinstance(message, Push):
            return self._push(worker, message, inbox, outbox)
        if isinstance(message, Ask):
            if message.section != self._leases.section:
                return Granted(None, over=True)
            granted = self._leases.grant(worker)
            self.counts.lead = max(self.counts.lead, self._leases.lead)
            self._go_on_without_late()
            return granted
        if isinstance(message, Norm):
            held = self._held(message.clock).dense
            squares = [float(held[a:b].square().sum()) for a, b in self._spans(message.pieces)]
            return Reply(self.version, self.trained, squares)
        if isinstance(message, Apply):
            return self._apply(worker, message)
        if isinstance(message, Begin):
            self._begin(message)
            return Reply(self.version, self.trained)
        if isinstance(message, Open):
            return self._open(message)
        if isinstance(message, Close):
            if message.section == self._leases.section:
                self._leases.close()
            return None
        if isinstance(message, Have):
            self._seen[worker] = message.weights
            return None
        if isinstance(message, Tell):
            return Reply(self.version, self.trained, self._told(message.what))
        raise TypeError(f"a server knows nothing of {type(message).__name__}")

    def snapshot(self) -> dict[str, Any]:
        """Return what `restore` needs; the tensors in it are the live ones."""
        return {
            "begun": self._begun,
            "version": self.version,
            "trained": self.trained,
            "workers": self._workers,
            "leases": self._leases,
            "parts": self._parts,
            "counts": self.counts,
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Go on from a snapshot of a server that died: its later updates are lost, and their parts trained again."""
        self._begin(snapshot["begun"])
        self.version, self.trained, self._parts = snapshot["version"], snapshot["trained"], snapshot["parts"]
        self._workers = snapshot["workers"]
        self._leases, self.counts = snapshot["leases"], snapshot["counts"]
        self._leases.all_back()
        self._restored = True

    def left(self, worker: int) -> None:
        """Go on without a worker: what it had not pushed is somebody else's now."""
        self._workers.discard(worker)
        self._gone.add(worker)
        self._seen.pop(worker, None)
        self._bases.pop(worker, None)
        self._leases.left(worker)
        self._go_on_without_late()

    def joined(self, worker: int) -> None:
        """Take a worker in: at once if training hasn't begun or it was there before, else with the next section."""
        if self._deals and self._leases.section >= 0 and worker not in self._workers:
            return
        self._gone.discard(worker)
        self._workers.add(worker)
        self._leases.joined(worker)

    def _begin(self, begin: Begin) -> None:
        self._settings, self._begun = begin.settings, begin
        compression = begin.settings.compression
        self._codec = None if compression is None else Codec(compression, keep=begin.settings.keep, feedback=False)
        self._back = None
        if (pulled := begin.settings.pull_compression) is not None:
            self._back = Codec(pulled, keep=begin.settings.keep, feedback=begin.optimizers is None)
            self._back.lost = torch.empty(0) if begin.lost is None else begin.lost
        self._seen.clear()
        self._rule = make_rule(begin)
        self._correction = Correction(begin.settings)
        self.version = self.trained = begin.version
        self._parts.clear()
        self._sums.clear()
        self._applied.clear()

    def _open(self, message: Open) -> None:
        if message.section <= self._leases.section:
            return  # another worker has said so already
        if message.version > self.version:  # the others'; this server has lost some
            self.version = message.version
            self._parts.clear()
        if message.workers is not None:
            self._workers = set(message.workers) - self._gone
        settings = self._settings
        bounded = settings.max_staleness if settings.bound == "clock" else None
        parts = settings.parts_of_update(len(self._workers)) if settings.aggregate else None
        self._leases = Leases(
            message.section, message.count, self._workers,
            clock=self.version, bound=bounded, each=not settings.aggregate, parts=parts, one=bool(settings.backup),
        )  # fmt: skip

    @property
    def _bound(self) -> int:
        return self._settings.max_staleness or 0

    def _holds_up(self, worker: int) -> bool:
        """Return whether an update now would make the gradient of somebody who computes too old.

        Those that compute can push in the order in which they pulled: the i-th (from 0) is then stale by
        version + i - base. No more than bound + 1 may compute, so that this is within the bound when they pull; and
        whoever comes early waits if that would bring somebody ahead of it beyond. The first never waits.
        """
        for place, (other, base) in enumerate(sorted(self._bases.items(), key=lambda item: item[1])):
            if other == worker:
                return False
            if self.version + 1 + place - base > self._bound:
                return True
        return False

    def _pull(self, worker: int, pull: Pull, inbox: Tensor, outbox: Tensor) -> Reply:
        if pull.to_train:
            self._bases[worker] = self.version
        if isinstance(self._rule, Sum):
            return self._pull_sum(self._rule.newest, outbox)
        values, shard = self.values, self._begun.shard
        if pull.rows is None:
            outbox[: len(values)].copy_(values)
            if self._back is not None:
                self._seen[worker] = values[: shard.dense].clone()
            return self._reply([(0, len(values))])
        if pull.dense and self._back is not None and worker in self._seen:
            return self._pull_difference(self._back, self._seen[worker], outbox)
        spans = []
        if pull.dense:
            outbox[: shard.dense].copy_(values[: shard.dense])
            spans.append((0, shard.dense))
        for number, count in pull.rows.items():
            start, stop = shard.spans[len(shard.pieces) + number]
            width = shard.rows[number].width
            table, (ids, _) = values[start:stop].view(-1, width), shard.rows_in(inbox, number, count)
            end = start + count * width
            torch.index_select(table, 0, ids, out=outbox[start:end].view(count, width))
            spans.append((start, end))
        return self._reply(spans)

    def _pull_difference(self, codec: Codec, seen: Tensor, outbox: Tensor) -> Reply:
        """Send what the weights are more than what the worker has; what that loses is in the next difference."""
        size = len(seen)
        scale = codec.encode(self.values[:size] - seen, outbox.view(torch.uint8))
        seen.add_(codec.decode(outbox.view(torch.uint8), size, scale, seen.dtype))
        return Reply(self.version, self.trained, None, [(0, codec.bytes(size))], scale)

    def _pull_sum(self, newest: Gradient, outbox: Tensor) -> Reply:
        """Give a sum in the vector in which the worker's own gradient came; what is dense is there already."""
        shard = self._begun.shard
        spans = [room for number, room in enumerate(shard.rooms[: len(shard.pieces)]) if number not in newest.missing]
        for number, (ids, values) in newest.rows.items():
            own_ids, own_values = shard.rows_in(outbox, number, len(ids))
            own_ids.copy_(ids)
            own_values.copy_(values)
            start = shard.rooms[len(shard.pieces) + number][0]
            spans.append((start, start + own_ids.numel() + own_values.numel()))
        rows = {number: len(ids) for number, (ids, _) in newest.rows.items()}
        if self._scale is None:
            return self._reply(together(spans), (newest.missing, rows))
        reply = self._reply(spans[len(shard.pieces) - len(newest.missing) :], (newest.missing, rows))
        assert self._back is not None
        reply.spans.insert(0, (0, self._back.bytes(shard.dense)))
        reply.scale = self._scale
        return reply

    def _reply(self, spans: list[tuple[int, int]], content: Any = None) -> Reply:
        size = self._begun.dtype.itemsize
        return Reply(self.version, self.trained, content, [(start * size, stop * size) for start, stop in spans])

    def _gradient(self, push: Push, inbox: Tensor) -> Gradient:
        """Return what has come in a vector."""
        dense = inbox[: self._begun.shard.dense]
        for number in push.missing if self._codec is None else ():
            start, stop = self._begun.shard.rooms[number]
            dense[start:stop].zero_()  # it wasn't sent
        if self._codec is not None and not push.empty:
            dense = self._codec.decode(inbox.view(torch.uint8), len(dense), push.scale, inbox.dtype)
        rows = {number: self._begun.shard.rows_in(inbox, number, count) for number, count in push.rows.items()}
        return Gradient(dense, push.missing, rows)

    def _push(self, worker: int, push: Push, inbox: Tensor, outbox: Tensor) -> None:
        base = self._bases.pop(worker, self.version)
        given = [lease for lease in push.leases if self._leases.given(lease)]
        if self._deals and self._leases.section >= 0 and len(given) < len(push.leases):
            self.counts.dropped += 1  # dealt by a server that died since: they are, or will be, somebody's again
            for lease in given:
                self._leases.back(lease)
            return
        gradient = self._gradient(push, inbox)
        if self._settings.backup:
            self._add_if_in_time(worker, _Part(gradient.clone(), push, base, torch.empty(0)))
            return
        if self._settings.aggregate:
            self._add_part(_Part(gradient, push, base, outbox if isinstance(self._rule, Sum) else torch.empty(0)))
            return
        staleness = self.version - base
        settings = self._settings
        too_old = settings.bound == "version" and staleness > (settings.max_staleness or 0)
        if too_old and settings.max_staleness is not None and settings.on_stale == "drop":
            self.counts.dropped += 1
            for lease in push.leases:
                self._leases.back(lease)
            return
        if not push.empty:
            self._count(staleness)
            corrected = self._correction(gradient, outbox, self.values, staleness)
            self._update(corrected, push.groups)
            self.trained += len(push.leases)
        for lease in push.leases:
            self._leases.done(lease)

    def _add_part(self, part: _Part) -> None:
        """Keep a part of a global batch's gradient, and make all updates that are complete, in their order."""
        push = part.push
        leased = self._leases.section >= 0  # then this worker's next gradient may come before this one is used
        if leased and self._codec is None:
            part.gradient = part.gradient.clone()
        parts = self._parts.setdefault(push.clock, {})
        parts[push.leases[0]] = part
        if self._restored and not self._deals and push.clock > self.version and len(parts) >= self._wanted(parts):
            self.version = push.clock  # what is missing before was lost with the server that this one was
        while (parts := self._parts.get(self.version, {})) and len(parts) >= self._wanted(parts) and not push.hold:
            self._sum_up(self._parts.pop(self.version))
        if leased:
            self._leases.done(push.leases[0])

    def _add_if_in_time(self, worker: int, part: _Part) -> None:
        """Keep a part of the next update; what comes after it was made is dropped, and its data trained later."""
        lease = part.push.leases[0]
        if part.base < self.version:
            self.counts.dropped += 1
            self._leases.back(lease)
            return
        self._parts.setdefault(self.version, {})[lease] = part
        self._leases.done(lease)
        self._leases.resting.add(worker)
        self._go_on_without_late()

    def _go_on_without_late(self) -> None:
        """Make the next update if it has enough parts, or if nobody is left who could bring one."""
        parts = self._parts.get(self.version)
        if not self._settings.backup or not parts:
            return
        if len(parts) >= self._settings.parts_of_update(len(self._workers)) or not self._leases.awaited():
            self._leases.resting.clear()
            share = sum(part.push.share for part in parts.values() if not part.push.empty)
            total = self._sum(parts)
            self._sum_up(self._parts.pop(self.version), total if share == 1.0 else total / max(share, 1e-12))

    @staticmethod
    def _wanted(parts: dict[int, _Part]) -> int:
        return next(iter(parts.values())).push.parts

    def _held(self, clock: int) -> Gradient:
        """Return the sum of an update's parts, which stays until it is applied."""
        if clock not in self._sums:
            self._sums = {clock: self._sum(self._parts[clock])}
        return self._sums[clock]

    def _apply(self, worker: int, message: Apply) -> None:
        if self.version > message.clock:
            return
        self._applied.add(worker)
        if len(self._applied) < self._wanted(self._parts[message.clock]):
            return
        self._applied.clear()
        total = self._held(message.clock)
        for pieces, factor in message.scales:
            for start, stop in self._spans(pieces):
                total.dense[start:stop].mul_(factor)
        for pieces, limit in message.limits:
            for start, stop in self._spans(pieces):
                total.dense[start:stop].clamp_(-limit, limit)
        self._sum_up(self._parts.pop(message.clock), total)
        self._sums.clear()

    def _spans(self, pieces: Sequence[int]) -> list[tuple[int, int]]:
        return [self._begun.shard.rooms[number] for number in pieces]

    @staticmethod
    def _full(parts: dict[int, _Part]) -> list[_Part]:
        return [parts[lease] for lease in sorted(parts) if not parts[lease].push.empty]

    def _sum(self, parts: dict[int, _Part]) -> Gradient:
        """Return the sum of parts, added in the order of their leases; it is put at once where workers want it."""
        dense = self._begun.shard.dense
        into = [part.box[:dense] for part in parts.values() if len(part.box)]
        full = self._full(parts)
        if not full:
            return Gradient(torch.zeros(dense), frozenset(range(len(self._begun.shard.pieces))))
        if not into:
            self._total = self._total if len(self._total) == dense else torch.zeros(dense, dtype=self._begun.dtype)
            into = [self._total]
        if dense:
            add_up([part.gradient.dense for part in full], into)
        self._compress_sum(into)
        missing = frozenset.intersection(*(part.push.missing for part in full))
        return Gradient(into[0], missing, joined([part.gradient.rows for part in full]))

    def _compress_sum(self, boxes: list[Tensor]) -> None:
        """Put the sum into few bytes, the same for all workers, where that is asked for."""
        if self._back is None or not isinstance(self._rule, Sum):
            self._scale = None
            return
        self._scale = self._back.encode(boxes[0].clone(), boxes[0].view(torch.uint8))
        size = self._back.bytes(len(boxes[0]))
        for box in boxes[1:]:
            box.view(torch.uint8)[:size].copy_(boxes[0].view(torch.uint8)[:size])

    def _sum_up(self, parts: dict[int, _Part], total: Gradient | None = None) -> None:
        """Make one update of all parts."""
        full = self._full(parts)
        for part in full:
            self._count(self.version - part.base)
            self.trained += len(part.push.leases)
        if full or isinstance(self._rule, Sum):
            groups = full[-1].push.groups if full else None
            self._update(self._sum(parts) if total is None else total, groups)
        else:
            self.version += 1

    def _update(self, gradient: Gradient, groups: Groups | None) -> None:
        assert self._rule is not None
        self._rule.update(gradient, groups)
        self.version += 1
        self.counts.updates += 1

    def _count(self, staleness: int) -> None:
        self.counts.staleness[staleness] = self.counts.staleness.get(staleness, 0) + 1

    def _told(self, what: str) -> Any:
        if what == "counts":
            return self.counts
        if what == "lost":
            return None if self._back is None else self._back.lost
        if what == "weights":
            return self.values
        if what == "velocity":
            return self._rule.velocity if isinstance(self._rule, Outer) else None
        return self._rule.state() if isinstance(self._rule, Step) else []
