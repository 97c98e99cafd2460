"""Records of a rank in memory that outlives its process, from which other ranks continue when it is lost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from torch import nn

from fabricx.consistency.repeated_hook import GroupOptions
from fabricx.core.callback import Callback
from fabricx.core.datamodule import DataModule
from fabricx.core.hook_calls.hooks import overrides
from fabricx.core.module_hooks import RUN_ATTRIBUTES
from fabricx.core.module_state.buffers import BufferMark
from fabricx.core.module_state.tracked_attributes import TrackedAttributes
from fabricx.core.state import EpochStep
from fabricx.distributed.membership.generations import Membership, WorkerMessage, membership
from fabricx.fault_tolerance.noted_weights import NotedWeights
from fabricx.fault_tolerance.progress import Progress, after_publishing, progress, record_of
from fabricx.fault_tolerance.rank_record import Slot
from fabricx.session.callback_states import by_key
from fabricx.session.fault_tolerance import FaultTolerance
from fabricx.session.rank_state import RankState

if TYPE_CHECKING:
    from fabricx.data import Microbatch
    from fabricx.fault_tolerance.memory_checkpointer import MemoryCheckpointer
    from fabricx.session.session import Session

# Hooks of a callback that run before the weights are updated.
_IN_STEPS: Final = (
    "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"
)  # fmt: skip


class RankRecords(FaultTolerance):
    """Records the state of this rank from which other ranks continue if this rank dies.

    Args:
        session: this rank's session; its world and its strategy are set up.
        members: membership of this rank in a process group whose members may change; None for a fixed group.
        slot: memory for the records of this rank; None if no other rank reads them.
        memory: in-memory checkpoints, for state that only this rank holds; None if they are off.

    Attributes:
        publishing: the values of an epoch are being published.
        end_point: state before the last hooks of the training, or before callbacks that watch metrics; None outside of
            these. Checkpoints of these hooks have the later state, since a run that resumes from them does not repeat
            the hooks.
        judging: `RunState.judging` at the end point.
        options: options of the optimizers at the point from which unfinished work is repeated; empty without a point.
        reached: newest step before the last failure, until a further step is made; infinite without.
        weights: those at the point from which unfinished work is repeated; None if no other rank reads the records.
        torn: some weights of an update are new and others old, or gradients of earlier batches have changed: the batch
            can't be tried again.
    """

    def __init__(
        self,
        session: Session,
        members: Membership | None = None,
        slot: Slot | None = None,
        memory: MemoryCheckpointer | None = None,
    ) -> None:
        attributes = tracked_attributes(session)
        super().__init__(session.module, session.strategy, session.state, session.rank_state, attributes)
        self._session = session
        self.members, self.slot, self.memory = members, slot, memory
        self.publishing = False
        self.end_point: RankState | None = None
        self.judging = False
        self.torn = False
        self.reached = math.inf
        self.weights = None if slot is None else NotedWeights(session.module)
        self.options: list[GroupOptions] = []
        self.repeats_batch_watchers = slot is not None and _has_batch_watchers(session)
        self._before_validation: BufferMark | None = None  # buffers; None if its steps are complete
        self._recorded_ahead = False  # whether the record of the batch is written before its update

    # -- the run ------------------------------------------------------------------------------------------------

    def before_train_end(self) -> None:
        if self.slot is not None:
            buffers = None if self.buffers is None else self.buffers.take()
            self.end_point = self._rank_state(buffers, repeats=True)
            self.record(self.end_point)
            self._note(values=True)

    def wait_for_all(self) -> None:
        if self.members is not None or self.memory is not None:
            self._session.world.barrier()

    def end_recovery(self) -> None:
        membership().send(WorkerMessage.CANNOT_RECOVER)

    @property
    def outdated(self) -> bool:
        return self.members is not None and self.members.outdated(self._session.world.generation)

    def check_members(self) -> None:
        if self.members is not None:
            self.members.stay(self._session.world.generation)

    def forget_copies(self) -> None:
        if self.memory is not None:
            self.memory.forget()

    # -- an epoch -----------------------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        super().begin_epoch()
        if not self._state.batch:
            self._note(values=True)

    def begin_batches(self, *, saved_within: bool) -> None:
        # A batch that is tried again begins with the states of callbacks before it, as that of a resumed run.
        super().begin_batches(saved_within=saved_within or (self._records() and _changes_in_steps(self._session)))
        if self._state.batch:  # the first batch is repeated with the hooks before it
            self._note(values=True)

    @contextmanager
    def in_validation(self) -> Iterator[None]:
        if self.weights is None:
            yield
            return
        self._before_validation = BufferMark(self._module)
        try:
            with self.weights.in_validation():
                yield
        finally:
            if self._before_validation is not None:  # the validation is repeated
                self._before_validation.restore()
            self._before_validation = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        if self.slot is None or (self.resume_point is not None and self.resume_point.of_window):  # repeats the window
            yield
            return
        self.end_point, self.judging = self._rank_state(repeats=True), self._state.judging
        yield
        self.end_point, self.judging = None, False

    def _batches_start_again(self, *, saved_within: bool) -> bool:
        return saved_within or self.members is not None

    def _records(self) -> bool:
        return self.slot is not None

    def reach(self, step: EpochStep) -> None:
        super().reach(step)
        if step is EpochStep.EPOCH_WATCHERS:
            self.publishing = False
            self._forget()
        self.record()

    def before_publishing(self) -> None:
        super().before_publishing()
        self.publishing = self.slot is not None
        self._note(values=True)

    def after_publishing(self) -> None:
        if self.slot is None:
            return
        session = self._session
        key = progress(session)._replace(epoch_step=int(EpochStep.EPOCH_WATCHERS), closing=session.state.drained)
        self.slot.write(key, after_publishing(record_of(session.rank_state(), self.buffers)))

    def after_validation_steps(self) -> None:
        self._before_validation = None
        # A validation within an accumulation window is repeated with it: the record of the window's begin remains.
        if self.slot is not None and not (self.resume_point is not None and self.resume_point.of_window):
            self._write(progress(self._session)._replace(validated=self.epoch_step > EpochStep.BATCH_WATCHERS), None)

    # -- a step -------------------------------------------------------------------------------------------------

    def before_backward(self, batch: Microbatch) -> None:
        """Record a batch before its gradients are sent, because peers may then complete it without this rank.

        On an accelerator the record is written before the update, because a record now would wait for logged values.

        Args:
            batch: batch that is trained.
        """
        if self.slot is None or not batch.closes or self._session.world.device.type != "cpu":
            return
        self._record_batch(batch)
        hooks = self._session.hooks
        self._recorded_ahead = not (hooks.on_after_backward or self._hooks_before_update() or self._step_is_own())

    def settle(self) -> None:
        if self.slot is not None:
            self._session.world.settle()

    def before_update(self, batch: Microbatch) -> None:
        """Record a batch of which only the update is missing, unless that was done before its backward.

        Hooks since the backward may have logged, or drawn random numbers, which only this rank has. No rank updates
        before all have written their records: a rank that dies in such a hook could not be replaced exactly.

        Args:
            batch: batch that is trained.
        """
        if self.weights is not None:
            self.weights.before_update()
        if self.slot is not None and not self._recorded_ahead:
            self._record_batch(batch)
            if self._session.hooks.on_after_backward or self._hooks_before_update():
                self._session.world.barrier()
            self._recorded_ahead = not self._step_is_own()
        self.torn = self._session.strategy.traits.lockstep  # otherwise servers make the update

    def begin_update(self) -> None:
        self.settle()
        self.torn = self._session.strategy.traits.lockstep

    def begin_unrepeatable(self) -> None:
        self.torn = self.slot is not None

    def after_own_update(self, batch: Microbatch) -> None:
        if self.slot is None:
            return
        self._session.world.settle()
        self._record_batch(batch)
        self._session.world.barrier()
        self._recorded_ahead = True

    def after_batch(self) -> None:
        super().after_batch()
        self._forget()
        held = self._session.user_steps.held or self._session.user_steps.kept
        self.torn = self.slot is not None and held is not None and held.may_be_needed  # a replacement lacks these
        if self.slot is not None and not self._recorded_ahead:
            self._write(progress(self._session), None)
        self._recorded_ahead = False

    def after_step(self) -> None:
        if self.members is not None:
            self.members.stay(self._session.world.generation)
            if self._state.step > self.reached:
                self.reached = math.inf
                self.members.send(WorkerMessage.STEP, (self._session.world.generation, self._state.step))
        if self.memory is not None:
            self.memory.after_step(self._session)
        if self.buffers is not None:
            self.resume_point = self._batch_start(self.buffers)
            self.record(self.resume_point)
        self._note(values=False)

    # -- records ------------------------------------------------------------------------------------------------

    def record(self, point: RankState | None = None) -> None:
        if self.slot is not None:
            self._write(progress(self._session), point)

    def _note(self, *, values: bool) -> None:
        """Note weights and options of optimizers: work that is repeated from here starts with these."""
        if self.weights is not None:
            self.weights.note(values=values)
            self.options = list(map(GroupOptions, self._session.optimizers))

    def _forget(self) -> None:
        """Forget weights and options: the work since is not repeated."""
        if self.weights is not None:
            self.weights.forget()
            self.options = []

    def _record_batch(self, batch: Microbatch) -> None:
        """Write a batch that the other ranks may count before this rank does."""
        key = progress(self._session)._replace(
            batch=batch.index + 1, samples=batch.window_end, meeting=False, drained=False,
            epoch_step=int(EpochStep.BATCH_WATCHERS), validated=False, closing=False,
        )  # fmt: skip
        self._write(key, None)

    def _write(self, key: Progress, point: RankState | None) -> None:
        assert self.slot is not None
        session = self._session
        self.slot.write(key, record_of(point or session.rank_state(objects=self.metric_objects), self.buffers))

    def _hooks_before_update(self) -> bool:
        session = self._session
        return bool(session.hooks.on_before_optimizer_step) or session.overridden.configure_gradient_clipping

    def _step_is_own(self) -> bool:
        return self._session.overridden.optimizer_step or bool(self._session.overridden.closures)


def tracked_attributes(session: Session) -> TrackedAttributes:
    """Return the attributes of the module and of callbacks that recovery restores.

    Args:
        session: this rank's session.
    """
    callbacks = _callbacks(session)
    return TrackedAttributes(_modules(session.module) | callbacks, observed=["", *callbacks], ignored=RUN_ATTRIBUTES)


def _changes_in_steps(session: Session) -> bool:
    """Return whether hooks of callbacks with a state, or of the data module, may run within a step."""
    of_data = session.datamodule is not None and overrides(session.datamodule, "state_dict", DataModule)
    return of_data or any(
        overrides(callback, "state_dict", Callback) and any(overrides(callback, hook, Callback) for hook in _IN_STEPS)
        for callback in session.callbacks
    )


def _has_batch_watchers(session: Session) -> bool:
    """Return whether callbacks of users that watch metrics have a state, and a hook at the end of a batch."""
    return any(
        callback.watches_metrics
        and _is_of_user(callback)
        and overrides(callback, "state_dict", Callback)
        and overrides(callback, "on_train_batch_end", Callback)
        for callback in session.callbacks
    )


def _modules(module: nn.Module) -> dict[str, object]:
    return {name: part for name, part in module.named_modules() if _is_of_user(part)}


def _callbacks(session: Session) -> dict[str, object]:
    """Return the callbacks whose attributes are recovered: those with a `state_dict` have their own state."""
    return {
        f"callback {key}": callback
        for key, callback in by_key(session.callbacks).items()
        if _is_of_user(callback) and not overrides(callback, "state_dict", Callback)
    }


def _is_of_user(owner: nn.Module | Callback) -> bool:
    """Return whether a class of the object is from another package; FSDP derives a class of its own."""
    packages = {kind.__module__.partition(".")[0] for kind in type(owner).__mro__}
    return not (packages <= {"fabricx", "torch", "builtins", "abc"} or "torchmetrics" in packages)
