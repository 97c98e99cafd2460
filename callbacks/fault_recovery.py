"""Go on when processes die: from the newest snapshot, with nothing of the run lost."""

from __future__ import annotations

import functools
import shutil
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabricx.core.callback import Callback
from fabricx.errors import ServerLost, did_you_mean, lost_a_link

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.trainer.trainer import Trainer

BadGradients = Literal["raise", "roll_back", "skip"]
_BAD_GRADIENTS = ("raise", "roll_back", "skip")
_PART = 0.01  # of the time that may go into snapshots
_FIRST = 20  # weight updates by which it is reckoned how many take `every_s`


@final
class FaultRecovery(Callback):
    """Go on when a worker dies; on by default with more than one rank on this machine.

    With ddp and parameter_server, and where each worker goes at its own pace, those that are left keep their weights;
    another worker takes the dead one's place, and the batch that was interrupted is begun again: with the same samples
    and random numbers, so that the weights are those of a run in which nothing has happened.

    With fsdp and local_sgd, and where servers step or gradients are compressed, each rank holds what no other has, and
    copies that every few steps to memory that outlives it; those that are left, and another worker, go back to the
    newest copies, also when all have died.

    On GPUs the same is done with NCCL's groups, which are aborted. For that ddp waits for the gradients before each
    update, which is little where a step is long. Collectives have no time-out then: a rank that comes no batch further
    for half an hour is ended (`stuck_after`). No GPU has shown this yet: tests of it use a library on CPUs that behaves
    like NCCL.

    When all die at once, and after an error, all workers start again from the newest snapshot, and train again what was
    trained since. Snapshots are checkpoints in the folder `recovery` of the run's folder,
    written while training goes on; only the newest is kept, and none once the run is complete. An error before there
    is one ends the run, and a failure that comes again without any progress isn't tried for ever.

    Where fabricx starts the workers it starts them again; under torchrun that does, with `--max-restarts`, and the
    script goes on with the run that it was training, from copies in memory that torchrun's end of the processes leaves
    as it is. With several machines each rank's copies are on another machine, too, its buddy, or a replica (ddp, HSDP)
    has the same tensors; who comes in the place of a lost machine gets them from there (torchrun lets others in later
    only with `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`). With both lost, and with servers, it is the newest snapshot. So
    it is, too, where a machine hasn't enough memory left for two copies of what its ranks hold.

    The last line of a run that has recovered counts what is missing in the weights and what was trained twice: samples
    between a trained batch's place in the data order and that of the one before, and global batches of the updates
    against those of the data order, or, with servers that deal data to workers at their own pace, the batches that were
    dealt against those that each server has used. The updates of manual optimization are not counted.

    Epoch values of what `training_step` logs are of each sample that is in the weights, once; with workers at their own
    pace they travel with the gradients. What a hook has logged there after a worker's update is lost if that worker
    dies before it brings its next gradient; torchmetrics objects and running statistics of normalisation lack what it
    had added since all ranks met last, and what compression had kept of its gradients is lost. The last line says so.

    Args:
        max_restarts: how often in a row, without getting any further.
        every_n_train_steps: weight updates between two snapshots; None for as many as take `every_s`. One that is due
            while the one before isn't complete is left out. A snapshot of local_sgd joins the ranks, and one of servers
            that send differences brings what those leave out, as each checkpoint does: for weights that are the same to
            the bit in each run, say at which steps; those are kept to.
        every_s: seconds between two snapshots, or more where writing one takes more than a hundredth of that; what was
            trained since the newest may have to be trained again.
        bad_gradients: what becomes of an update whose gradient has NaN or infinity on any rank: None looks at none,
            "raise" ends the run with the names of the parameters, "roll_back" starts again from the newest snapshot,
            "skip" leaves the weights as they are, of all optimizers; parameter_server with mode=bounded, where no rank
            has the whole gradient, refuses that. All ranks decide the same, at the cost of a small collective each
            step. Where servers step, a part of the gradient that could overflow in the sum is not finite, too.
        frozen_after: seconds without a sign of life after which a process is ended: it was stopped, or something in it
            holds the interpreter's lock.
        stuck_after: seconds without a further batch after which a process is ended, such as one in an endless loop, and
            those that wait for it; more than a batch, a compilation or a checkpoint can take. "learned" is twenty times
            the longest pause in this run so far, and a minute at least. None for never; what each rank is at is said
            after that time in any case.
        patience: seconds for which those that are left wait for who takes a dead one's place; then they go on without,
            with the same global batches, and it joins them later. Who comes in time takes over the numbers of the dead
            one to the bit.
        min_ranks: the fewest that go on without.
        copy_every_n_steps: weight updates between two copies in memory, of strategies that need them, and under
            torchrun; None for so many that copies take a hundredth of the time.
        compare_every_n_steps: weight updates between two comparisons of what should be the same weights on all ranks,
            by a sum over their bits; 0 for none. A rank that differs is named, and all begin again from the snapshot.
    """

    watches_metrics: ClassVar[bool] = True  # a snapshot holds the position after the batch
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
    ) -> None:
        if max_restarts < 0:
            raise ValueError(f"FaultRecovery(max_restarts={max_restarts}): 0 or more")
        if every_n_train_steps is not None and every_n_train_steps < 1:
            raise ValueError(f"FaultRecovery(every_n_train_steps={every_n_train_steps}): 1 or more weight updates")
        if copy_every_n_steps is not None and copy_every_n_steps < 1:
            raise ValueError(f"FaultRecovery(copy_every_n_steps={copy_every_n_steps}): 1 or more weight updates")
        if every_s <= 0.0:
            raise ValueError(f"FaultRecovery(every_s={every_s}): more than 0 seconds")
        if bad_gradients not in (None, *_BAD_GRADIENTS):
            near = did_you_mean(str(bad_gradients), _BAD_GRADIENTS)
            raise ValueError(f"FaultRecovery(bad_gradients={bad_gradients!r}): raise, roll_back, skip, or None.{near}")
        if compare_every_n_steps < 0:
            raise ValueError(f"FaultRecovery(compare_every_n_steps={compare_every_n_steps}): 0 or more weight updates")
        for name, seconds in (("frozen_after", frozen_after), ("stuck_after", stuck_after)):
            if isinstance(seconds, str) and (name, seconds) != ("stuck_after", "learned"):
                raise ValueError(f"FaultRecovery({name}={seconds!r}): seconds, or stuck_after='learned'")
            if seconds is not None and not isinstance(seconds, str) and seconds < 1.0:
                raise ValueError(
                    f"FaultRecovery({name}={seconds}): 1 second or more; a sign of life comes twice in one"
                )
        if patience < 0.0:
            raise ValueError(f"FaultRecovery(patience={patience}): 0 seconds or more")
        if min_ranks < 1:
            raise ValueError(f"FaultRecovery(min_ranks={min_ranks}): 1 rank or more")
        self.frozen_after, self.stuck_after = frozen_after, stuck_after
        self.patience, self.min_ranks = patience, min_ranks
        self.copy_every_n_steps = copy_every_n_steps
        self.bad_gradients = bad_gradients
        if bad_gradients is not None:  # a hook that isn't there costs nothing
            self.on_before_optimizer_step = self._look_at_gradients  # type: ignore[method-assign]
        self.compare_every_n_steps = compare_every_n_steps
        self.max_restarts = max_restarts
        self.every_n_train_steps, self.every_s = every_n_train_steps, every_s
        self._step_saved = self._step_compared = -1
        self._next = 0  # the step at which a snapshot is due
        self._took = 0.0  # seconds, the newest snapshot; known to the main rank
        self._measured = False  # is that known, or only when it will be?
        self._looked = (0, 0.0)  # step and time when it was reckoned last
        self._step_reached = -1  # from where it was started again last
        self._tries = 0  # from there

    # -- in the process that supervises ---------------------------------------------------------------------------

    def restarts_after(self, error: Exception, step: int) -> bool:
        cause = error.__cause__
        died = cause is None or isinstance(cause, ServerLost) or "DataLoader worker" in str(cause)
        died = died or lost_a_link(str(cause))
        own = not died
        if own and (step < 0 or (self.bad_gradients == "raise" and isinstance(cause, FloatingPointError))):
            return False
        if step > self._step_reached:
            self._step_reached, self._tries = step, 0
        self._tries += 1
        return self._tries <= self.max_restarts

    # -- in the workers ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"saved": self._step_saved, "compared": self._step_compared, "next": [self._next, self._measured]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._step_saved, self._step_compared = state_dict["saved"], state_dict["compared"]
        self._next, self._measured = state_dict["next"]

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        strategy = trainer.strategy
        if self.bad_gradients == "skip" and strategy.hides_gradients and not strategy.traits.synchronous:
            raise ValueError(
                "FaultRecovery(bad_gradients='skip'): an update is the sum of several workers' gradients here, and "
                "none of them sees all; take bad_gradients='roll_back' or 'raise', or parameter_server with mode=sync"
            )
        step = self._step_saved = trainer.global_step  # it can be begun from there
        self._looked, self._next, self._measured = (step, time.monotonic()), step + _FIRST, False
        if trainer.failures:
            trainer.logger_dispatcher.rewind(step)
            text = f"started again from step {step}: {trainer.failures[-1]}"
            seconds = time.time() - trainer.failed_at if trainer.failed_at else 0.0
            again = max(0, trainer.step_reached - step)
            trainer.logger_dispatcher.event("recovery", text, step, steps_again=again, seconds=seconds)

    def _look_at_gradients(self, trainer: Trainer, module: Module, optimizer: Optimizer) -> None:
        optimizers = [optimizer]
        if module.automatic_optimization:  # one update is of all optimizers, and is skipped as a whole
            if optimizer is not trainer.optimizers[0]:
                return
            optimizers = trainer.optimizers
        parameters = [p for one in optimizers for group in one.param_groups for p in group["params"]]
        bad = trainer.strategy.nonfinite_gradients(parameters)
        found = torch.tensor([float(bool(bad))], device=trainer.world.device)
        if trainer.strategy.traits.synchronous:  # else each rank's update is its own
            trainer.world.all_reduce(found, "max")
        if not bool(found):
            return
        if self.bad_gradients != "skip":
            names = [name for name, parameter in module.named_parameters() if any(parameter is one for one in bad)]
            where = ", ".join(names) or "another rank"
            _forget_copies(trainer)
            raise FloatingPointError(f"step {trainer.global_step}: the gradient isn't finite in {where}")
        trainer.logger_dispatcher.event("bad gradient", "not finite: the update was skipped", trainer.global_step)
        trainer.strategy.drop_gradients(parameters)

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        step, every = trainer.global_step, self.compare_every_n_steps
        if every and step % every == 0 and step != self._step_compared:
            _compare(trainer, module)
            self._step_compared = step
        if self._due(trainer) and not self._waits(trainer):
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        trainer.finish_checkpoint()
        if trainer.interrupted or trainer.fast_dev_run:
            return
        if trainer.is_global_zero:
            shutil.rmtree(self._folder(trainer), ignore_errors=True)  # with what a killed process had begun to write
        if trainer.failures:
            times = f"{len(trainer.failures)} time{'s' if len(trainer.failures) > 1 else ''}"
            text = f"recovered {times}{_account(trainer, module)}"
            lost = trainer.strategy.lost_with_a_worker
            if trainer.strategy.dealer is not None and trainer.metric_objects:
                lost = ["what they had added to torchmetrics objects in an epoch", *lost]
            if lost:
                text += f"; of workers that died may be lost: {', '.join(lost)}"
            trainer.logger_dispatcher.event("recovery", text, trainer.global_step)
            trainer.print(text)

    def _due(self, trainer: Trainer) -> bool:
        """Return whether a snapshot is due; all ranks the same."""
        step = trainer.global_step
        if self.every_n_train_steps is not None:
            return step % self.every_n_train_steps == 0
        if step < self._next:
            return False
        began, since = self._looked
        seconds = max(1e-6, time.monotonic() - since)
        steps: int = trainer.world.broadcast_object(max(1, round(self.interval_s * (step - began) / seconds)))
        due, self._measured = self._measured, True
        self._looked, self._next = (step, time.monotonic()), step + steps
        return due

    def _waits(self, trainer: Trainer) -> bool:
        """Return whether the snapshot before isn't complete, for which training would wait: then this one is left out.

        Unless numbers depend on it, and the user has said at which steps.
        """
        asked = trainer.strategy.traits.joins and self.every_n_train_steps is not None
        if trainer.writer is None or asked:
            return False
        return trainer.writer.busy()

    @property
    def interval_s(self) -> float:
        """Return the seconds between two snapshots, by what the newest has taken; known to the main rank."""
        return max(self.every_s, self._took / _PART)

    def _save(self, trainer: Trainer) -> None:
        step = trainer.global_step
        if step == self._step_saved or trainer.fast_dev_run:
            return
        path = self._folder(trainer) / f"step={step}"
        trainer.save_checkpoint(path, wait=False, after=functools.partial(self._complete, path, time.monotonic()))
        self._step_saved = step

    @staticmethod
    def _folder(trainer: Trainer) -> Path:
        return Path(trainer.run_dir or trainer.default_root_dir) / "recovery"

    def _complete(self, kept: Path, began: float) -> None:
        """Note how long a snapshot has taken, and delete all others."""
        from fabricx import checkpoint

        self._took = time.monotonic() - began
        for path in checkpoint.list_committed(kept.parent):
            if path != kept.absolute():
                checkpoint.remove(path)


