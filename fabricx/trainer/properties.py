"""Read-only properties of the Trainer for users and callbacks; none of them communicates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from fabricx.core.logger import Logger
from fabricx.core.state import Phase
from fabricx.errors import NamesChecked
from fabricx.metrics.publish import newest_metrics, shown_in_bar

if TYPE_CHECKING:
    from fabricx.core.callback import Callback
    from fabricx.core.state import RunState
    from fabricx.core.strategy import Strategy
    from fabricx.data import Feed
    from fabricx.distributed.stop_consensus import Agreement
    from fabricx.distributed.world import World
    from fabricx.metrics.publish import Published
    from fabricx.trainer.trainer import Trainer


class TrainerProperties(NamesChecked):
    """Read-only part of the Trainer; `should_stop` can also be set."""

    state: RunState
    world: World
    strategy: Strategy
    published: Published
    loggers: list[Logger]
    callbacks: list[Callback]
    agreement: Agreement | None
    device_ids: Sequence[int]
    num_nodes: int
    max_epochs: int | None
    max_steps: int
    num_training_batches: int | float
    train_feed: Feed
    accumulate_grad_batches: int
    run_dir: Path | None
    stop_wanted: bool
    fast_dev_run: bool | int

    @property
    def current_epoch(self) -> int:
        """Return the number of completed epochs."""
        return self.state.epoch

    @property
    def global_step(self) -> int:
        """Return the number of weight updates; steps of several optimizers in an update count once."""
        return self.state.step

    @property
    def should_stop(self) -> bool:
        """Return whether a stop was requested on this rank; assign True to request that all ranks stop."""
        return self.stop_wanted

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self.stop_wanted = value
        if value and self.agreement is not None:
            self.agreement.request("should_stop")

    @property
    def is_global_zero(self) -> bool:
        """Return whether this is the main rank."""
        return self.world.rank == 0

    @property
    def global_rank(self) -> int:
        """Return the number of this rank among all ranks."""
        return self.world.rank

    @property
    def local_rank(self) -> int:
        """Return the number of this rank on this machine."""
        return self.world.local_rank

    @property
    def world_size(self) -> int:
        """Return the number of ranks that train."""
        return self.world.size if self.world.size > 1 else len(self.device_ids) * self.num_nodes

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Return the newest value of each logged metric, without communication."""
        return newest_metrics(cast("Trainer", self))

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """Return the metrics that the loggers received last."""
        return dict(self.published.logged)

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Return the values of the progress bar: this rank's newest values. Reading it synchronises with the device."""
        return shown_in_bar(cast("Trainer", self))

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Return the number of steps of a schedule, a step for each global batch; infinity for a run without limit."""
        windows: int | float = float("inf")
        if self.num_training_batches != float("inf"):
            windows = -(-self.num_training_batches // self.accumulate_grad_batches)
            if self.train_feed is not None:  # a rank may compute its part of a global batch in several microbatches
                windows = self.train_feed.global_batches(self.accumulate_grad_batches) or windows
        by_epochs = float("inf") if self.max_epochs in (-1, None) else windows * (self.max_epochs or 0)
        by_steps = float("inf") if self.max_steps == -1 else self.max_steps // self.strategy.updates_per_batch
        limit = min(by_epochs, by_steps)
        return limit if limit == float("inf") else int(limit)

    @property
    def logger(self) -> Logger | None:
        """Return the first logger, or None."""
        return self.loggers[0] if self.loggers else None

    @property
    def writes(self) -> bool:
        """Return whether a fit writes files to its folder."""
        return not self.fast_dev_run and bool(self.loggers or self.checkpoint_callback)

    @property
    def log_dir(self) -> str | None:
        """Return the folder that the first logger writes to, or the run's folder."""
        folder = self.logger.log_dir if self.logger is not None else None
        return str(folder or self.run_dir) if folder or self.run_dir else None

    @property
    def checkpoint_callback(self) -> Any:
        """Return the first callback that writes checkpoints, or None."""
        return next((c for c in self.callbacks if hasattr(c, "best_model_path")), None)

    @property
    def early_stopping_callback(self) -> Any:
        """Return the first callback for early stopping, or None."""
        return next((c for c in self.callbacks if hasattr(c, "stopped_epoch")), None)

    @property
    def sanity_checking(self) -> bool:
        """Return whether the validation batches before training are running."""
        return self.state.phase is Phase.SANITY

    @property
    def training(self) -> bool:
        """Return whether training batches are running."""
        return self.state.phase is Phase.TRAIN

    @property
    def validating(self) -> bool:
        """Return whether a validation is running."""
        return self.state.phase is Phase.VALIDATE

    @property
    def testing(self) -> bool:
        """Return whether a test is running."""
        return self.state.phase is Phase.TEST

    @property
    def predicting(self) -> bool:
        """Return whether a prediction is running."""
        return self.state.phase is Phase.PREDICT
