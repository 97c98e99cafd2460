"""Recover a run when processes die, in place or from the newest snapshot, without losing samples."""

from __future__ import annotations

import contextlib
import functools
import shutil
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabricx.core.callback import Callback, RecoveryPolicy
from fabricx.core.strategy_parts import DealsData, HasServers, HidesGradients, KeepsLocalState, as_part
from fabricx.distributed.membership.lost_peers import is_peer_lost
from fabricx.errors import CopiesLost, did_you_mean

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.core.trainer import TrainerProtocol

BadGradients = Literal["raise", "roll_back", "skip"]
_BAD_GRADIENTS = ("raise", "roll_back", "skip")
_SNAPSHOT_FRACTION = 0.01  # largest fraction of the training time that is spent on snapshots
_FIRST_ESTIMATE = 20  # weight updates before the first estimate of the steps that fit into `every_s`


@final
class FaultRecovery(Callback):
    """Recover from the death of workers; enabled by default with more than one rank on this machine.

    In-place recovery (`ddp`, `parameter_server` and asynchronous strategies): the surviving workers keep their weights,
    a replacement joins them, and all repeat the interrupted batch with the same samples and random numbers, so that the
    weights equal those of a run without failures.

    Recovery from in-memory checkpoints (`fsdp`, `local_sgd`, and `parameter_server` if servers step the optimizer or
    gradients are compressed): each rank holds unique state, and copies it every few steps to memory that survives the
    process. After a death, the surviving workers and the replacement roll back to the newest copies, even if all
    workers died.

    On GPUs the same procedures abort NCCL's process groups. For this, ddp waits for the gradients before each update,
    which costs little if steps are long. Collectives have no time-out in this case: a rank without a further batch for
    half an hour is terminated (`stuck_after`). This was not tested on GPUs yet, only with a CPU library that behaves
    like NCCL.

    Recovery from a snapshot (all workers died, or an error occurred): all workers restart from the newest snapshot and
    repeat the training since. Snapshots are checkpoints in the subfolder `recovery` of the run's folder, written during
    training; only the newest is kept, and it is deleted at the end of the run. An error before the first snapshot ends
    the run, and `max_restarts` limits restarts without progress.

    Workers that fabricx started are restarted by fabricx. Under torchrun, `--max-restarts` restarts the script, which
    resumes its run from in-memory checkpoints; these survive when torchrun terminates the processes. With launcher=ray,
    fabricx restarts the ranks of all machines, which continue from in-memory checkpoints in the same way. With several
    machines, the copies of each rank are also stored on a second machine, its buddy, unless a replica (ddp, HSDP) holds
    the same tensors. The replacement of a lost machine receives the state from the buddy or replica (torchrun admits
    nodes later only with `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`). The newest snapshot is used if both machines are
    lost, with parameter servers, and if a machine lacks memory for two copies of the state of its ranks.

    Evaluations (`validate`, `test`, `predict`) do not recover: a failed worker ends them with an error that names it,
    nothing has changed, and the call can be repeated.

    The last line of a recovered run reports the samples and batches that are missing in the weights or were trained
    twice. Samples are counted by gaps and overlaps between the positions of consecutive batches in the data order.
    Global batches are counted by comparing the updates with the data order or, for servers that distribute data to
    asynchronous workers, the distributed batches with those that each server used. Each of these servers also counts
    which samples its updates contain, independently of the positions and batches from which workers recover, and the
    count is compared with the data order. Updates of manual optimization are not counted.

    Epoch values of metrics logged in `training_step` include each sample in the weights once; asynchronous workers send
    these metrics with their gradients. Metrics that a hook logs after a worker's update are lost if that worker dies
    before it sends its next gradient. Also lost are its updates of torchmetrics objects and of running statistics of
    normalisation since the last synchronization of all ranks, and the residuals of its compressed gradients. The last
    line of the run reports this.

    Args:
        max_restarts: consecutive restarts without progress before the run fails.
        snapshots: write snapshots. Without them, a run whose workers all died restarts from its first step, and a run
            that torchrun restarts does so as well; recovery in place and from memory needs no disk. The callback that
            the trainer adds has `snapshots=enable_checkpointing`.
        every_n_train_steps: weight updates between two snapshots; None determines the number from `every_s`. A snapshot
            that is due while the previous snapshot is still being written is skipped. With None, a snapshot of
            local_sgd has the average of the ranks, and each rank continues with its own state, so that the weights do
            not depend on the time of a snapshot; a restart from it continues with the average. With a number, the
            ranks continue with the average, as after every checkpoint, so that a restart is exact, and snapshots are
            never skipped. A snapshot of servers that send weight differences sends the residual: set the number for
            bitwise equal weights in repeated runs.
        every_s: seconds between two snapshots; longer if writing a snapshot needs more than a hundredth of this time.
            Training since the newest snapshot may have to be repeated.
        bad_gradients: action for an update with NaN or infinity in the gradient of any rank. None: no check. "raise":
            end the run, naming the parameters. "roll_back": restart from the newest snapshot. "skip": skip the update
            of all optimizers (refused for parameter_server with mode=bounded, where no rank has the whole gradient).
            All ranks decide together, at the cost of a small collective per step. If servers step the optimizer, a
            partial gradient that could overflow in the sum counts as not finite.
        frozen_after: seconds without a heartbeat after which a process is terminated: the process was stopped, or code
            in it holds the interpreter's lock.
        stuck_after: seconds without a further batch after which a process (for example in an endless loop) and the
            processes that wait for it are terminated; choose more than the duration of a batch, a compilation and a
            checkpoint. "learned": twenty times the longest pause of the run so far, and at least a minute. None: never
            terminate. The activity of each rank is reported after the learned time in any case.
        patience: seconds that surviving workers wait for a replacement. Afterwards they continue without it, with the
            same global batches, and the replacement joins later. A replacement that joins in time continues bitwise
            identically to the worker that it replaces. Workers wait without a limit if the strategy divides the model,
            or if each worker reads its own data (streams, and `use_distributed_sampler=False`).
        min_ranks: fewest ranks that continue without a replacement.
        copy_every_n_steps: weight updates between two in-memory checkpoints, for strategies that need them, under
            torchrun and with launcher=ray; None copies so often that copying needs a hundredth of the time.
        compare_every_n_steps: weight updates between two comparisons of weights that must be equal on all ranks, by a
            checksum; 0 disables them. A difference is an error that names the rank; all restart from the snapshot.

    Raises:
        ValueError: an argument is out of range, or (when training starts) the strategy cannot skip updates, or the
            gradients of a scaled loss (16-mixed) may overflow in ordinary training.
    """

    watches_metrics: ClassVar[bool] = True  # called last, because a snapshot stores the position after the batch
    needs_all_ranks: ClassVar[bool] = True

    def __init__(
        self,
        max_restarts: int = 3,
        every_n_train_steps: int | None = None,
        every_s: float = 60.0,
        bad_gradients: BadGradients | None = None,
        compare_every_n_steps: int = 0,
        frozen_after: float = 30.0,
        stuck_after: float | Literal["learned"] | None = None,
        patience: float = 10.0,
        min_ranks: int = 1,
        copy_every_n_steps: int | None = None,
        snapshots: bool = True,
    ) -> None:
        if max_restarts < 0:
            raise ValueError(f"FaultRecovery(max_restarts={max_restarts}): must be 0 or more")
        if every_n_train_steps is not None and every_n_train_steps < 1:
            raise ValueError(f"FaultRecovery(every_n_train_steps={every_n_train_steps}): must be 1 or more")
        if copy_every_n_steps is not None and copy_every_n_steps < 1:
            raise ValueError(f"FaultRecovery(copy_every_n_steps={copy_every_n_steps}): must be 1 or more")
        if every_s <= 0.0:
            raise ValueError(f"FaultRecovery(every_s={every_s}): must be more than 0 seconds")
        if bad_gradients not in (None, *_BAD_GRADIENTS):
            near = did_you_mean(str(bad_gradients), _BAD_GRADIENTS)
            raise ValueError(
                f"FaultRecovery(bad_gradients={bad_gradients!r}): must be 'raise', 'roll_back', 'skip', or None.{near}"
            )
        if compare_every_n_steps < 0:
            raise ValueError(f"FaultRecovery(compare_every_n_steps={compare_every_n_steps}): must be 0 or more")
        for name, seconds in (("frozen_after", frozen_after), ("stuck_after", stuck_after)):
            if isinstance(seconds, str) and (name, seconds) != ("stuck_after", "learned"):
                raise ValueError(f"FaultRecovery({name}={seconds!r}): must be seconds, or stuck_after='learned'")
            if seconds is not None and not isinstance(seconds, str) and seconds < 1.0:
                raise ValueError(
                    f"FaultRecovery({name}={seconds}): must be 1 or more; processes send two heartbeats per second"
                )
        if patience < 0.0:
            raise ValueError(f"FaultRecovery(patience={patience}): must be 0 seconds or more")
        if min_ranks < 1:
            raise ValueError(f"FaultRecovery(min_ranks={min_ranks}): must be 1 or more")
        self.frozen_after = frozen_after
        self.stuck_after: float | Literal["learned"] | None = stuck_after
        self.patience, self.min_ranks = patience, min_ranks
        self.copy_every_n_steps = copy_every_n_steps
        self.snapshots = snapshots
        self.bad_gradients = bad_gradients
        if bad_gradients is not None:  # overridden only if needed: an unused hook costs nothing
            self.on_before_optimizer_step = self._check_gradients  # type: ignore[method-assign]
        self.compare_every_n_steps = compare_every_n_steps
        self.max_restarts = max_restarts
        self.every_n_train_steps, self.every_s = every_n_train_steps, every_s
        self._step_saved = self._step_compared = -1
        self._next = 0  # the step at which a snapshot is due
        self._write_s = 0.0  # seconds that the newest snapshot needed; measured on the main rank
        self._estimated = False  # whether `_next` is an estimate, rather than the step at which to estimate
        self._estimated_at = (0, 0.0)  # step and time of the last estimate
        self._step_reached = -1  # step of the last restart
        self._restarts = 0  # restarts from that step

    @property
    def recovery_policy(self) -> RecoveryPolicy:
        return RecoveryPolicy(
            self.patience, self.min_ranks, self.max_restarts, self.frozen_after, self.stuck_after,
            self.copy_every_n_steps, self.snapshots,
        )  # fmt: skip

    @property
    def meeting_interval(self) -> int:
        return self.every_n_train_steps or 0

    # -- in the supervisor ----------------------------------------------------------------------------------------

    def restarts_after(self, error: Exception, step: int) -> bool:
        cause = error.__cause__
        died = cause is None or isinstance(cause, CopiesLost) or "DataLoader worker" in str(cause)
        died = died or is_peer_lost(cause) or _lost_fork_server(cause)
        if not died and (step < 0 or (self.bad_gradients == "raise" and isinstance(cause, FloatingPointError))):
            return False
        if step > self._step_reached:
            self._step_reached, self._restarts = step, 0
        self._restarts += 1
        return self._restarts <= self.max_restarts

    # -- in the workers ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if not self.snapshots and not self.compare_every_n_steps:
            return {}
        return {"saved": self._step_saved, "compared": self._step_compared, "next": [self._next, self._estimated]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:  # a run without snapshots saves none
            self._step_saved, self._step_compared = state_dict["saved"], state_dict["compared"]
            self._next, self._estimated = state_dict["next"]

    def on_train_start(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        hidden = as_part(trainer.strategy, HidesGradients).hides_gradients
        if self.bad_gradients == "skip" and hidden and not trainer.strategy.traits.synchronous:
            raise ValueError(
                "FaultRecovery(bad_gradients='skip'): with this strategy no worker sees the whole gradient; "
                "use bad_gradients='roll_back' or 'raise', or parameter_server with mode=sync"
            )
        if self.bad_gradients in ("raise", "roll_back") and trainer.session.precision.scaler is not None:
            raise ValueError(
                f"FaultRecovery(bad_gradients={self.bad_gradients!r}): with precision='16-mixed' the scale of the loss "
                "is raised until gradients overflow, and these updates are skipped: use bad_gradients='skip' or None, "
                "or precision='bf16-mixed'"
            )
        # The first step needs no snapshot: the run can restart from the state that it started with.
        step = self._step_saved = trainer.global_step
        self._estimated_at, self._next, self._estimated = (step, time.monotonic()), step + _FIRST_ESTIMATE, False
        if trainer.failures:
            trainer.session.metrics.loggers.rewind(step)
            text = f"started again from step {step}: {trainer.failures[-1]}"
            seconds = time.time() - trainer.session.failures.newest_at if trainer.session.failures.newest_at else 0.0
            again = max(0, trainer.session.failures.step_reached - step)
            trainer.session.metrics.loggers.event("recovery", text, step, steps_again=again, seconds=seconds)

    def _check_gradients(self, trainer: TrainerProtocol, pl_module: Module, optimizer: Optimizer) -> None:
        optimizers = [optimizer]
        if pl_module.automatic_optimization:  # an update of all optimizers is skipped as a whole
            if optimizer is not trainer.optimizers[0]:
                return
            optimizers = trainer.optimizers
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        parameters = [parameter for group in groups for parameter in group["params"]]
        bad = as_part(trainer.strategy, HidesGradients).nonfinite_gradients(parameters)
        any_bad = torch.tensor([float(bool(bad))], device=trainer.world.device)
        # Otherwise each data rank's update is separate.
        joint = trainer.world if trainer.strategy.traits.synchronous else trainer.world.axis("model")
        joint.all_reduce(any_bad, "max")
        if not bool(any_bad):
            return
        if self.bad_gradients != "skip":
            names = [name for name, parameter in pl_module.named_parameters() if any(parameter is p for p in bad)]
            where = ", ".join(names) or "another rank"
            _forget_copies(trainer)
            raise FloatingPointError(
                f"step {trainer.global_step}: the gradient isn't finite in {where}; check the learning rate, the loss "
                "and the data of this step, or set bad_gradients='skip'"
            )
        trainer.session.metrics.loggers.event("bad gradient", "not finite: the update was skipped", trainer.global_step)
        as_part(trainer.strategy, HidesGradients).drop_gradients(parameters)

    def on_train_batch_end(
        self, trainer: TrainerProtocol, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, every = trainer.global_step, self.compare_every_n_steps
        if every and step % every == 0 and step != self._step_compared:
            _compare(trainer, pl_module)
            self._step_compared = step
        if self._due(trainer) and not self._must_skip(trainer):
            self._save(trainer)

    def on_train_end(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        trainer.finish_checkpoint()
        if trainer.interrupted or trainer.fast_dev_run:
            return
        if trainer.is_global_zero:
            shutil.rmtree(self._folder(trainer), ignore_errors=True)  # including incomplete files of killed processes
        if trainer.failures:
            times = f"{len(trainer.failures)} time{'s' if len(trainer.failures) > 1 else ''}"
            text = f"recovered {times}{_account(trainer, pl_module)}"
            lost = as_part(trainer.strategy, HasServers).lost_with_worker
            if not trainer.strategy.traits.lockstep and trainer.session.fault_tolerance.metric_objects:
                lost = ["updates of torchmetrics objects in an epoch", *lost]
            if lost:
                text += f"; possibly lost with the workers that died: {', '.join(lost)}"
            trainer.session.metrics.loggers.event("recovery", text, trainer.global_step)
            trainer.print(text)

    def _due(self, trainer: TrainerProtocol) -> bool:
        """Return whether a snapshot is due; the result is the same on all ranks."""
        if not self.snapshots:
            return False
        step = trainer.global_step
        if self.every_n_train_steps is not None:
            return step % self.every_n_train_steps == 0
        if step < self._next:
            return False
        began, since = self._estimated_at
        seconds = max(1e-6, time.monotonic() - since)
        steps: int = trainer.world.broadcast_object(max(1, round(self.interval_s * (step - began) / seconds)))
        due, self._estimated = self._estimated, True
        self._estimated_at, self._next = (step, time.monotonic()), step + steps
        return due

    def _must_skip(self, trainer: TrainerProtocol) -> bool:
        """Return whether to skip a snapshot, because training would wait for the previous snapshot's completion.

        Snapshots at user-defined steps are not skipped if they affect the weights.
        """
        required = trainer.strategy.traits.checkpoint_averages and self.every_n_train_steps is not None
        writer = trainer.session.checkpoints.writer
        return writer is not None and not required and writer.busy()

    @property
    def interval_s(self) -> float:
        """Return the seconds between two snapshots, by the writing time of the newest (main rank only)."""
        return max(self.every_s, self._write_s / _SNAPSHOT_FRACTION)

    def _save(self, trainer: TrainerProtocol) -> None:
        step = trainer.global_step
        if step == self._step_saved or trainer.fast_dev_run:
            return
        path = self._folder(trainer) / f"step={step}"
        after = functools.partial(self._complete, path, time.monotonic())
        with self._unchanged(trainer):
            trainer.save_checkpoint(path, wait=False, after=after, single_file=False)
        self._step_saved = step

    def _unchanged(self, trainer: TrainerProtocol) -> AbstractContextManager[None]:
        """Return a context in which a snapshot at a step that depends on time does not change the training."""
        strategy = trainer.strategy
        if not strategy.traits.checkpoint_averages or self.every_n_train_steps is not None:
            return contextlib.nullcontext()
        return as_part(strategy, KeepsLocalState).unchanged(trainer.session.module, trainer.optimizers)

    @staticmethod
    def _folder(trainer: TrainerProtocol) -> Path:
        return Path(trainer.run_dir or trainer.default_root_dir) / "recovery"

    def _complete(self, kept: Path, began: float) -> None:
        """Record the writing time of a snapshot, and delete all older snapshots."""
        from fabricx import checkpoint

        self._write_s = time.monotonic() - began
        for path in checkpoint.list_committed(kept.parent):
            if path != kept.absolute():
                checkpoint.remove(path)


def _account(trainer: TrainerProtocol, module: Module) -> str:
    """Return lost and repeated samples and batches as the end of a sentence; "" if they are not counted."""
    lockstep, state, since = trainer.strategy.traits.lockstep, trainer.state, ""
    if not lockstep and not trainer.session.data.train_feed.exact_position:
        return ""  # each rank reads a stream of its own, whose samples are not leased
    if state.uncounted:
        return ", samples were not counted: each rank reads its own data, and the number of ranks has changed"
    left_out, again, dealer = state.left_out, state.again, as_part(trainer.strategy, DealsData).dealer
    if not lockstep:
        missing, twice = dealer.samples_lost_and_repeated(state.epoch, state.samples)
        left_out, again = max(left_out, missing), max(again, twice)
    counts: list[tuple[int, str, str]] = [(left_out, "sample", "lost"), (again, "sample", "trained twice")]
    if not lockstep:
        lost, repeated, begun = dealer.lost_and_repeated()
        counts += [(lost, "batch", "lost"), (repeated, "batch", "trained twice")]
        since = f" since step {begun}" if begun else ""
    else:
        difference = state.passed - state.trained if module.automatic_optimization else 0
        counts += [(difference, "global batch", "lost"), (-difference, "global batch", "trained twice")]
    phrases = [
        f"{n} {unit}{('es' if unit[-1] == 'h' else 's') if n > 1 else ''} {fate}" for n, unit, fate in counts if n > 0
    ]
    if phrases:
        return f", {', '.join(phrases)}{since}: the weights are not those of a run without failures"
    return f", 0 samples lost{since}" if not lockstep or module.automatic_optimization else ""


def _compare(trainer: TrainerProtocol, module: Module) -> None:
    """Raise an error that names the ranks with weights that differ from the majority's."""
    world = trainer.strategy.step_ranks
    if world.size == 1 or trainer.strategy.traits.joint_steps:
        return
    sums = world.gather_objects(_bits(module.parameters()))
    counts = Counter(sums)
    [(usual, many), *_] = counts.most_common(1)
    if many == world.size:
        return
    different = [rank for rank, checksum in zip(world.members, sums, strict=True) if checksum != usual]
    ranks = f"rank {', '.join(map(str, different))}" if many > world.size / 2 else "all ranks"
    _forget_copies(trainer)
    raise RuntimeError(
        f"step {trainer.global_step}: the weights of {ranks} differ, but must be equal on all ranks; check the memory "
        "of that machine, and code that changes weights on some ranks only"
    )


def _forget_copies(trainer: TrainerProtocol) -> None:
    """Discard in-memory checkpoints, which may contain the error; every rank calls this."""
    trainer.session.fault_tolerance.forget_copies()


def _bits(tensors: Iterable[Tensor]) -> int:
    """Return a checksum of the tensors' bits, which changes with any bit."""
    checksum = 0
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for tensor in tensors:
        raw = tensor.detach().contiguous().view(-1)
        raw = torch.view_as_real(raw).view(-1) if raw.is_complex() else raw
        checksum = (checksum * 1_000_003 + int(raw.view(integers[raw.element_size()]).sum(dtype=torch.int64))) % 2**61
    return checksum


def _lost_fork_server(error: object) -> bool:
    """Return whether the fork server of a worker, which starts data loader processes, was killed."""
    return isinstance(error, EOFError) and str(error) == "unexpected EOF"  # raised by multiprocessing's `read_signed`