def _account(trainer: Trainer, module: Module) -> str:
    """Return what was lost and trained twice, as the end of a sentence; nothing where that is not counted."""
    dealer, state, since = trainer.strategy.dealer, trainer.state, ""
    found: list[tuple[int, str, str]] = [(state.left_out, "sample", "lost"), (state.again, "sample", "trained twice")]
    if dealer is not None:
        lost, repeated, begun = dealer.lost_and_repeated()
        found += [(lost, "batch", "lost"), (repeated, "batch", "trained twice")]
        since = f" since step {begun}" if begun else ""
    else:
        difference = state.passed - state.trained if module.automatic_optimization else 0
        found += [(difference, "global batch", "lost"), (-difference, "global batch", "trained twice")]
    said = [
        f"{n} {unit}{('es' if unit[-1] == 'h' else 's') if n > 1 else ''} {what}" for n, unit, what in found if n > 0
    ]
    if said:
        return f", {', '.join(said)}{since}: the weights are not those of a run without failures"
    return f", 0 samples lost{since}" if dealer is not None or module.automatic_optimization else ""


def _compare(trainer: Trainer, module: Module) -> None:
    """Raise an error that names the ranks whose weights aren't those of most."""
    traits, world = trainer.strategy.traits, trainer.world
    if world.size == 1 or traits.sharded or not traits.synchronous:
        return
    sums = world.gather_objects(_bits(module.parameters()))
    counts = Counter(sums)
    [(usual, many), *_] = counts.most_common(1)
    if many == world.size:
        return
    others = [rank for rank, one in enumerate(sums) if one != usual]
    who = f"rank {', '.join(map(str, others))}" if many > world.size / 2 else "all ranks"
    _forget_copies(trainer)
    raise RuntimeError(f"step {trainer.global_step}: the weights of {who} differ, and should be the same everywhere")


def _forget_copies(trainer: Trainer) -> None:
    """Let nobody go on from what is wrong; all ranks do."""
    if trainer.memory_checkpointer is not None:
        trainer.memory_checkpointer.forget()


def _bits(tensors: Iterable[Tensor]) -> int:
    """Return a number that any changed bit changes."""
    found = 0
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for tensor in tensors:
        raw = tensor.detach().contiguous().view(-1)
        found = (found * 1_000_003 + int(raw.view(integers[raw.element_size()]).sum(dtype=torch.int64))) % 2**61
    return found
