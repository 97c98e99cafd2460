"""A parameter server as a state machine, without process, socket or clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor

from fabricx.core.averaging import FlatAverage
from fabricx.parameter_server.optimizer_parts import same_groups
from fabricx.parameter_server.server.leases import Brought, Leases
from fabricx.parameter_server.server.replies import Replies
from fabricx.parameter_server.server.update_order import UpdateOrder
from fabricx.parameter_server.server.update_rule import (
    Correction,
    Gradient,
    Outer,
    Rule,
    Sum,
    add_up,
    clip,
    damping,
    joined,
    make_rule,
)
from fabricx.parameter_server.wire.codecs import Codec
from fabricx.parameter_server.wire.messages import (
    Apply,
    Ask,
    Average,
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
    Pushed,
    Reply,
    Settings,
    Tell,
    Turn,
)
from fabricx.parameter_server.worker.logged_sums import Logged

READS: Final = (Pull, Norm, Tell)  # messages that may be answered again; other answers are kept


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
    something has been handled. So whatever carries messages (threads, a simulation) decides nothing. A server's state
    is a function of what it was told, in that order: one that is told the same again is the same, to the bit.

    Args:
        workers: how many there are at first.
        deals: this server gives the leases; the others only note whose gradients they have.

    Attributes:
        version: updates that were made.
        trained: leases that are in the weights.
        skipped: global batches among the versions for which no worker gave a gradient.
        counts: what was seen so far.
    """

    def __init__(self, workers: int, *, deals: bool = True) -> None:
        self.version = self.trained = self.skipped = 0
        self._deals = deals
        self.counts = Counts()
        self._workers = set(range(workers))
        self._gone: set[int] = set()  # those that have left
        self._settings = Settings(workers)
        self._rule: Rule | None = None
        self._codec: Codec | None = None
        self._replies: Replies
        self._handled: dict[int, int] = {}  # number of the newest message of each worker
        self._answers: dict[int, Any] = {}  # to that
        self._brought = Brought()
        self._used = Brought()
        self._begun: Begin
        self._total = torch.empty(0)
        self._average: FlatAverage | None = None  # of the weights, if a callback asks for one
        self._sums: dict[int, Gradient] = {}  # held, by clock
        self._applied: set[int] = set()  # workers that want the held update to be made
        self._correction = Correction(self._settings)
        self._leases = Leases(-1, 0, self._workers)
        self._order = UpdateOrder()
        self._logged = Logged()
        self._parts: dict[int, dict[int, _Part]] = {}  # by clock and lease

    @property
    def broken(self) -> bool:
        """Return whether a worker has left; where workers go together, the others wait for it."""
        return bool(self._gone)

    @property
    def snapshot_every(self) -> int:
        """Return after how many updates a snapshot is due; 0 where a server that dies isn't started again."""
        return self._settings.snapshot_every

    @property
    def begun(self) -> Begin:
        """Return what this server was given at first."""
        return self._begun

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
            may_begin = not message.to_train or self._order.may_begin(worker)
            return self.version >= message.version and may_begin
        if isinstance(message, Ask):
            leases = self._leases
            if message.section != leases.section or not message.wait:
                return True
            return leases.available(worker) or leases.over
        if isinstance(message, Push):
            return self._order.may_push(worker, self.version)
        if isinstance(message, Turn):
            return self._order.may_take_turn(worker, self.version)
        if isinstance(message, (Norm, Apply)):
            parts = self._parts.get(message.clock, {})
            return self.version > message.clock or (bool(parts) and len(parts) >= self._wanted(parts))
        return True

    def repeated(self, worker: int, number: int, message: Any) -> bool:
        """Return whether a message that changes something has come before."""
        return number <= self._handled.get(worker, 0) and not isinstance(message, READS)

    def handle_once(self, worker: int, number: int, message: Any, inbox: Tensor, outbox: Tensor) -> Any:
        """Do what a message asks for, unless it has come before; then return the answer that it had.

        Args:
            worker, message, inbox, outbox: see `handle`.
            number: of the message among those of this worker, from 1.
        """
        if self.repeated(worker, number, message):
            return self._answers.get(worker) if number == self._handled[worker] else None
        answer = self.handle(worker, message, inbox, outbox)
        self._handled[worker] = number
        self._answers[worker] = None if isinstance(message, READS) else answer
        return answer

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
            dropped = self.counts.dropped
            self._push(worker, message, inbox, outbox)
            used = self.counts.dropped == dropped
            if message.logged is not None:
                self._logged.add(worker, message.logged, used=used)
            return Pushed(used) if message.confirm else None
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
        if isinstance(message, Turn):
            if used := self._order.has_place(worker):
                self._order.take_turn(worker)
            return Reply(self.version, self.trained, used)
        if isinstance(message, Apply):
            return self._apply(worker, message)
        if isinstance(message, Begin):
            self._begin(message)
            return Reply(self.version, self.trained)
        if isinstance(message, Open):
            return self._open(message)
        if isinstance(message, Close):
            if message.section == self._leases.section:
                before = self._leases.count
                self._leases.close()
                self.counts.dealt += self._leases.count - before
            return None
        if isinstance(message, Have):
            self._replies.seen[worker] = message.weights
            return None
        if isinstance(message, Average):
            if self._average is None:
                self._average = FlatAverage(message.rule, message.step, self.version - self.skipped, message.values)
            return Reply(self.version, self.trained)
        if isinstance(message, Tell):
            return Reply(self.version, self.trained, self._told(message))
        raise TypeError(f"a server knows nothing of {type(message).__name__}")

    def snapshot(self) -> dict[str, Any]:
        """Return what `restore` needs; the tensors in it are the live ones."""
        return dict(vars(self))

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Be what a server was when its snapshot was taken."""
        vars(self).update(snapshot)

    def left(self, worker: int) -> None:
        """Go on without a worker: what it had not pushed is somebody else's now."""
        self._workers.discard(worker)
        self._gone.add(worker)
        if self._rule is not None:
            self._replies.seen.pop(worker, None)
        self._order.left(worker)
        self._leases.left(worker)
        self._go_on_without_late()

    def joined(self, worker: int, *, resumes: bool = False) -> None:
        """Take a worker in: at once if training hasn't begun or it was there before, else with the next section.

        Args:
            worker: its number.
            resumes: it was here before, and goes on with the numbers of its messages.
        """
        if not resumes:
            self._handled.pop(worker, None)
            self._answers.pop(worker, None)
            if self._deals and self._leases.section >= 0 and worker not in self._workers:
                return
        self._gone.discard(worker)
        self._workers.add(worker)
        self._leases.joined(worker)

    def _begin(self, begin: Begin) -> None:
        self._settings, self._begun = begin.settings, begin
        compression = begin.settings.compression
        self._codec = None if compression is None else Codec(compression, keep=begin.settings.keep, feedback=False)
        self._rule = make_rule(begin)
        self._correction = Correction(begin.settings)
        self._order = UpdateOrder(
            ordered=self._deals and begin.settings.orders_updates, bound=begin.settings.max_staleness or 0
        )
        self.version = self.trained = begin.version
        self.skipped = 0
        self._replies = Replies(begin)
        self._average = None
        self.counts.begun = begin.version
        self.counts.dealt = self.counts.used = self.counts.repeated = self.counts.conflicts = 0
        self._parts.clear()
        self._sums.clear()
        self._applied.clear()

    def _open(self, message: Open) -> None:
        if message.section <= self._leases.section:
            return  # another worker has said so already
        self.version = max(self.version, message.version)  # rounds may be other updates on other servers
        self._brought, self._used = Brought(), Brought()
        self._logged.open(message.section)
        self.counts.dealt += message.count
        if message.workers is not None:
            self._workers = set(message.workers) - self._gone
        settings = self._settings
        bounded = settings.max_staleness if settings.bound == "clock" else None
        parts = settings.parts_of_update(len(self._workers)) if settings.aggregate else None
        self._leases = Leases(
            message.section, message.count, self._workers,
            clock=self.version, bound=bounded, each=not settings.aggregate, parts=parts, one=bool(settings.backup),
        )  # fmt: skip

    def _pull(self, worker: int, pull: Pull, inbox: Tensor, outbox: Tensor) -> Reply:
        if pull.to_train:
            self._order.begins(worker, self.version)
        if isinstance(self._rule, Sum):
            reply = self._replies.sum(self._rule.newest, outbox)
        else:
            reply = self._replies.weights(worker, pull, self.values, inbox, outbox)
        reply.version, reply.trained, reply.skipped = self.version, self.trained, self.skipped
        return reply

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
        known, base = self._order.has_place(worker), self._order.pushed(worker)
        base = self.version if base is None else base
        if self._leases.section >= 0 and not self._takes(worker, push, known=known):
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
        bound = settings.max_staleness if settings.bound == "version" else None
        too_old = bound is not None and staleness > bound
        if too_old and settings.on_stale == "drop":
            self.counts.dropped += 1
            for lease in push.leases:
                self._leases.back(lease)
            return
        if not push.empty:
            self._count(staleness)
            corrected = self._correction(gradient, self._replies.seen.get(worker, self.values), self.values, staleness)
            damps = settings.damp or (too_old and settings.on_stale == "damp")
            self._update(corrected, push.groups, damping(staleness) if damps else 1.0)
            self.trained += len(push.leases)
        self._note_used(push.leases)
        for lease in push.leases:
            self._leases.done(lease)

    def _takes(self, worker: int, push: Push, *, known: bool) -> bool:
        """Return whether a gradient is to be used: each lease's is, once on each server.

        The server that deals takes it from the worker that has the lease. If that isn't the sender any more (its link
        was cut, or it seemed dead), the lease is, or will be, another worker's, and that one's gradient counts; other
        servers take whichever comes first. Where updates are ordered, the version that the gradient was computed with
        has to be `known`, too.
        """
        if self._deals:
            if known and all(self._leases.holder(lease) == worker for lease in push.leases):
                return True
            for lease in push.leases:
                if self._leases.holder(lease) == worker:
                    self._leases.back(lease)
        elif not any(lease in self._brought for lease in push.leases):
            for lease in push.leases:
                self._brought.add(lease)
            return True
        self.counts.dropped += 1
        return False

    def _add_part(self, part: _Part) -> None:
        """Keep a part of a global batch's gradient, and make all updates that are complete, in their order."""
        push = part.push
        leased = self._leases.section >= 0  # then this worker's next gradient may come before this one is used
        if leased and self._codec is None:
            part.gradient = part.gradient.clone()
        parts = self._parts.setdefault(push.clock, {})
        parts[push.leases[0]] = part
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
        self._sum_up(self._parts.pop(message.clock), total, message.groups)
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
        if isinstance(self._rule, Sum):
            self._replies.compress_sum(into)
        missing = frozenset.intersection(*(part.push.missing for part in full))
        return Gradient(into[0], missing, joined([part.gradient.rows for part in full]))

    def _sum_up(
        self, parts: dict[int, _Part], total: Gradient | None = None, groups: Groups | None = None
    ) -> None:  # fmt: skip
        """Make one update of all parts, with the newest one's hyperparameters if none are given."""
        full = self._full(parts)
        for part in parts.values():
            self._note_used(part.push.leases)
        for part in full:
            self._count(self.version - part.base)
            self.trained += len(part.push.leases)
        if full or isinstance(self._rule, Sum):
            newest = full[-1].push if full else None
            if newest is not None and newest.groups is not None:
                self.counts.conflicts += not all(same_groups(part.push.groups, newest.groups) for part in full)
            gradient = self._sum(parts) if total is None else total
            for kind, pieces, limit in newest.clips if newest else ():
                clip(gradient.dense, kind, self._spans(pieces), limit)
            self._update(gradient, groups or (newest.groups if newest else None))
        else:
            self.version += 1
            self.skipped += 1

    def _update(self, gradient: Gradient, groups: Groups | None, factor: float = 1.0) -> None:
        assert self._rule is not None
        self._rule.update(gradient, groups, factor)
        self.version += 1
        self.counts.updates += 1
        if self._average is not None:
            self._average.follow(self.values, self.version - self.skipped)
        for table, rows in self._rule.moved_rows(gradient).items():
            self._replies.changed.note(table, rows, self.version)

    def _count(self, staleness: int) -> None:
        self.counts.staleness[staleness] = self.counts.staleness.get(staleness, 0) + 1

    def _note_used(self, leases: Sequence[int]) -> None:
        """Count leases whose gradients are in the weights, or that have given none."""
        for lease in leases if self._leases.section >= 0 else ():
            if lease in self._used:
                self.counts.repeated += 1
            else:
                self._used.add(lease)
                self.counts.used += 1

    def _told(self, message: Tell) -> Any:
        what = message.what
        if what == "logged":
            return self._logged.of(message.section)
        if what == "counts":
            return self.counts
        if what == "lost":
            return self._replies.lost
        if what == "weights":
            return self.values
        if what == "average":
            return None if self._average is None else (self._average.values, self._average.updates)
        if what == "velocity":
            return self._rule.velocity if isinstance(self._rule, Outer) else None
        return None if self._rule is None else self._rule.optimizers()
