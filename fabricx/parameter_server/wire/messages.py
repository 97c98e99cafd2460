"""Messages between workers and servers. Vectors travel beside a message on the same link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fabricx.core.averaging import AverageRule
from fabricx.parameter_server.wire.partition import Shard

Groups = list[list[dict[str, Any]]]  # the hyperparameters of each group of each optimizer, contained ones too


@dataclass(slots=True)
class Settings:
    """How servers treat what they are given; the words are those of the strategies.

    Attributes:
        workers: how many there are.
        aggregate: make one update of all parts of a global batch; else one of each push, when it arrives.
        max_staleness: the bound; None for no bound.
        bound: of "clock" or "version".
        on_stale: what happens at a bound by version.
        compensation, dc_lambda, dc_momentum: of the delay (DC-ASGD).
        damp: divide an update by the staleness of its gradient.
        backup: workers that an update doesn't wait for.
        compression, keep: of gradients; see `Codec`.
        pull_compression: of weights or sums on their way back.
        outer: what becomes of what a worker has moved in a round of its own; None where gradients are brought.
        outer_lr, outer_momentum: of that.
        snapshot_every: updates between two snapshots of a server; 0 where one that dies isn't started again.
    """

    workers: int
    aggregate: bool = True
    max_staleness: int | None = None
    bound: Literal["clock", "version"] = "clock"
    on_stale: Literal["wait", "drop", "damp"] = "wait"
    compensation: Literal["dc", "dc-adaptive"] | None = None
    dc_lambda: float = 0.04
    dc_momentum: float = 0.95
    damp: bool = False
    backup: int = 0
    compression: str | None = None
    keep: float = 0.01
    pull_compression: str | None = None
    outer: Literal["sum", "average", "nesterov", "elastic"] | None = None
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    snapshot_every: int = 0

    def parts_of_update(self, present: int) -> int:
        """Return how many leases make an update: those of a global batch, however many workers are left to do them.

        With backup workers each does one at most, so that it can't be more than there are.
        """
        if not self.aggregate:
            return 1
        return min(self.workers - self.backup, present) if self.backup else self.workers

    @property
    def compresses(self) -> bool:
        """Return whether anything is compressed on its way."""
        return self.compression is not None or self.pull_compression is not None

    @property
    def may_drop(self) -> bool:
        """Return whether a gradient may be dropped because it is late; then each push is answered with a `Pushed`."""
        by_version = self.max_staleness is not None and self.bound == "version"
        return bool(self.backup) or (by_version and self.on_stale == "drop" and not self.aggregate)

    @property
    def orders_updates(self) -> bool:
        """Return whether updates wait for each other, so that none is of too old a gradient."""
        by_version = self.bound == "version" and self.on_stale == "wait"
        return by_version and self.max_staleness is not None and not self.aggregate


@dataclass(slots=True)
class Begin:
    """Take over the weights, and what steps them.

    Attributes:
        settings: see there.
        optimizers: the user's own, over `pieces` (`PackedOptimizers`); None where servers only sum.
        pieces: this server's part of the parameters, in the order of `shard`.
        shard: what they are, and where they lie in vectors.
        dtype: of the vectors.
        version: updates that have been made already.
        velocity: of the outer optimizer, flat; None for none yet.
        lost: by compressing sums before.
    """

    settings: Settings
    optimizers: Any
    pieces: list[Tensor]
    shard: Shard
    dtype: torch.dtype
    version: int
    velocity: Tensor | None = None
    lost: Tensor | None = None


@dataclass(slots=True)
class Open:
    """Begin a section of the data: `count` leases, which these workers take one by one, after `version` updates."""

    section: int
    count: int
    version: int = 0
    workers: tuple[int, ...] | None = None


@dataclass(slots=True)
class Ask:
    """Ask for a lease; with `wait` this worker holds none, and waits until it gets one or the section is over."""

    section: int
    wait: bool


@dataclass(slots=True)
class Close:
    """Give no more leases of a section: somebody wants all workers to meet."""

    section: int


@dataclass(slots=True)
class Pull:
    """Ask for weights (or the sum) once `version` updates have been made; they come in the link's vector.

    Attributes:
        version: see above.
        to_train: a gradient will follow.
        dense: ask for all pieces.
        rows: how many rows of which table, whose numbers are in the vector of this message; None for all of all.
        since: of all of all: (life, version) of the whole tables that the worker has; see `ChangedRows`.
        whole: the weights themselves, where their differences from what the worker has would travel.
    """

    version: int = 0
    to_train: bool = False
    dense: bool = True
    rows: Mapping[int, int] | None = None
    since: tuple[str, int] | None = None
    whole: bool = False


@dataclass(slots=True)
class Push:
    """Bring a gradient (or what was moved), in the link's vector.

    Attributes:
        clock: number of the update that it is a part of, where parts are aggregated.
        parts: how many parts that update has.
        leases: of which it was computed; the first orders the parts.
        empty: there is no gradient: the loss was skipped.
        missing: numbers of the pieces without a gradient.
        rows: how many rows of which table it has.
        groups: hyperparameters as this worker has them now.
        hold: the update waits for an `Apply`.
        scale: of a compressed gradient.
        share: what part of the samples of an update the gradient has been weighted with.
        clips: of the sum of an update's parts, one after the other: "norm" or "value", numbers of pieces, the limit.
        confirm: answer when it is handled.
        logged: sums of values (`merge_sums`) that the leases have logged, and of those that hooks have logged after
            this worker's push before this one; each counts if the server that deals uses the gradient.
    """

    clock: int
    parts: int
    leases: tuple[int, ...]
    empty: bool = False
    missing: frozenset[int] = frozenset()
    rows: Mapping[int, int] = field(default_factory=dict)
    groups: Groups | None = None
    hold: bool = False
    scale: float = 1.0
    share: float = 1.0
    clips: Sequence[tuple[str, Sequence[int], float]] = ()
    confirm: bool = False
    logged: tuple[dict[str, Any], dict[str, Any]] | None = None


@dataclass(slots=True)
class Pushed:
    """Answer to a push where gradients may be dropped: whether it is `used`, or its data dealt again."""

    used: bool


@dataclass(slots=True)
class Turn:
    """Ask for the number of this worker's next update; no other comes before its push, or its end.

    The content of the answer is False, and others go on, if the gradient would not be used: see `UpdateOrder`.
    """


@dataclass(slots=True)
class Norm:
    """Ask for the sum of squares of some pieces of the gradient that is held for an update, once it is complete."""

    clock: int
    pieces: Sequence[int]


@dataclass(slots=True)
class Apply:
    """Make the update that is held; all workers say so, and the last does it: nobody looks at the weights any more.

    Attributes:
        clock: number of the update.
        scales: (pieces, factor) to multiply with first.
        limits: (pieces, limit) to cut the elements to then.
        groups: hyperparameters that have come after the gradient; None for those of the `Push`.
    """

    clock: int
    scales: Sequence[tuple[Sequence[int], float]]
    limits: Sequence[tuple[Sequence[int], float]]
    groups: Groups | None = None


@dataclass(slots=True)
class Tell:
    """Ask for something besides: the "optimizers" (`ServerOptimizers`), "velocity" of the outer one, the server's own
    "weights", the "average" of them (values, steps since it began; None if none is kept), what was "lost" by
    compressing sums, "counts", or what was "logged" in a section, the newest or the one before."""

    what: Literal["optimizers", "velocity", "weights", "average", "lost", "counts", "logged"]
    section: int = -1


@dataclass(slots=True)
class Average:
    """Keep a moving average of the weights from here on. A server that keeps one already goes on with that.

    Attributes:
        rule: how it follows the weights.
        step: weight updates of the run so far.
        values: the average as it is now, flat, in the order of the server's vector of weights.
    """

    rule: AverageRule
    step: int
    values: Tensor


@dataclass(slots=True)
class Have:
    """Say what weights this worker has, flat: what comes next is what the server's are more than these."""

    weights: Tensor


