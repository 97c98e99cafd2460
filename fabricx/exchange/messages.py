"""What workers and servers say to each other. Tensors travel beside a message, in a link's buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

Groups = list[list[dict[str, Any]]]  # the hyperparameters of each group of each optimizer


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
        damp: divide a gradient by its staleness.
        compression, keep: of gradients; see `Codec`.
        snapshot_every: updates between two snapshots from which a server that died is started again; 0 for none.
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
    compression: str | None = None
    keep: float = 0.01
    snapshot_every: int = 0

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
        optimizers: the user's own, over `pieces`; None where servers only sum.
        pieces: this server's part of the parameters, in the order of the buffers; each a vector.
        spans: where each piece lies in the buffers.
        size: elements of all pieces.
        dtype: of the buffers.
        version: updates that have been made already.
    """

    settings: Settings
    optimizers: list[Optimizer] | None
    pieces: list[Tensor]
    size: int
    dtype: torch.dtype
    version: int
    spans: list[tuple[int, int]]


@dataclass(slots=True)
class Open:
    """Begin a section of the data: `count` leases, which all workers take one by one, after `version` updates."""

    section: int
    count: int
    version: int = 0


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
    """Ask for the weights (or the sum) once `version` updates have been made; `to_train`, a gradient will follow."""

    version: int = 0
    to_train: bool = False


@dataclass(slots=True)
class Push:
    """Bring a gradient, in the link's buffer.

    Attributes:
        clock: number of the update that it is a part of, where parts are aggregated.
        parts: how many parts that update has.
        lease: of which it was computed; orders the parts.
        empty: there is no gradient: the loss was skipped.
        missing: numbers of the pieces without a gradient.
        groups: hyperparameters as this worker has them now.
        hold: the update waits for an `Apply`.
        scale: of a compressed gradient.
    """

    clock: int
    parts: int
    lease: int
    empty: bool = False
    missing: frozenset[int] = frozenset()
    groups: Groups | None = None
    hold: bool = False
    scale: float = 1.0


@dataclass(slots=True)
class Norm:
    """Ask for the sum of squares of some pieces of the gradient that is held for an update, once it is complete."""

    clock: int
    pieces: Sequence[int]


@dataclass(slots=True)
class Apply:
    """Make the update that is held; all workers say so, and the first does it.

    Attributes:
        clock: number of the update.
        scales: (pieces, factor) to multiply with first.
        limits: (pieces, limit) to cut the elements to then.
    """

    clock: int
    scales: list[tuple[Sequence[int], float]]
    limits: list[tuple[Sequence[int], float]]


@dataclass(slots=True)
class Tell:
    """Ask for something besides: "state" of the optimizers, or "counts"."""

    what: Literal["state", "counts"]


@dataclass(slots=True)
class Reply:
    """A server's answer.

    Attributes:
        version: updates that it has made.
        content: what was asked for, if it isn't in the buffer.
    """

    version: int = 0
    content: Any = None


@dataclass(slots=True)
class Granted:
    """A lease, or none: then what is left isn't to be had yet, or the section is `over`.

    Attributes:
        lease, clock, parts: see `Push`.
        over: no lease of the section will come any more.
        count: how many it had in all.
        workers: those that were there at its end.
    """

    lease: int | None
    clock: int = 0
    parts: int = 1
    over: bool = False
    count: int = 0
    workers: tuple[int, ...] = ()


@dataclass(slots=True)
class Counts:
    """What a server has seen.

    Attributes:
        updates, dropped: of the weights; gradients that were too old.
        staleness: how many gradients had which staleness, in updates.
        lead: the most clocks that a worker was ahead of the slowest.
    """

    updates: int = 0
    dropped: int = 0
    staleness: dict[int, int] = field(default_factory=dict)
    lead: int = 0
