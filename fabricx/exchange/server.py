"""A server as a state machine: what a message waits for, and what comes of it. No process, no socket, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from fabricx.exchange.compression import Codec
from fabricx.exchange.leases import Leases
from fabricx.exchange.messages import (
    Apply,
    Ask,
    Begin,
    Close,
    Counts,
    Granted,
    Groups,
    Norm,
    Open,
    Pull,
    Push,
    Reply,
    Settings,
    Tell,
)
from fabricx.exchange.rules import Correction, Rule, Step, make_rule


@dataclass(slots=True)
class _Part:
    """What one lease adds to an update, and with which version it was computed."""

    gradient: Tensor
    push: Push
    base: int


@final
class Server:
    """Keeps a part of the weights for several workers.

    Each message is handled when it is `ready`; until then its worker waits, and all that wait are asked again whenever
    something has been handled. So whatever carries messages (threads, a simulation) decides nothing.

    Attributes:
        version: updates that were made.
        counts: what was seen so far.
        total: where sums are made; whoever pulls one has it before the next is made.
    """

    def __init__(self, workers: int, *, deals: bool = True) -> None:
        self.version = 0
        self._deals = deals
        self._restored = False  # then updates may be missing, and are not waited for
        self.counts = Counts()
        self.total = torch.empty(0)
        self._workers = set(range(workers))
        self._settings = Settings(workers)
        self._rule: Rule | None = None
        self._codec: Codec | None = None
        self._begun: Begin
        self._sums: dict[int, Tensor] = {}  # held, by clock
        self._correction = Correction(self._settings)
        self._leases = Leases(-1, 0, self._workers)
        self._bases: dict[int, int] = {}  # with which version a worker computes
        self._parts: dict[int, dict[int, _Part]] = {}  # by clock and lease

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
            inbox: the worker's gradient, flat, if it brings one.
            outbox: what the worker was last sent; the weights, flat, for a `Pull`.

        Returns:
            the answer; None where there is none.
        """
        if isinstance(message, Pull):
            if message.to_train:
                self._bases[worker] = self.version
            if outbox.data_ptr() != self.values.data_ptr():
                outbox.copy_(self.values)
            return Reply(self.version, self._rule.missing if self._rule is not None else None)
        if isinstance(message, Push):
            return self._push(worker, message, inbox, outbox)
        if isinstance(message, Ask):
            if message.section != self._leases.section:
                return Granted(None, over=True)
            granted = self._leases.grant(worker)
            self.counts.lead = max(self.counts.lead, self._leases.lead)
            return granted
        if isinstance(message, Norm):
            held = self._held(message.clock)
            return Reply(self.version, [float(held[a:b].square().sum()) for a, b in self._spans(message.pieces)])
        if isinstance(message, Apply):
            return self._apply(message)
        if isinstance(message, Begin):
            self._begin(message)
            return Reply(self.version)
        if isinstance(message, Open):
            return self._open(message)
        if isinstance(message, Close):
            if message.section == self._leases.section:
                self._leases.close()
            return None
        if isinstance(message, Tell):
            return Reply(self.version, self._told(message.what))
        raise TypeError(f"a server knows nothing of {type(message).__name__}")

    def snapshot(self) -> dict[str, Any]:
        """Return what `restore` needs; the tensors in it are the live ones."""
        return {
            "begun": self._begun,
            "version": self.version,
            "leases": self._leases,
            "parts": self._parts,
            "counts": self.counts,
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Go on from a snapshot of a server that died: its later updates are lost, and their parts trained again."""
        self._begin(snapshot["begun"])
        self.version, self._parts = snapshot["version"], snapshot["parts"]
        self._leases, self.counts = snapshot["leases"], snapshot["counts"]
        self._leases.all_back()
        self._restored = True

    def left(self, worker: int) -> None:
        """Go on without a worker: what it had not pushed is somebody else's now."""
        self._workers.discard(worker)
        self._bases.pop(worker, None)
        self._leases.left(worker)

    def joined(self, worker: int) -> None:
        """Take a worker in."""
        self._workers.add(worker)
        self._leases.joined(worker)

    def _begin(self, begin: Begin) -> None:
        self._settings, self._begun = begin.settings, begin
        compression = begin.settings.compression
        self._codec = None if compression is None else Codec(compression, keep=begin.settings.keep, feedback=False)
        self._rule = make_rule(begin)
        self._correction = Correction(begin.settings)
        self.version = begin.version
        self._parts.clear()

    def _open(self, message: Open) -> None:
        if message.section <= self._leases.section:
            return  # another worker has said so already
        if message.version > self.version:  # the others'; this server has lost some
            self.version = message.version
            self._parts.clear()
        settings = self._settings
        bounded = settings.max_staleness if settings.bound == "clock" else None
        self._leases = Leases(
            message.section, message.count, self._workers,
            clock=self.version, bound=bounded, each=not settings.aggregate,
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

    def _push(self, worker: int, push: Push, inbox: Tensor, outbox: Tensor) -> None:
        if self._codec is not None and not push.empty:
            inbox = self._codec.decode(inbox.view(torch.uint8), len(inbox), push.scale, inbox.dtype)
        base = self._bases.pop(worker, self.version)
        if self._deals and self._leases.section >= 0 and not self._leases.given(push.lease):
            self.counts.dropped += 1  # dealt by a server that died since; it is, or will be, somebody's again
            return
        if self._settings.aggregate:
            self._add_part(push, inbox, base)
            return
        staleness = self.version - base
        settings = self._settings
        too_old = settings.bound == "version" and staleness > (settings.max_staleness or 0)
        if too_old and settings.max_staleness is not None and settings.on_stale == "drop":
            self.counts.dropped += 1
            self._leases.back(push.lease)
            return
        if not push.empty:
            self._count(staleness)
            corrected = self._correction(inbox, outbox, self.values, staleness)
            self._update(corrected, push.missing, push.groups)
        self._leases.done(push.lease)

    def _add_part(self, push: Push, inbox: Tensor, base: int) -> None:
        """Keep a part of a global batch's gradient, and make all updates that are complete, in their order."""
        leased = self._leases.section >= 0  # then this worker's next gradient may come before this one is used
        part = _Part(inbox.clone() if leased and self._codec is None else inbox, push, base)
        parts = self._parts.setdefault(push.clock, {})
        parts[push.lease] = part
        if self._restored and not self._deals and push.clock > self.version and len(parts) >= self._wanted(parts):
            self.version = push.clock  # what is missing before was lost with the server that this one was
        while (parts := self._parts.get(self.version, {})) and len(parts) >= self._wanted(parts) and not push.hold:
            self._sum_up(self._parts.pop(self.version))
        if leased:
            self._leases.done(push.lease)

    @staticmethod
    def _wanted(parts: dict[int, _Part]) -> int:
        return next(iter(parts.values())).push.parts

    def _held(self, clock: int) -> Tensor:
        """Return the sum of an update's parts, which stays until it is applied."""
        if clock not in self._sums:
            self._sums = {clock: self._sum(self._full(self._parts[clock]))}
        return self._sums[clock]

    def _apply(self, message: Apply) -> None:
        if self.version > message.clock:
            return
        total = self._held(message.clock)
        for pieces, factor in message.scales:
            for start, stop in self._spans(pieces):
                total[start:stop].mul_(factor)
        for pieces, limit in message.limits:
            for start, stop in self._spans(pieces):
                total[start:stop].clamp_(-limit, limit)
        self._sum_up(self._parts.pop(message.clock), total)

    def _spans(self, pieces: Sequence[int]) -> list[tuple[int, int]]:
        return [self._begun.spans[number] for number in pieces]

    @staticmethod
    def _full(parts: dict[int, _Part]) -> list[_Part]:
        return [parts[lease] for lease in sorted(parts) if not parts[lease].push.empty]

    def _sum(self, full: list[_Part]) -> Tensor:
        """Return the sum of parts, added in the order of their leases."""
        if self.total.numel() != self._begun.size:
            self.total = torch.zeros(self._begun.size, dtype=self._begun.dtype)
        total = self.total
        if not full:
            return total.zero_()
        if len(full) == 1:
            return total.copy_(full[0].gradient)
        torch.add(full[0].gradient, full[1].gradient, out=total)
        for part in full[2:]:
            total.add_(part.gradient)
        return total

    def _sum_up(self, parts: dict[int, _Part], total: Tensor | None = None) -> None:
        """Make one update of all parts."""
        full = self._full(parts)
        for part in full:
            self._count(self.version - part.base)
        if not full:
            self.version += 1
            return
        if total is None:
            total = self._sum(full)
        missing = frozenset.intersection(*(part.push.missing for part in full))
        self._update(total, missing, full[-1].push.groups)

    def _update(self, gradient: Tensor, missing: frozenset[int], groups: Groups | None) -> None:
        assert self._rule is not None
        self._rule.update(gradient, missing, groups)
        self.version += 1
        self.counts.updates += 1

    def _count(self, staleness: int) -> None:
        self.counts.staleness[staleness] = self.counts.staleness.get(staleness, 0) + 1

    def _told(self, what: str) -> Any:
        if what == "counts":
            return self.counts
        return self._rule.state() if isinstance(self._rule, Step) else []
