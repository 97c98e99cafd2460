"""The contract between the loop and whatever data it reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fabricx.data.leasing import Dealer, Section
from fabricx.distributed.world import World


@dataclass(slots=True)
class Microbatch:
    """One rank's next piece of work.

    Attributes:
        data: the batch as the user's loader gives it; where `empty`, None, or another rank's sample or an earlier batch
            to compute along with.
        index: its number in the epoch.
        size: this rank's samples, or None where only the batch itself can tell; of an `empty` one, None says that the
            loader's length promised a batch, and none came.
        factor: what part of the global batch's mean this rank's mean is.
        opens, closes: first and last of an accumulation window.
        last: last of the epoch, as far as that is known.
        empty: nothing to compute here; other ranks have something.
        planned: microbatches of the window that `factor` reckons with.
        position: samples of the epoch's global order that are done after this one's window.
        start: those that are done before it; None where no order is known.
        apart: other ranks may be anywhere; they are together at the next one that isn't.
        meets: nothing to compute: ranks that were apart are together here.
        done: leases of the epoch that are done, where they meet.
        begin: where in the global order its first sample is.
        part: others of the same index follow.
        idle: ranks that have nothing to compute in it.
        portion: what part of a whole microbatch of `planned` the ranks' batches are together.
    """

    data: Any
    index: int
    size: int | None
    factor: float
    opens: bool
    closes: bool
    last: bool
    planned: int
    empty: bool = False
    position: int = 0
    apart: bool = False
    meets: bool = False
    done: int = 0
    begin: int = 0
    part: bool = False
    start: int | None = None
    idle: int = 0
    portion: float = 1.0


class Feed(ABC):
    """Batches of one loader for one rank."""

    exact_position = True  # can it start anywhere without reading what lies before?
    order = ""  # what tells the order of the epoch from others; empty where none is known
    order_before = ""  # that of the checkpoint of this epoch
    drawn: dict[str, Any] | None = None  # what drawing the newest order has changed in a sampler: before and after
    at_first: dict[str, Any] | None = None  # all that drawing orders has changed in it, as it was before the first
    reads_again = False  # to start within an epoch, does it read what lies before?
    global_batch = 0  # samples of one, without accumulation; 0 where they can't be divided
    ahead = 0  # the most global batches whose shares may be taken already when one is trained
    processes: int | None = None  # that load data, where that is known
    _world: World

    def world_changed(self, world: World) -> None:
        """Give each of other ranks its share, from the next epoch or section on."""
        self._world = world

    @abstractmethod
    def batches(self, accumulate: int = 1) -> int | float:
        """Return the batches of an epoch on each rank, infinity where that isn't known."""

    def global_batches(self, accumulate: int) -> int | None:
        """Return the global batches of an epoch; None where each is `accumulate` batches of every rank."""
        return None

    def state_dict(self) -> Any:
        """Return where this rank's own stream is; None where the position in the global order says it all."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Let the next epoch begin where a `state_dict` was taken."""

    def generators(self) -> dict[str, Any]:
        """Return the generators of the data's own, by path, from which this process draws."""
        return {}

    def lost_generators(self, *, within: bool) -> list[str]:
        """Return the generators of the data's own that loader processes draw from, which begin anew in a resumed run.

        Args:
            within: the run goes on within an epoch.
        """
        return []

    def place_sampler(self, epoch: int) -> None:
        """Let a sampler be where `drawn` says that it was, for an epoch that begins or goes on."""

    def described(self) -> str:
        """Return what the ranks' feeds have in common."""
        return "an iterable of batches"

    def leaves_out(self, accumulate: int) -> bool:
        """Return whether it is known that some rank has no sample of some batch."""
        return False

    def batches_before(self, position: int, accumulate: int) -> int | None:
        """Return how many of an epoch's batches lie before a position; None where only counting tells."""
        return None

    @abstractmethod
    def epoch(
        self, epoch: int, *, accumulate: int = 1, position: int = 0, first: int = 0, together: bool = True
    ) -> Iterator[Microbatch]:
        """Yield an epoch's batches from a position on.

        Args:
            epoch: its number.
            accumulate: microbatches of a window.
            position: samples of the global order that are done.
            first: number of the first batch.
            together: all ranks go through them batch by batch; else none waits for another.
        """

    @abstractmethod
    def leased(
        self, dealer: Dealer, section: Section, epoch: int, *, accumulate: int = 1, position: int = 0, first: int = 0
    ) -> Iterator[Microbatch]:
        """Yield what a dealer gives this rank of an epoch, and one that `meets` at the end of each section."""
