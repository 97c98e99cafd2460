"""A parameter server as a state machine, without process, socket or clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor

from fabricx.core.averaging import FlatAverage
from fabricx.distributed.codecs import Codec, make_codec
from fabricx.parameter_server.optimizer_parts import same_groups
from fabricx.parameter_server.server.leases import Leases, LeaseSet
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
    make_rule,
    merge_rows,
)
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
from fabricx.parameter_server.worker.logged_sums import LoggedSums

READS: Final = (Pull, Norm, Tell)  # messages without side effects, which can be processed again; other replies are kept


@dataclass(slots=True)
class _Part:
    """Gradient of a lease, with the version of its weights, and the vector in which its worker expects the sum."""

    gradient: Gradient
    push: Push
    base: int
    box: Tensor


@final
class Server:
    """Keeps a part of the weights for several workers.

    A message is processed when it is `ready`; until then its worker waits, and all waiting messages are checked again
    after each processed message. Therefore the transport of messages (threads, a simulation) makes no decisions. The
    state is a function of the sequence of messages: a server that replays the sequence has the same state, bit for bit.

    Args:
        workers: initial number of workers.
        deals: this server grants the leases; other servers only record which gradients they have received.

    Attributes:
        version: number of updates.
        trained: number of leases in the weights.
        skipped: versions without an update of the weights, because no worker had a gradient for the global batch.
        counts: statistics.
    """

    def __init__(self, workers: int, *, deals: bool = True) -> None:
        self.version = self.trained = self.skipped = 0
        self._deals = deals
        self.counts = Counts()
        self._workers = set(range(workers))
        self._departed: set[int] = set()  # workers that have left
        self._settings = Settings(workers)
        self._rule: Rule | None = None
        self._codec: Codec | None = None
        self._replies: Replies
        self._handled: dict[int, int] = {}  # number of the newest message of each worker
        self._answers: dict[int, Any] = {}  # replies to these messages
        self._received = LeaseSet()
        self._used = LeaseSet()
        self._begun: Begin
        self._total = torch.empty(0)
        self._average: FlatAverage | None = None  # of the weights, if a callback requests it
        self._sums: dict[int, Gradient] = {}  # held sums, by clock
        self._applied: set[int] = set()  # workers that have sent `Apply` for the held update
        self._correction = Correction(self._settings)
        self._leases = Leases(-1, 0, self._workers)
        self._order = UpdateOrder()
        self._logged = LoggedSums()
        self._parts: dict[int, dict[int, _Part]] = {}  # clock -> lease -> part

    @property
    def broken(self) -> bool:
        """Return whether a worker has left, for which the other workers in lockstep would wait."""
        return bool(self._departed)

    @property
    def snapshot_every(self) -> int:
        """Return the number of updates between snapshots; 0 if a dead server is not restarted."""
        return self._settings.snapshot_every

    @property
    def begun(self) -> Begin:
        """Return the message with which this server was initialised."""
        return self._begun

    @property
    def values(self) -> Tensor:
        """Return the weights (or sums) that workers pull, flat."""
        assert self._rule is not None
        return self._rule.values

    def ready(self, worker: int, message: Any) -> bool:
        """Return whether a message can be processed now.

        Args:
            worker: number of the sender.
            message: of a worker.
        """
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
            return self.version > message.clock or (bool(parts) and len(parts) >= self._expected_parts(parts))
        return True

    def repeated(self, worker: int, number: int, message: Any) -> bool:
        """Return whether a message with side effects was processed before.

        Args:
            worker, number, message: see `handle_once`.
        """
        return number <= self._handled.get(worker, 0) and not isinstance(message, READS)

    def handle_once(self, worker: int, number: int, message: Any, inbox: Tensor, outbox: Tensor) -> Any:
        """Process a message, unless it was processed before; returns the reply, or the earlier reply.

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
        """Process a message.

        Args:
            worker: number of the sender.
            message: a message that is `ready`.
            inbox: vector from the worker.
            outbox: vector to the worker, in which the reply to a `Pull` is written.

        Returns:
            The reply; None for a message without a reply.
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
            self._update_without_late()
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
            return Reply(self.version, self.trained, self._state_of(message))
        raise TypeError(f"a server does not support messages of type {type(message).__name__}")

    def snapshot(self) -> dict[str, Any]:
        """Return the state for `restore`; its tensors are not copied."""
        return dict(vars(self))

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Restore a snapshot.

        Args:
            snapshot: result of `snapshot`.
        """
        vars(self).update(snapshot)

    def left(self, worker: int) -> None:
        """Remove a worker, and return its leases without a gradient.

        Args:
            worker: number of the worker.
        """
        self._workers.discard(worker)
        self._departed.add(worker)
        if self._rule is not None:
            self._replies.seen.pop(worker, None)
        self._order.left(worker)
        self._leases.left(worker)
        self._update_without_late()

    def joined(self, worker: int, *, resumes: bool = False) -> None:
        """Add a worker: at once before training and when it resumes, otherwise at the next section.

        Args:
            worker: number of the worker.
            resumes: it was connected before, and continues its message numbers.
        """
        if not resumes:
            self._handled.pop(worker, None)
            self._answers.pop(worker, None)
            if self._deals and self._leases.section >= 0 and worker not in self._workers:
                return
        self._departed.discard(worker)
        self._workers.add(worker)
        self._leases.joined(worker)

    def _begin(self, begin: Begin) -> None:
        self._settings, self._begun = begin.settings, begin
        compression = begin.settings.compression
        self._codec = None if compression is None else make_codec(compression, keep=begin.settings.keep, feedback=False)
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
            return  # another worker has sent this message before
        self.version = max(self.version, message.version)  # with local rounds, servers may have made different updates
        self._received, self._used = LeaseSet(), LeaseSet()
        self._logged.open(message.section)
        self.counts.dealt += message.count
        if message.workers is not None:
            self._workers = set(message.workers) - self._departed
        settings = self._settings
        bounded = settings.max_staleness if settings.bound == "clock" else None
        parts = settings.parts_of_update(len(self._workers)) if settings.aggregate else None
        self._leases = Leases(
            message.section, message.count, self._workers,
            clock=self.version, bound=bounded, by_worker=not settings.aggregate, parts=parts,
            single=bool(settings.backup),
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
        """Return the gradient in a worker's vector."""
        dense = inbox[: self._begun.shard.dense]
        for number in push.missing if self._codec is None else ():
            start, stop = self._begun.shard.rooms[number]
            dense[start:stop].zero_()  # this piece was not sent
        if self._codec is not None and not push.empty:
            dense = self._codec.decode(inbox.view(torch.uint8), len(dense), push.scale, inbox.dtype)
        rows = {number: self._begun.shard.rows_in(inbox, number, count) for number, count in push.rows.items()}
        return Gradient(dense, push.missing, rows)

    def _push(self, worker: int, push: Push, inbox: Tensor, outbox: Tensor) -> None:
        in_order, base = self._order.has_place(worker), self._order.pushed(worker)
        base = self.version if base is None else base
        if self._leases.section >= 0 and not self._accepts(worker, push, in_order=in_order):
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
                self._leases.take_back(lease)
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

    def _accepts(self, worker: int, push: Push, *, in_order: bool) -> bool:
        """Return whether to use a gradient: for each lease, each server uses one gradient.

        The server that grants leases accepts the gradient of the worker that holds the lease. If the sender does not
        hold it any more (its link was lost, or it was assumed dead), another worker holds or will hold the lease, whose
        gradient is used; other servers accept the first gradient. With ordered updates, the worker must also be
        `in_order`, so that the version of its weights is certain.
        """
        if self._deals:
            if in_order and all(self._leases.holder(lease) == worker for lease in push.leases):
                return True
            for lease in push.leases:
                if self._leases.holder(lease) == worker:
                    self._leases.take_back(lease)
        elif not any(lease in self._received for lease in push.leases):
            for lease in push.leases:
                self._received.add(lease)
            return True
        self.counts.dropped += 1
        return False

    def _add_part(self, part: _Part) -> None:
        """Store a part of a global batch's gradient, and make all complete updates in order."""
        push = part.push
        leased = self._leases.section >= 0  # this worker's next gradient may overwrite the vector before the update
        if leased and self._codec is None:
            part.gradient = part.gradient.clone()
        parts = self._parts.setdefault(push.clock, {})
        parts[push.leases[0]] = part
        while (
            (parts := self._parts.get(self.version, {})) and len(parts) >= self._expected_parts(parts) and not push.hold
        ):
            self._update_from_parts(self._parts.pop(self.version))
        if leased:
            self._leases.done(push.leases[0])

    def _add_if_in_time(self, worker: int, part: _Part) -> None:
        """Store a part of the next update; a part that arrives after its update is dropped, and its lease returned."""
        lease = part.push.leases[0]
        if part.base < self.version:
            self.counts.dropped += 1
            self._leases.take_back(lease)
            return
        self._parts.setdefault(self.version, {})[lease] = part
        self._leases.done(lease)
        self._leases.resting.add(worker)
        self._update_without_late()

    def _update_without_late(self) -> None:
        """Make the next update if it has enough parts, or if no further part can arrive."""
        parts = self._parts.get(self.version)
        if not self._settings.backup or not parts:
            return
        if len(parts) >= self._settings.parts_of_update(len(self._workers)) or not self._leases.awaited():
            self._leases.resting.clear()
            share = sum(part.push.share for part in parts.values() if not part.push.empty)
            total = self._sum(parts)
            self._update_from_parts(self._parts.pop(self.version), total if share == 1.0 else total / max(share, 1e-12))

    @staticmethod
    def _expected_parts(parts: dict[int, _Part]) -> int:
        return next(iter(parts.values())).push.parts

    def _held(self, clock: int) -> Gradient:
        """Return the sum of an update's parts, kept until the update is applied."""
        if clock not in self._sums:
            self._sums = {clock: self._sum(self._parts[clock])}
        return self._sums[clock]

    def _apply(self, worker: int, message: Apply) -> None:
        if self.version > message.clock:
            return
        self._applied.add(worker)
        if len(self._applied) < self._expected_parts(self._parts[message.clock]):
            return
        self._applied.clear()
        total = self._held(message.clock)
        for pieces, factor in message.scales:
            for start, stop in self._spans(pieces):
                total.dense[start:stop].mul_(factor)
        for pieces, limit in message.limits:
            for start, stop in self._spans(pieces):
                total.dense[start:stop].clamp_(-limit, limit)
        self._update_from_parts(self._parts.pop(message.clock), total, message.groups)
        self._sums.clear()

    def _spans(self, pieces: Sequence[int]) -> list[tuple[int, int]]:
        return [self._begun.shard.rooms[number] for number in pieces]

    @staticmethod
    def _with_gradient(parts: dict[int, _Part]) -> list[_Part]:
        return [parts[lease] for lease in sorted(parts) if not parts[lease].push.empty]

    def _sum(self, parts: dict[int, _Part]) -> Gradient:
        """Sum parts in the order of their leases, directly into the workers' vectors if these expect the sum."""
        dense = self._begun.shard.dense
        into = [part.box[:dense] for part in parts.values() if len(part.box)]
        full = self._with_gradient(parts)
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
        return Gradient(into[0], missing, merge_rows([part.gradient.rows for part in full]))

    def _update_from_parts(
        self, parts: dict[int, _Part], total: Gradient | None = None, groups: Groups | None = None
    ) -> None:  # fmt: skip
        """Make an update of all parts, with the newest part's hyperparameters by default."""
        full = self._with_gradient(parts)
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
        """Count leases whose gradients are in the weights, or that had no gradient."""
        for lease in leases if self._leases.section >= 0 else ():
            if lease in self._used:
                self.counts.repeated += 1
            else:
                self._used.add(lease)
                self.counts.used += 1

    def _state_of(self, message: Tell) -> Any:
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
