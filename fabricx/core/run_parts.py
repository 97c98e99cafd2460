"""Parts of a run that callbacks of fabricx use beside the public attributes of the trainer.

They are contracts of `fabricx.session.session.Session` and of its parts, which callbacks don't import. A callback of
your own needs none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn

    from fabricx.core.logger import Logger
    from fabricx.core.precision import Precision
    from fabricx.core.state import RunState
    from fabricx.distributed.world import World
    from fabricx.telemetry.recorder import NoopRecorder


class RunLoggers(Protocol):
    """The loggers of a run; without effect on ranks that don't write.

    Attributes:
        rewinds: how often rows of later steps were discarded, because the run has returned to an earlier step.
    """

    rewinds: int

    def __bool__(self) -> bool: ...

    def each(self, write: Callable[[Logger], None]) -> None:
        """Call a function with each logger.

        Args:
            write: called with the logger.
        """
        ...

    def measured(self, values: Mapping[str, float], step: int) -> None:
        """Write values that fabricx has measured.

        Args:
            values: by name.
            step: weight updates before.
        """
        ...

    def event(self, name: str, text: str, step: int, **numbers: float) -> None:
        """Write an event, such as a recovery.

        Args:
            name: kind of the event.
            text: line about it.
            step: weight updates before.
            **numbers: numbers about it, by name.
        """
        ...

    def rewind(self, step: int) -> None:
        """Remove the rows after a step, which will be trained again.

        Args:
            step: step of the last row that remains.
        """
        ...


class BatchLog(Protocol):
    """What the present batch has logged.

    Attributes:
        size: samples of the batch; None if it could not be counted yet.
    """

    size: int | None


class LoggedValues(Protocol):
    """The logged values of a run."""

    @property
    def loggers(self) -> RunLoggers:
        """Return the loggers."""
        ...

    @property
    def logbook(self) -> BatchLog:
        """Return the values of the present batch."""
        ...


class TrainFeed(Protocol):
    """Training batches of a rank; `fabricx.data.feed.Feed` describes the attributes."""

    exact_position: bool
    global_batch: int
    ahead: int


class Loaders(Protocol):
    """The loaders of a run."""

    @property
    def train_feed(self) -> TrainFeed:
        """Return the training batches of this rank."""
        ...


class BatchShares(Protocol):
    """Shares of the ranks in each global batch."""

    def change(
        self, epoch: int, position: int, weights: tuple[float, ...], *, turns: bool = False,
        most: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        """Change the shares from a global batch on.

        Args:
            epoch: number of the epoch.
            position: position of the global batch in the order.
            weights, turns, most: see `fabricx.data.order.Shares`.
        """
        ...


class PresentBatch(Protocol):
    """The present batch; `fabricx.session.status.BatchStatus` describes the attributes."""

    in_step: bool
    indices: list[int] | None

    def abandon_step(self) -> None:
        """Record that the step has failed before its update."""
        ...


class Stop(Protocol):
    """Stops that were requested, and that all ranks have agreed on."""

    reason: str


class NewestFailure(Protocol):
    """The newest failure; `fabricx.session.status.FailureLog` describes the attributes."""

    newest_at: float
    step_reached: int


class CheckpointWriter(Protocol):
    """Writes checkpoints in the background."""

    def busy(self) -> bool:
        """Return whether a checkpoint is being written."""
        ...


class SavedCheckpoints(Protocol):
    """Checkpoints of a run."""

    @property
    def writer(self) -> CheckpointWriter | None:
        """Return the writer; None before the first checkpoint."""
        ...

    def settle(self) -> None:
        """Wait until this rank has written its part of the newest checkpoint."""
        ...


class Recovery(Protocol):
    """Records of this rank for its replacement."""

    metric_objects: dict[str, Any] | None

    def forget_copies(self) -> None:
        """Forget in-memory checkpoints, whose weights are no longer those of the run."""
        ...


class RunParts(Protocol):
    """The parts of the present run."""

    state: RunState
    world: World
    precision: Precision
    recorder: NoopRecorder

    @property
    def module(self) -> nn.Module:
        """Return the user's module."""
        ...

    @property
    def metrics(self) -> LoggedValues:
        """Return the logged values."""
        ...

    @property
    def data(self) -> Loaders:
        """Return the loaders."""
        ...

    @property
    def balance(self) -> BatchShares:
        """Return the shares of the ranks."""
        ...

    @property
    def batch(self) -> PresentBatch:
        """Return the present batch."""
        ...

    @property
    def stop(self) -> Stop:
        """Return the requested stop; its reason is that of all ranks once they have agreed."""
        ...

    @property
    def failures(self) -> NewestFailure:
        """Return the newest failure."""
        ...

    @property
    def checkpoints(self) -> SavedCheckpoints:
        """Return the checkpoints."""
        ...

    @property
    def fault_tolerance(self) -> Recovery:
        """Return the records of this rank."""
        ...

    def warn_once(self, subject: str, text: str, category: type[Warning] = UserWarning) -> None:
        """Warn on the main rank, once in a run.

        Args:
            subject: subject of the warning; later warnings with the same subject are omitted.
            text: text of the warning.
            category: class of the warning.
        """
        ...
