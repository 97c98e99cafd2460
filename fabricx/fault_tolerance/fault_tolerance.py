"""Fault tolerance of a rank, as an interface for the training loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, final

from fabricx.checkpoint.rank_state import BufferCopies, RankState
from fabricx.core.state import Stage
from fabricx.distributed.generations import Membership, membership
from fabricx.fault_tolerance.progress import NO_SUMS, progress, record_of
from fabricx.fault_tolerance.rank_record import Slot
from fabricx.fault_tolerance.recovery import recover, take_part
from fabricx.fault_tolerance.rollback import MemoryCheckpointer, restore_newest
from fabricx.metrics.objects import metric_objects

if TYPE_CHECKING:
    from fabricx.data import Microbatch
    from fabricx.trainer.trainer import Trainer


@final
class FaultTolerance:
    """Records what other ranks need if this rank dies, and continues after another rank has died.

    The training loop calls these methods at fixed points of a step. Without a supervisor that replaces workers, only
    the resume point is kept, which checkpoints need as well; all other methods return at once.

    Args:
        trainer: of this rank; its world and its strategy are set up.
        members: membership of this rank in a process group whose members may change; None for a fixed group.
        slot: memory for the records of this rank; None if no other rank reads them.
        memory: in-memory checkpoints, for state that only this rank holds; None if they are off.

    Attributes:
        resume_point: state from which unfinished work starts again: an accumulation window, a validation, or the end of
            an epoch; None between two steps. Checkpoints contain this state in place of the present one.
        epoch_end: state at which the publication of an epoch's values began; None outside of it.
        stage: part of the epoch that comes next.
        meeting: microbatch at which asynchronous ranks meet, while its work is unfinished.
        torn: some weights of an update are new and others old: the batch can't be tried again.
        buffers: copies of the module's buffers at the start of an accumulation window.
        metric_objects: torchmetrics objects of the module, found once in an epoch.
    """

    def __init__(
        self,
        trainer: Trainer,
        members: Membership | None = None,
        slot: Slot | None = None,
        memory: MemoryCheckpointer | None = None,
    ) -> None:
        self._trainer = trainer
        self.members, self.slot, self.memory = members, slot, memory
        self.resume_point: RankState | None = None
        self.epoch_end: RankState | None = None
        self.stage = Stage.BETWEEN
        self.meeting: Microbatch | None = None
        self.torn = False
        self.buffers: BufferCopies | None = None
        self.metric_objects: dict[str, Any] | None = None
        self._epoch_start: RankState | None = None  # before the hooks that begin the epoch
        self._recorded_ahead = False  # whether the record of the batch is written before its update

    # -- the run ------------------------------------------------------------------------------------------------

    def restore(self) -> bool:
        """Restore the newest in-memory checkpoint of earlier processes, if any; return whether it was restored."""
        return self.memory is not None and self.members is None and restore_newest(self._trainer)

    def start(self) -> None:
        """Start training with all ranks, or join a running group in the place of a lost rank."""
        take_part(self._trainer)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Suppress an error of the block if a peer was lost; training can then continue from the newest state.

        Raises:
            Exception: the error of the block, if no rank was lost or if recovery in place is impossible.
        """
        try:
            yield
        except Exception as error:
            trainer = self._trainer
            trainer.in_step = trainer.apart = False
            trainer.idle_ranks = 0
            recover(trainer, error)

    def wait_for_all(self) -> None:
        """Wait until all ranks have finished, because recovery of a peer may need this rank's state."""
        if self.members is not None or self.memory is not None:
            self._trainer.world.barrier()

    def leave(self) -> None:
        """Notify the supervisor that recovery in place is impossible from now on."""
        membership().send("outside")

    @property
    def outdated(self) -> bool:
        """Return whether a rank has departed from this rank's group, or waits to join it."""
        return self.members is not None and self.members.outdated(self._trainer.world.generation)

    def check_members(self) -> None:
        """End this rank's part in its group, by an error, if the group is outdated."""
        if self.members is not None:
            self.members.stay(self._trainer.world.generation)

    def forget_copies(self) -> None:
        """Make sure that no rank returns to an in-memory checkpoint; every rank calls it."""
        if self.memory is not None:
            self.memory.forget()

    # -- an epoch -----------------------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """Keep the state before the hooks that begin an epoch, which run again if its first batch is tried again."""
        trainer = self._trainer
        self._epoch_start = None
        if trainer.strategy.dealer is not None:
            self.buffers = None
            return
        self.buffers = BufferCopies(trainer.module, self.buffers)
        self._epoch_start = RankState(trainer, self.buffers.take())
        if not trainer.state.batch:
            self.resume_point = self._epoch_start

    def begin_batches(self, *, saved_within: bool) -> None:
        """Keep and record the state before the first batch of an epoch.

        Args:
            saved_within: checkpoints may be written between the start and the end of a global batch.
        """
        trainer = self._trainer
        if self.members is None and not saved_within:  # no batch starts again
            self.buffers = None
        self.metric_objects = metric_objects(trainer.module) if self.slot is not None else None
        if self.buffers is not None:
            batch_start = RankState(trainer, self.buffers.take()) if trainer.state.batch else self._epoch_start
            self.resume_point = batch_start
            self.record(batch_start)

    def reach(self, stage: Stage) -> None:
        """Record that the next part of the epoch begins.

        Args:
            stage: the next part.
        """
        self.stage = stage
        if stage is Stage.EPOCH_TOLD:
            self.epoch_end = None
        self.record()

    def before_publishing(self) -> None:
        """Keep the sums of an epoch, because their reduction may finish on some ranks and fail on other ranks."""
        if self.slot is not None:
            self.epoch_end = RankState(self._trainer)

    def after_publishing(self) -> None:
        """Record that the epoch's values are published and its sums reset, before a peer relies on it."""
        if self.slot is None:
            return
        trainer = self._trainer
        key = progress(trainer)
        key = (*key[:5], int(Stage.EPOCH_TOLD), key[6], trainer.state.drained, *key[8:])
        self.slot.write(key, {**record_of(trainer, RankState(trainer)), **NO_SUMS})

    def after_validation_steps(self) -> None:
        """Record that a validation is computed, before a peer relies on it: its steps may draw random numbers."""
        if self.slot is not None:
            key = progress(self._trainer)
            self._write((*key[:6], self.stage > Stage.BATCH_TOLD, *key[7:]), None)

    # -- a step -------------------------------------------------------------------------------------------------

    def before_backward(self, batch: Microbatch) -> None:
        """Record a batch before its gradients are sent, because peers may then complete it without this rank.

        On an accelerator the record is written before the update, because a record now would wait for logged values.

        Args:
            batch: that is trained.
        """
        if self.slot is None or not batch.closes or self._trainer.world.device.type != "cpu":
            return
        self._record_batch(batch)
        hooks = self._trainer.hooks
        self._recorded_ahead = not (hooks.on_after_backward or self._hooks_before_update() or self._step_is_own())

    def settle(self) -> None:
        """Wait for the collectives of this step, so that the weights are not updated from an aborted collective."""
        if self.slot is not None:
            self._trainer.world.settle()

    def before_update(self, batch: Microbatch) -> None:
        """Record a batch of which only the update is missing, unless that was done before its backward.

        Hooks since the backward may have logged, or drawn random numbers, which only this rank has. No rank updates
        before all have written their records: a rank that dies in such a hook could not be replaced exactly.

        Args:
            batch: that is trained.
        """
        if self.slot is not None and not self._recorded_ahead:
            self._record_batch(batch)
            if self._trainer.hooks.on_after_backward or self._hooks_before_update():
                self._trainer.world.barrier()
            self._recorded_ahead = not self._step_is_own()
        self.torn = self._trainer.strategy.dealer is None  # otherwise servers make the update

    def begin_update(self) -> None:
        """Wait for the collectives of this step; its weights change from now on."""
        self.settle()
        self.torn = self._trainer.strategy.dealer is None

    def after_own_update(self, batch: Microbatch) -> None:
        """Record a batch that the module or a closure has applied; no rank counts it before all ranks have recorded it.

        Args:
            batch: that was trained.
        """
        if self.slot is None:
            return
        self._trainer.world.settle()
        self._record_batch(batch)
        self._trainer.world.barrier()
        self._recorded_ahead = True

    def after_batch(self) -> None:
        """Record that the position in the data is after this batch."""
        self.resume_point, self.torn, self.stage = None, False, Stage.BATCH_TOLD
        if self.slot is not None and not self._recorded_ahead:
            self._write(progress(self._trainer), None)
        self._recorded_ahead = False

    def after_step(self) -> None:
        """Keep and record the state between two steps: hooks may have logged, or drawn random numbers."""
        if self.members is not None:
            self.members.stay(self._trainer.world.generation)
        if self.memory is not None:
            self.memory.after_step(self._trainer)
        if self.buffers is not None:
            self.resume_point = RankState(self._trainer, self.buffers.take(), self.metric_objects)
            self.record(self.resume_point)

    # -- records ------------------------------------------------------------------------------------------------

    def record(self, point: RankState | None = None) -> None:
        """Write this rank's progress and state to memory that outlives the process.

        Args:
            point: state to write; None for the present state.
        """
        if self.slot is not None:
            self._write(progress(self._trainer), point)

    def _record_batch(self, batch: Microbatch) -> None:
        """Write a batch that the other ranks may count before this rank does."""
        trainer = self._trainer
        position = (trainer.state.epoch, batch.index + 1, batch.position)
        self._write(
            (*position, False, False, int(Stage.BATCH_TOLD), False, False, trainer.world.generation), None
        )  # fmt: skip

    def _write(self, key: tuple[Any, ...], point: RankState | None) -> None:
        assert self.slot is not None
        trainer = self._trainer
        self.slot.write(key, record_of(trainer, point or RankState(trainer, objects=self.metric_objects)))

    def _hooks_before_update(self) -> bool:
        trainer = self._trainer
        return bool(trainer.hooks.on_before_optimizer_step) or trainer.overridden.configure_gradient_clipping

    def _step_is_own(self) -> bool:
        return self._trainer.overridden.optimizer_step or self._trainer.closures


def set_up(trainer: Trainer) -> FaultTolerance:
    """Return the fault tolerance of a run, as far as the supervisor and the strategy support it.

    If replicas of the weights exist and lost workers are replaced, records of progress suffice. For unreplicated state,
    or if all processes are restarted, in-memory checkpoints are needed.

    Args:
        trainer: its world and its strategy are set up.
    """
    member, strategy = membership(), trainer.strategy
    members = member if member.changes else None
    if strategy.dealer is not None:  # servers have the state
        return FaultTolerance(trainer, members)
    if member.folder and not (members is not None and strategy.traits.alike):
        every = next((c.copy_every_n_steps for c in trainer.callbacks if c.copy_every_n_steps), None)
        return FaultTolerance(trainer, members, memory=MemoryCheckpointer(trainer.world, strategy.replicas_of, every))
    return FaultTolerance(trainer, members, Slot(member.folder, member.worker) if members is not None else None)