@dataclass(slots=True)
class Reply:
    """A server's answer.

    Attributes:
        version: updates that it has made.
        trained: leases that are in the weights.
        content: what was asked for, if it isn't in the vector; of all weights, the tables' life, and how many rows of
            each follow, None for all of them.
        spans: the bytes of the vector that come with it.
        scale: of what is compressed; None if nothing is.
        skipped: global batches among the versions for which no worker gave a gradient: no update of the weights.
    """

    version: int = 0
    trained: int = 0
    content: Any = None
    spans: list[tuple[int, int]] = field(default_factory=list)
    scale: float | None = None
    skipped: int = 0


@dataclass(slots=True)
class Granted:
    """A lease, or none: then what is left isn't to be had yet, or the section is `over`.

    Attributes:
        lease, clock, parts: see `Push`.
        over: no lease of the section will come any more.
        count: how many it had in all.
        share: what part of the samples of its update it has; known to the worker.
        again: another worker had it before, and may have brought its gradient to some of the servers.
    """

    lease: int | None
    clock: int = 0
    parts: int = 1
    over: bool = False
    count: int = 0
    share: float = 1.0
    again: bool = False


@dataclass(slots=True)
class Counts:
    """What a server has seen.

    Attributes:
        updates, dropped: of the weights; gradients that were too old.
        staleness: how many gradients had which staleness, in updates.
        lead: the most clocks that a worker was ahead of the slowest.
        messages: that were handled.
        queued: that waited beside each of those, summed.
        begun: updates that were in the weights when the server was given them; the next three count from there.
        dealt: leases of all sections, on the server that deals.
        used: different leases whose gradients this server has used, or that have given none.
        repeated: gradients used of leases that had been used before.
        conflicts: updates whose parts came with different hyperparameters.
    """

    updates: int = 0
    dropped: int = 0
    staleness: dict[int, int] = field(default_factory=dict)
    lead: int = 0
    messages: int = 0
    queued: int = 0
    begun: int = 0
    dealt: int = 0
    used: int = 0
    repeated: int = 0
    conflicts: int = 0
