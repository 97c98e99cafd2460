"""The contract between the training loop and fault tolerance, for a run in which no lost rank is replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from fabricx.core.module_state.attribute_copies import Key
from fabricx.core.module_state.tracked_attributes import TrackedAttributes
from fabricx.core.state import EpochStep
from fabricx.metrics.objects import metric_objects
from fabricx.session.rank_state import BufferCopies, RankState

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.core.state import RunState
    from fabricx.core.strategy import Strategy
    from fabricx.data import Microbatch


class FaultTolerance:
    """Keeps the point from which a checkpoint resumes; the loop calls these methods at fixed points of a step.

    `fabricx.fault_tolerance.Recovery` adds records for other ranks, and continues after the loss of a rank.

    Args:
        module: the user's module.
        strategy: the run's strategy.
        state: position of the run.
        rank_state: returns the state of this rank, with copies of buffers and the metric objects that it receives.
        attributes: those of the module and of callbacks that the run changes; None if no other rank needs them.

    Attributes:
        resume_point: state from which unfinished work starts again: an accumulation window, a validation, or the end of
            an epoch; None between two steps. Checkpoints contain this state in place of the present one.
        epoch_step: part of the epoch that comes next.
        meeting: microbatch at which asynchronous ranks meet; None if its work is finished.
        buffers: copies of the module's buffers at the start of an accumulation window; None if windows do not start
            again.
        has_recovered: the attributes were restored from a record.
        repeats_batch_watchers: callbacks of users that watch metrics have a state and a hook at the end of a batch,
            which runs again if a rank is lost in it.
        metric_objects: torchmetrics objects of the module, found once in an epoch; None if they are not recorded.
    """

    def __init__(
        self,
        module: Module,
        strategy: Strategy,
        state: RunState,
        rank_state: Callable[..., RankState],
        attributes: TrackedAttributes | None = None,
    ) -> None:
        self._module, self._strategy, self._state, self._rank_state = module, strategy, state, rank_state
        self.resume_point: RankState | None = None
        self.epoch_step = EpochStep.BETWEEN
        self.meeting: Microbatch | None = None
        self.buffers: BufferCopies | None = None
        self.attributes = attributes
        self.has_recovered = False
        self.repeats_batch_watchers = False
        self.metric_objects: dict[str, Any] | None = None
        self._epoch_start: RankState | None = None  # before the hooks that begin the epoch; None as `buffers`
        self._saved_within = False  # see `begin_batches`

    # -- the run ------------------------------------------------------------------------------------------------

    def restore(self) -> bool:
        """Restore the newest in-memory checkpoint of earlier processes, if any; return whether it was restored."""
        return False

    def join_run(self) -> None:
        """Start training with all ranks, or join a running group in the place of a lost rank, with its state."""

    def load_attributes(self, attributes: dict[Key, Any], *, others: bool = True) -> None:
        """Restore attributes of the module and of callbacks, in a run that recovers.

        Args:
            attributes: copies of this rank, or of its predecessor.
            others: restore the initial values of others; False after `on_load_checkpoint`, which may set attributes.
        """
        if self.attributes is not None:
            self.attributes.restore(attributes, others=others)
            self.has_recovered = True

    @contextmanager
    def kept_attributes(self) -> Iterator[None]:
        """Return a context of hooks that run again after a recovery: they change no attributes."""
        if not self.has_recovered or self.attributes is None:
            yield
            return
        before = self.attributes.changed()
        yield
        self.attributes.restore(before, others=False)

    def recovering(self) -> AbstractContextManager[None]:
        """Return a context that suppresses an error caused by the loss of a peer, if training can continue.

        The block then runs again, in a new group of ranks and from the state of the most advanced rank.
        """
        return nullcontext()

    def before_train_end(self) -> None:
        """Keep and record the state before the last hooks of the training, which run again if a peer is lost."""

    def wait_for_all(self) -> None:
        """Wait until all ranks have finished, because recovery of a peer may need this rank's state."""

    def end_recovery(self) -> None:
        """Notify the supervisor that recovery in place is impossible from now on."""

    @property
    def outdated(self) -> bool:
        """Return whether a rank has departed from this rank's group, or waits to join it."""
        return False

    def check_members(self) -> None:
        """End this rank's part in its group, by an error, if the group is outdated."""

    def forget_copies(self) -> None:
        """Make sure that no rank returns to an in-memory checkpoint; every rank calls it."""

    # -- an evaluation ------------------------------------------------------------------------------------------

    def keep_point(self, buffers: dict[str, Any] | None = None, *, repeats: bool = False) -> None:
        """Keep the present state as the point from which a checkpoint resumes, unless an earlier one is kept.

        Args:
            buffers, repeats: see `Session.rank_state`.
        """
        if self.resume_point is None:
            self.resume_point = self._rank_state(buffers, repeats=repeats)

    def end_evaluation(self) -> bool:
        """Forget the point before an evaluation, unless it is that of an unfinished accumulation window.

        Returns:
            whether a resumed run continues after the evaluation; False if it repeats the window and the evaluation.
        """
        if self.resume_point is not None and self.resume_point.of_window:
            return False
        self.resume_point = None
        return True

    def in_validation(self) -> AbstractContextManager[None]:
        """Return a context of a validation in training, which is repeated if a peer is lost in it."""
        return nullcontext()

    def watching(self) -> AbstractContextManager[None]:
        """Return a context of callbacks that watch metrics: they are called again, from their states before."""
        return nullcontext()

    # -- an epoch -----------------------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """Keep the state before the hooks that begin an epoch, which run again if its first batch is tried again."""
        self._epoch_start = None
        if not self._strategy.traits.lockstep:
            self.buffers = None
            return
        self.buffers = BufferCopies(self._module, self.buffers)
        self._epoch_start = self._rank_state(self.buffers.take(), repeats=True)
        if not self._state.batch:
            self.resume_point = self._epoch_start

    def begin_batches(self, *, saved_within: bool) -> None:
        """Keep and record the state before the first batch of an epoch.

        Args:
            saved_within: checkpoints may be written between the start and the end of a global batch.
        """
        self._saved_within = saved_within
        if not self._batches_start_again(saved_within=saved_within):
            self.buffers = None
        self.metric_objects = metric_objects(self._module) if self._records() else None
        if self.buffers is not None:
            batch_start = self._epoch_start
            if self._state.batch:
                batch_start = self._rank_state(self.buffers.take(), repeats=saved_within)
            self.resume_point = batch_start
            self.record(batch_start)

    def _batches_start_again(self, *, saved_within: bool) -> bool:
        return saved_within

    def _records(self) -> bool:
        return False

    def reach(self, step: EpochStep) -> None:
        """Record that the next part of the epoch begins.

        Args:
            step: the next part.
        """
        self.epoch_step = step
        if step is EpochStep.EPOCH_WATCHERS and self._state.drained:  # else the epoch is incomplete, and its sums kept
            self.resume_point = None

    def before_publishing(self) -> None:
        """Keep the state before the hooks at the end of an epoch, which a run that resumes from one of them repeats.

        The reduction of its sums may finish on some ranks and fail on other ranks.
        """
        self.keep_point(repeats=True)

    def after_publishing(self) -> None:
        """Record that the epoch's values are published and its sums reset, before a peer relies on it."""

    def after_validation_steps(self) -> None:
        """Record that a validation is computed, before a peer relies on it: its steps may draw random numbers."""

    # -- a step -------------------------------------------------------------------------------------------------

    def before_backward(self, batch: Microbatch) -> None:
        """Record a batch before its gradients are sent, because peers may then complete it without this rank.

        Args:
            batch: batch that is trained.
        """

    def settle(self) -> None:
        """Wait for the collectives of this step, so that the weights are not updated from an aborted collective."""

    def before_update(self, batch: Microbatch) -> None:
        """Record a batch of which only the update is missing, unless that was done before its backward.

        Args:
            batch: batch that is trained.
        """

    def begin_update(self) -> None:
        """Wait for the collectives of this step; its weights change from now on."""

    def begin_unrepeatable(self) -> None:
        """Note that the present batch can't be tried again: it changes gradients of earlier batches."""

    def after_own_update(self, batch: Microbatch) -> None:
        """Record a batch that the module or a closure has applied; no rank counts it before all ranks have recorded it.

        Args:
            batch: batch that was trained.
        """

    def after_batch(self) -> None:
        """Record that the position in the data is after this batch."""
        self.resume_point, self.epoch_step = None, EpochStep.BATCH_WATCHERS

    def after_step(self) -> None:
        """Keep and record the state between two steps: hooks may have logged, or drawn random numbers."""
        if self.buffers is not None:
            self.resume_point = self._batch_start(self.buffers)

    def _batch_start(self, buffers: BufferCopies) -> RankState:
        """Return the present state, between two global batches."""
        return self._rank_state(buffers.take(), self.metric_objects, repeats=self._saved_within)

    def record(self, point: RankState | None = None) -> None:
        """Write this rank's progress and state to memory that outlives the process.

        Args:
            point: state to write; None for the present state.
        """
