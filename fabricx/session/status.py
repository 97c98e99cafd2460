"""Small records of a run's progress, each with the code that may change it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabricx.distributed.stop_consensus import SIGNALS

if TYPE_CHECKING:
    from fabricx.checkpoint import Writer
    from fabricx.core.strategy_support.held_gradients import HeldGradients, KeptGradients


@dataclass
class StopStatus:
    """Stops that were requested, and that all ranks have agreed on; changed by `Trainer` and `session.schedule`.

    Attributes:
        requested: a stop was requested on this rank.
        reason: reason of this rank's request, and of all ranks once they have agreed.
        agreed: all ranks have agreed to stop.
        interrupted: a signal (Ctrl-C, SIGTERM) has stopped the run.
        terminated: the signal was SIGTERM or the notice of a scheduler.
        boundary: number of steps, and starts and ends of epochs, that the ranks have passed in this run.
    """

    requested: bool = False
    reason: str = ""
    agreed: bool = False
    interrupted: bool = False
    terminated: bool = False
    boundary: int = 0

    def request(self, reason: str) -> None:
        """Record a request of this rank; a signal replaces other reasons.

        Args:
            reason: reason of the request.
        """
        if not self.requested or self.reason not in SIGNALS:
            self.reason = reason
        self.requested = True

    def withdraw(self) -> None:
        """Forget a stop, because all ranks return to a step before it; a signal is received again."""
        self.requested = self.agreed = self.interrupted = self.terminated = False
        self.reason = ""

    def agree(self, reason: str) -> None:
        """Record that all ranks stop at this boundary.

        Args:
            reason: reason of the request.
        """
        self.agreed = self.requested = True
        self.reason = reason
        self.terminated, self.interrupted = reason == "terminated", reason in SIGNALS


@dataclass
class FailureLog:
    """Failures from which the run has recovered; changed by the launcher and by `fault_tolerance`.

    Attributes:
        errors: a line for each failure.
        newest_at: time of the newest failure, in seconds since 1970; 0 if unknown.
        step_reached: weight updates before the newest failure, if no other process has recorded it.
    """

    errors: list[str] = field(default_factory=list)
    newest_at: float = 0.0
    step_reached: int = 0


@dataclass
class BatchStatus:
    """The present training batch; changed by the loop, and by a callback that saves after an error.

    Attributes:
        is_last: the last batch of the epoch, or of an evaluation loader.
        without_update: consecutive batches, or accumulation windows, without a weight update.
        updates: weight updates of the newest batch, or accumulation window, that had any.
        in_step: True within a step: weights, random states or statistics contain a batch that the position in the data
            does not. It stays True after an error in the step, so that checkpoints of `on_exception` have weights only.
        asynchronous: this rank trains at its own pace at present.
        idle_ranks: number of ranks without a sample of this microbatch, which do not run its hooks.
        indices: in a prediction, positions of the batch's samples in the data set; None if the data has no positions.
        index: number of the newest training batch in its epoch; -1 before the first.
        total: number of this batch in the run.
    """

    is_last: bool = False
    without_update: int = 0
    updates: int = 1
    in_step: bool = False
    asynchronous: bool = False
    idle_ranks: int = 0
    indices: list[int] | None = None
    index: int = -1
    total: int = -1

    def abandon_step(self) -> None:
        """Record that the step has failed before its update: the weights are those of the step before."""
        self.in_step = False


@dataclass
class CheckpointStatus:
    """Checkpoints of a run; changed by `session.saving`, `session.checkpoint` and `session.save_points`.

    Attributes:
        ckpt_path: checkpoint that the run loads; None without a checkpoint.
        trusted: objects of any class are read from that checkpoint.
        writer: writes checkpoints in the background; None before the first checkpoint.
        collecting: the content of a checkpoint is being collected.
        saves: position of the newest save, and number of earlier saves there.
        followed: generation, and number of its newest hooks that ranks without a sample have followed.
        loaded: global batch and accumulation of the loaded checkpoint, and accumulation of this run, until they are
            reported.
        delayed_stop: reason of a stop that the loaded checkpoint's run had delayed; "" without.
        key: secret of this run, by which its restart knows objects in its checkpoints.
        trained: `requires_grad` of each parameter, and whether normalisations track statistics, at the end of set-up.
        new_optimizers: the run continues an earlier fit of the Trainer with new optimizers, in which no hook that
            begins an epoch has changed options or added groups.
    """

    ckpt_path: Path | None = None
    trusted: bool = False
    key: bytes = field(default=b"", repr=False)
    writer: Writer | None = None
    collecting: bool = False
    saves: tuple[Any, int] = (None, 0)
    followed: tuple[int, int] = (0, -1)
    loaded: tuple[int, int, int] | None = None
    delayed_stop: str = ""
    trained: dict[str, bool] = field(default_factory=dict)
    new_optimizers: bool = False

    def poll(self) -> None:
        """Raise an error of the background write as soon as it is known; called after each batch.

        Raises:
            CheckpointError: the write has failed, and not because of a full disk.
        """
        if self.writer is not None:
            self.writer.poll()

    def settle(self) -> None:
        """Wait until this rank has written its part of the newest checkpoint; the main rank also completes it."""
        if self.writer is not None:
            self.writer.settle()

    def close(self) -> None:
        """Close the writer."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None


@dataclass
class Overridden:
    """Overridden methods of the module and other properties of a run that change how batches are trained.

    Attributes:
        backward, batch_weight, optimizer_step, optimizer_zero_grad, configure_gradient_clipping, lr_scheduler_step:
            whether the module overrides the method.
        closures: ids of the optimizers that need a closure.
        metrics_each_step: whether a schedule reads a metric after each weight update.
        lazy: the module has parameters whose first forward determines their shape.
    """

    backward: bool = False
    batch_weight: bool = False
    optimizer_step: bool = False
    optimizer_zero_grad: bool = False
    configure_gradient_clipping: bool = False
    lr_scheduler_step: bool = False
    closures: frozenset[int] = frozenset()
    metrics_each_step: bool = False
    lazy: bool = False


@dataclass
class UserSteps:
    """Steps and gradients of the user's code, in manual optimization, `optimizer_step` or `optimizer_zero_grad`.

    Attributes:
        manual_steps: steps of each optimizer (by id) that `training_step` has made itself in the current batch.
        other_update: `training_step` has stepped an optimizer by another of its methods than `step`.
        held: gradients that the module's own steps leave for later batches; None with automatic optimization.
        kept: gradients that the module's `optimizer_zero_grad` keeps; None if it can keep none.
        in_optimizer_step: the module's `optimizer_step` is running.
        own_steps: steps of the optimizer in the present call of the module's `optimizer_step`.
    """

    manual_steps: dict[int, int] = field(default_factory=dict)
    other_update: bool = False
    held: HeldGradients | None = None
    kept: KeptGradients | None = None
    in_optimizer_step: bool = False
    own_steps: int = 0
