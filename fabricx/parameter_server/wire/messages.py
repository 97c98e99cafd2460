"""Messages between workers and servers; vectors precede a message on the same link.

A worker sends requests, and a server replies in the same order:

| request | reply |
|---|---|
| `ServerInit` | `Reply` |
| `Pull` | `Reply`, after the vector with weights or a sum |
| `Push`, after the vector with a gradient | `PushReply`, if the push has `confirm`; otherwise none |
| `ReadNorm`, `TakeTurn`, `StartAverage`, `ReadState` | `Reply` |
| `RequestLease` | `LeaseReply` |
| `ApplyUpdate`, `OpenSection`, `CloseSection`, `LeaveSection`, `SetReceivedWeights` | none |

`server/handlers.py` has the conditions under which a server processes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch import Tensor

from fabricx.core.strategy_support.averaging import AverageRule
from fabricx.parameter_server.wire.partition import Shard

INITIAL_HISTORY: Final = "begun"  # history of the tables with which all workers have begun; see `Pull.since`
Groups = list[list[dict[str, Any]]]  # hyperparameters of each group of each optimizer, including nested optimizers


# -- initialisation ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Settings:
    """Behaviour of servers; names and values are those of the strategies' options.

    Attributes:
        workers: number of workers.
        aggregate: sum all parts of a global batch to one update; otherwise each push is an update.
        max_staleness: bound of the staleness; None for no bound.
        bound: the bound counts the "clock" of workers or the "version" of weights.
        on_stale: action for a gradient beyond a bound by version.
        compensation, dc_lambda, dc_momentum: delay compensation (DC-ASGD).
        damp: divide an update by the staleness of its gradient.
        backup: number of workers that an update does not wait for.
        compression, keep: of gradients; see `Codec`.
        pull_compression: compression of weights or sums to workers.
        outer: outer optimizer for workers that train local rounds and push weight changes; None if they push gradients.
        outer_lr, outer_momentum: of the outer optimizer.
        snapshot_every: updates between snapshots of a server; 0 if a dead server is not restarted.
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
        """Return the number of leases per update: those of a global batch, for any number of remaining workers.

        With backup workers, each worker trains at most one lease per update, so there are at most `present` leases.

        Args:
            present: number of workers.
        """
        if not self.aggregate:
            return 1
        return min(self.workers - self.backup, present) if self.backup else self.workers

    @property
    def compresses(self) -> bool:
        """Return whether gradients or weights are compressed."""
        return self.compression is not None or self.pull_compression is not None

    @property
    def may_drop(self) -> bool:
        """Return whether late gradients may be dropped; each push is then answered with a `PushReply`."""
        by_version = self.max_staleness is not None and self.bound == "version"
        return bool(self.backup) or (by_version and self.on_stale == "drop" and not self.aggregate)

    @property
    def orders_updates(self) -> bool:
        """Return whether updates wait for each other to bound the staleness."""
        by_version = self.bound == "version" and self.on_stale == "wait"
        return by_version and self.max_staleness is not None and not self.aggregate


@dataclass(slots=True)
class RuleState:
    """State of a server's update rule, beside its weights and the user's optimizers.

    Attributes:
        tensors: by name, flat: "velocity" and "gathered" (weight changes since the velocity's newest update) of an
            outer optimizer, and the "mean_square" of gradients for delay compensation.
        rounds: rounds of the outer optimizer.
    """

    tensors: dict[str, Tensor]
    rounds: int = 0


@dataclass(slots=True)
class ServerInit:
    """Initialise the server with weights and optimizers.

    Attributes:
        settings: behaviour of the server.
        optimizers: the user's optimizers over `pieces` (`PackedOptimizers`); None if servers only sum.
        pieces: this server's pieces of the parameters, in the order of `shard`.
        shard: definition of the pieces, and their positions in vectors.
        dtype: data type of the vectors.
        version: number of updates made before.
        rule: state of the update rule; None for a new one.
        error_feedback: error feedback of compressed sums; None for zero.
    """

    settings: Settings
    optimizers: Any
    pieces: list[Tensor]
    shard: Shard
    dtype: torch.dtype
    version: int
    rule: RuleState | None = None
    error_feedback: Tensor | None = None


# -- weights and gradients --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Pull:
    """Request weights, or the sum of gradients, at `version` or later; the reply's vector contains them.

    Attributes:
        version: minimum version.
        to_train: a gradient will follow.
        dense: request all pieces.
        rows: number of requested rows by table, whose ids are in the message's vector; None for all tables.
        since: with `rows=None`: (history, version) of the complete tables that the worker has; see `ChangedRows`.
        whole: request full weights if otherwise compressed differences would be sent.
    """

    version: int = 0
    to_train: bool = False
    dense: bool = True
    rows: Mapping[int, int] | None = None
    since: tuple[str, int] | None = None
    whole: bool = False


