"""Interface between the training loop and a source of data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fabricx.core.strategy_support.dealer import Dealer
from fabricx.data.leasing import Section
from fabricx.distributed.world import World


@dataclass(slots=True)
class Microbatch:
    """A rank's next unit of work: the data of one forward and backward.

    Attributes:
        data: batch of the user's loader. If `empty`: None, or a sample of another rank or an earlier batch, with which
            the rank can take part in the forward and backward of the others.
        index: number of the batch in the epoch.
        size: samples of this rank; None if only the batch shows it. For an `empty` microbatch, None means that the
            loader ended before its length.
        loss_factor: weight of this rank's mean in the mean of the global batch.
        opens, closes: first and last microbatch of an accumulation window.
        last: last microbatch of the epoch, if that is known already.
        empty: this rank has no samples, but other ranks have.
        planned: microbatches of the window, as assumed by `loss_factor`.
        window_end: samples of the epoch's global order that are trained after this microbatch's window.
        leased: of a lease: this rank works at its own pace until the next microbatch that `synchronises`.
        synchronises: has no data; ranks that worked at their own pace synchronise here.
        done: if it `synchronises`, leases of the epoch that are trained.
        begin: position of the first sample in the global order.
        end: position after the last sample of a leased microbatch, in an order of the data; None otherwise.
        incomplete: completes no batch: more microbatches with the same index follow; or, if it `synchronises`, no lease
            was trained since the ranks synchronised before.
        window_begin: samples that are trained before the window; None for a source without a global order.
        idle: ranks without a sample in this microbatch.
        window_weight: weight of this microbatch in the window, in microbatches; a full window has a sum of `planned`.
        user_batch: the item of the data set is a batch that the user made (`batch_size=None`): `size` counts 1 for it,
            and the number of its samples is the weight of logged values.
        completes: numbers of the batches that this microbatch completes, as counted by the ranks with which the run
            began; a rank has more or fewer microbatches if their number changes. None for `index` itself.
    """

    data: Any
    index: int
    size: int | None
    loss_factor: float
    opens: bool
    closes: bool
    last: bool
    planned: int
    empty: bool = False
    window_end: int = 0
    leased: bool = False
    synchronises: bool = False
    done: int = 0
    begin: int = 0
    end: int | None = None
    incomplete: bool = False
    window_begin: int | None = None
    idle: tuple[int, ...] = ()
    window_weight: float = 1.0
    user_batch: bool = False
    completes: range | None = None


class Feed(ABC):
    """Batches of one loader for one rank.

    Attributes:
        exact_position: can start at any position without reading the data before it.
        of_rank: what a rank reads may depend on its rank and on the number of ranks, so that these can't change.
        order: identifies the order of the epoch; "" if there is no known order.
        order_before: `order` as recorded in the checkpoint of this epoch.
        chosen: digest of the items that a `Subset` has; "" for other data sets.
        drawn: values of the sampler that drawing the newest order has changed, before and after.
        at_first: original values of everything that drawing orders has changed in the sampler, or that iterating may
            change in a stream.
        reads_again: to start within an epoch, the data before the position are read again.
        global_batch: samples of a global batch without accumulation; 0 if the shares can't be changed.
        ahead: maximum number of global batches whose shares may be fixed already while a batch is trained.
        processes: number of loader processes; None if unknown.
    """

    exact_position = True
    of_rank = False
    order = ""
    order_before = ""
    chosen = ""
    drawn: dict[str, Any] | None = None
    at_first: dict[str, Any] | None = None
    reads_again = False
    global_batch = 0
    ahead = 0
    processes: int | None = None
    _world: World

    def world_changed(self, world: World) -> None:
        """Change the ranks over which the data is divided, from the next epoch or section.

        Args:
            world: the new ranks.
        """
        self._world = world

    def begin(self, epoch: int) -> None:
        """Pass the number of an epoch to the source, whose length may depend on it.

        Args:
            epoch: epoch that begins or resumes.
        """

    @abstractmethod
    def batches(self, accumulate: int = 1) -> int | float:
        """Return the number of batches per epoch on each rank; infinity if unknown.

        Args:
            accumulate: microbatches of an accumulation window.
        """

    def planned_batches(self, accumulate: int) -> int | None:
        """Return the batches per epoch of each rank with which the run began; None if these are those of `batches`.

        Args:
            accumulate: microbatches of an accumulation window.
        """
        return None

    def global_batches(self, accumulate: int) -> int | None:
        """Return the number of global batches per epoch; None if each consists of `accumulate` batches per rank.

        Args:
            accumulate: microbatches of an accumulation window.
        """
        return None

    def state_dict(self) -> Any:
        """Return the state of this rank's own stream; None if the position in the global order is sufficient."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Resume the next epoch from a state.

        Args:
            state: result of `state_dict`.
        """

    def generators(self) -> dict[str, Any]:
        """Return generators of the dataset that this process draws from, by path."""
        return {}

    def lost_generators(self, *, within: bool) -> list[str]:
        """Return generators of the dataset in loader processes, whose state is lost when a run resumes.

        Args:
            within: the run resumes within an epoch.
        """
        return []

    def place_sampler(self, epoch: int) -> None:
        """Restore the sampler's state of `drawn`.

        Args:
            epoch: epoch that begins or resumes.
        """

    def indices(self, micro: Microbatch) -> list[int] | None:
        """Return the positions of a batch's samples in the data set; None if the source has no positions.

        Args:
            micro: newest batch of `epoch`.
        """
        return None

    def described(self) -> str:
        """Describe the properties that the feeds of all ranks have in common."""
        return "an iterable of batches"

    def leaves_out(self, accumulate: int) -> bool:
        """Return whether some rank certainly has no sample of some batch.

        Args:
            accumulate: microbatches of an accumulation window.
        """
        return False

    def batches_before(self, position: int, accumulate: int) -> int | None:
        """Return the number of batches of an epoch before a position; None if only counting determines it.

        Args:
            position: samples of the global order.
            accumulate: microbatches of an accumulation window.
        """
        return None

    @abstractmethod
    def epoch(
        self, epoch: int, *, accumulate: int = 1, position: int = 0, first: int = 0, together: bool = True
    ) -> Iterator[Microbatch]:
        """Yield the batches of an epoch from a position.

        Args:
            epoch: number of the epoch.
            accumulate: microbatches of an accumulation window.
            position: samples of the global order that are trained already.
            first: number of the first batch.
            together: ranks process the batches in lockstep; otherwise no rank waits for another rank.
        """

    @abstractmethod
    def leased(
        self, dealer: Dealer, section: Section, epoch: int, *, accumulate: int = 1, position: int = 0, first: int = 0
    ) -> Iterator[Microbatch]:
        """Yield the leased batches of this rank, and a microbatch with `meets` at the end of each section.

        Args:
            dealer: distributes leases to the ranks.
            section: determines the number of leases in a section.
            epoch: number of the epoch.
            accumulate: microbatches of a lease.
            position: samples of the global order that are trained already.
            first: number of the first batch.
        """
