"""The trainer as modules, callbacks and data modules see it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fabricx.core.checkpoint_io import TorchCheckpointIO
    from fabricx.core.logger import Logger
    from fabricx.core.optimizers import OptimizerHandle, Schedule
    from fabricx.core.run_parts import RunParts
    from fabricx.core.state import RunState
    from fabricx.core.strategy import Strategy
    from fabricx.distributed.world import World


class TrainerProtocol(Protocol):
    """Attributes and methods of the trainer that hooks may use; `fabricx.Trainer` documents them and has more."""

    strategy: Strategy
    checkpoint_io: TorchCheckpointIO | None
    callbacks: list[Any]  # of Callback, whose hooks receive this protocol
    configuration: dict[str, Any] | None
    device_ids: list[int]
    num_nodes: int
    fast_dev_run: bool | int
    default_root_dir: str
    max_epochs: int | None
    accumulate_grad_batches: int
    val_check_interval: Any
    check_val_every_n_epoch: int | None
    num_sanity_val_steps: int | float
    log_every_n_steps: int
    sync_batchnorm: bool
    gradient_clip_val: float | None
    gradient_clip_algorithm: str | None
    enable_telemetry: bool

    @property
    def session(self) -> RunParts:
        """Return the parts of the present run, for callbacks of fabricx."""
        ...

    @property
    def state(self) -> RunState:
        """Return the position of the run."""
        ...

    @property
    def run_dir(self) -> Path | None:
        """Return the folder of the run."""
        ...

    @property
    def world(self) -> World:
        """Return the ranks."""
        ...

    @property
    def should_stop(self) -> bool:
        """Return whether a stop was requested; assign True to request that all ranks stop."""
        ...

    @should_stop.setter
    def should_stop(self, value: bool) -> None: ...

    @property
    def current_epoch(self) -> int:
        """Return the number of completed epochs."""
        ...

    @property
    def global_step(self) -> int:
        """Return the number of weight updates."""
        ...

    @property
    def is_global_zero(self) -> bool:
        """Return whether this is the main rank."""
        ...

    @property
    def global_rank(self) -> int:
        """Return the number of this rank among all ranks."""
        ...

    @property
    def local_rank(self) -> int:
        """Return the number of this rank on this machine."""
        ...

    @property
    def loggers(self) -> list[Logger]:
        """Return the loggers."""
        ...

    @property
    def logger(self) -> Logger | None:
        """Return the first logger, or None."""
        ...

    @property
    def writes(self) -> bool:
        """Return whether a fit writes files to its folder."""
        ...

    @property
    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers of the module."""
        ...

    @property
    def optimizer_handles(self) -> list[OptimizerHandle]:
        """Return the handles of the optimizers, whose steps run through the strategy."""
        ...

    @property
    def lr_schedulers(self) -> list[Schedule]:
        """Return the learning rate schedules of the module."""
        ...

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Return the number of steps of a schedule; infinity for a run without limit."""
        ...

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Return the newest value of each logged metric."""
        ...

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Return the values of the progress bar."""
        ...

    @property
    def num_training_batches(self) -> int | float:
        """Return the number of batches per epoch; infinity if unknown."""
        ...

    @property
    def num_val_batches(self) -> list[int | float]:
        """Return the number of batches of each validation loader."""
        ...

    @property
    def num_test_batches(self) -> list[int | float]:
        """Return the number of batches of each loader of a test."""
        ...

    @property
    def num_predict_batches(self) -> list[int | float]:
        """Return the number of batches of each loader of a prediction."""
        ...

    @property
    def failures(self) -> list[str]:
        """Return a line for each failure from which the run has recovered."""
        ...

    @property
    def interrupted(self) -> bool:
        """Return whether a signal has stopped the run."""
        ...

    @property
    def sanity_checking(self) -> bool:
        """Return whether the validation batches before training are running."""
        ...

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main rank only.

        Args:
            args, kwargs: arguments of the built-in `print`.
        """
        ...

    def all_gather(self, data: Any, sync_grads: bool = False) -> Any:
        """Gather tensors of all ranks that train different shares of the data.

        Args:
            data: nested tensors, of the same shapes on all ranks.
            sync_grads: gradients flow back to the ranks.

        Returns:
            `data` with tensors of shape [data ranks, ...]; as it is, under a strategy for a single rank.
        """
        ...

    def manual_backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        """Compute gradients in manual optimization.

        Args:
            loss: loss of this rank, shape [].
            args, options: further arguments of `Tensor.backward`.
        """
        ...

    def clip_gradients(self, optimizer: Optimizer, limit: float | None, algorithm: str | None) -> None:
        """Clip the gradients of an optimizer's parameters.

        Args:
            optimizer: optimizer whose gradients are clipped.
            limit: limit of the norm or of each element; None or 0 clips nothing.
            algorithm: "norm" or "value"; None for "norm".
        """
        ...

    def request_stop(self, reason: str) -> None:
        """Request that all ranks stop.

        Args:
            reason: reason that the run prints.
        """
        ...

    def finish_checkpoint(self) -> bool:
        """Wait until no checkpoint is being written; all ranks call this at the same point."""
        ...

    def save_checkpoint(
        self, filepath: str | Path, weights_only: bool = False, *, wait: bool = True,
        after: Callable[[], None] | None = None, failed: Callable[[], None] | None = None,
        single_file: bool | None = None,
    ) -> Path:  # fmt: skip
        """Write a checkpoint; all ranks call this at the same point.

        Args:
            filepath: folder or file of the checkpoint.
            weights_only: save the weights, without the state of the run.
            wait: return when the checkpoint is complete.
            after: called on the main rank, in a thread, when the checkpoint is complete.
            failed: called on every rank if the disk was full.
            single_file: write a file for `torch.load` instead of a folder; None for the module's setting.

        Returns:
            the path of the checkpoint.
        """
        ...