@dataclass(slots=True)
class Push:
    """Deliver a gradient (or weight changes of a local round) in the link's vector.

    Attributes:
        clock: number of the update, if parts are aggregated.
        parts: number of parts of the update.
        leases: leases of the gradient; the first determines the order of parts.
        empty: no gradient, because the loss was skipped.
        missing: numbers of the pieces without a gradient.
        rows: number of rows with a gradient, by table.
        groups: present hyperparameters of this worker.
        hold: the update waits for an `ApplyUpdate`.
        scale: scale of a compressed gradient.
        share: weight of the gradient in its update, as fraction of the samples.
        clips: clipping of the sum of an update's parts, in order: ("norm" or "value", numbers of pieces, limit).
        confirm: send a reply when the message was processed.
        logged: metric sums (`merge_sums`) that the leases have logged, and sums that hooks have logged between this
            worker's previous push and this one; each counts if the server that grants leases uses the gradient.
        samples: (epoch, begin, end) in the data order of the batches that this worker has trained for the gradient.
        skipped: number of leases of a local round without a step, because they had no loss.
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
    samples: Sequence[tuple[int, int, int]] = ()
    skipped: int = 0


@dataclass(slots=True)
class TakeTurn:
    """Request the number of this worker's next update; no other update precedes it, until its push or its end.

    The reply's content is False, and other workers continue, if the gradient would not be used: see `UpdateOrder`.
    """


@dataclass(slots=True)
class ReadNorm:
    """Request the sum of squares of pieces of a held gradient, when all its parts are complete.

    Attributes:
        clock: number of the update.
        pieces: numbers of the pieces.
    """

    clock: int
    pieces: Sequence[int]


@dataclass(slots=True)
class ApplyUpdate:
    """Make a held update. All workers send it, and the last message triggers the update: no worker reads weights then.

    Attributes:
        clock: number of the update.
        scales: (pieces, factor), applied first.
        limits: (pieces, limit) for the elements, applied second.
        groups: hyperparameters that were set after the gradient; None for those of the `Push`.
    """

    clock: int
    scales: Sequence[tuple[Sequence[int], float]]
    limits: Sequence[tuple[Sequence[int], float]]
    groups: Groups | None = None


# -- leases -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class OpenSection:
    """Begin a section of `count` leases for these workers, at the version of the weights.

    Attributes:
        section, count, version, workers: see above.
        data: (epoch, position, items): the section begins at this position of an order with so many items; None for
            data without an order.
    """

    section: int
    count: int
    version: int = 0
    workers: tuple[int, ...] | None = None
    data: tuple[int, int, int] | None = None


@dataclass(slots=True)
class RequestLease:
    """Request a lease of a section.

    Attributes:
        section: number of the section.
        wait: this worker holds no lease, and waits for a lease or the end of the section; otherwise the reply is
            immediate.
    """

    section: int
    wait: bool


@dataclass(slots=True)
class CloseSection:
    """End the distribution of leases of a section early, so that all workers meet; also before the section begins.

    Attributes:
        section: number of the section.
    """

    section: int


@dataclass(slots=True)
class LeaveSection:
    """Request no more leases of a section: the data of this worker are over, and other workers may still have some.

    Attributes:
        section: number of the section.
    """

    section: int


# -- other state ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class SetReceivedWeights:
    """Report the weights of this worker, to which the next compressed difference refers.

    Attributes:
        weights: weights of this worker, flat.
    """

    weights: Tensor


@dataclass(slots=True)
class StartAverage:
    """Start a moving average of the weights; a server that has an average continues it.

    Attributes:
        rule: decay of the average.
        step: weight updates of the run so far.
        values: present average, flat, in the order of the server's vector of weights.
        updates: steps of the present average.
    """

    rule: AverageRule
    step: int
    values: Tensor
    updates: int = 0


@dataclass(slots=True)
class ReadState:
    """Request other state of the server.

    Attributes:
        name: "optimizers" (`ServerOptimizers`), the "rule" (`RuleState`), the server's "weights", their moving
            "average" (values, its steps; or None), the "error_feedback" of compressed sums, "counts",
            the "samples" in the weights (`SampleLedger`), or metric sums "logged" in a section.
        section: the newest section or its predecessor, for "logged".
    """

    name: Literal["optimizers", "rule", "weights", "average", "error_feedback", "counts", "samples", "logged"]
    section: int = -1


# -- replies ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Reply:
    """A server's reply.

    Attributes:
        version: number of updates.
        trained: number of leases in the weights, without those that had no loss.
        content: requested data other than the vector; for all weights, the history of the tables and the number of
            changed rows per table (None for all rows).
        spans: byte ranges of the vector that precede the reply.
        scale: scale of compressed values; None without compression.
        skipped: versions without an update of the weights, because no worker had a gradient for the global batch.
    """

    version: int = 0
    trained: int = 0
    content: Any = None
    spans: list[tuple[int, int]] = field(default_factory=list)
    scale: float | None = None
    skipped: int = 0


@dataclass(slots=True)
class PushReply:
    """Reply to a push, if gradients may be dropped.

    Attributes:
        used: the gradient is used; otherwise its data is leased again.
    """

    used: bool


@dataclass(slots=True)
class LeaseReply:
    """Reply to a request for a lease; without a lease, the section is `over` or none can begin at present.

    Attributes:
        lease, clock, parts: see `Push`.
        over: the section has no further leases.
        count: total leases of the section.
        share: fraction of the samples of its update; set by the worker.
        again: another worker has held it before, and may have pushed its gradient to some servers.
    """

    lease: int | None
    clock: int = 0
    parts: int = 1
    over: bool = False
    count: int = 0
    share: float = 1.0
    again: bool = False


# -- statistics -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Counts:
    """Statistics of a server.

    Attributes:
        updates, dropped: updates of the weights; gradients that were too stale.
        staleness: number of gradients by staleness, in updates.
        lead: maximum clocks of a worker ahead of the slowest.
        messages: processed messages.
        queued: waiting messages, summed over the processed messages.
        begun: version at initialisation, from which the next three attributes count.
        dealt: leases of all sections, on the server that grants leases.
        used: distinct leases whose gradients were used, or that had no gradient.
        repeated: gradients used for leases that had been used before.
        conflicts: updates whose parts had different hyperparameters.
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
