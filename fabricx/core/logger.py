"""The contract of a logger: a destination of a run's metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Protocol, final, runtime_checkable

from torch import nn

from fabricx.core.rank_zero import set_launched_rank
from fabricx.errors import NamesChecked

set_launched_rank()  # methods of loggers are decorated with `rank_zero_only`, and work without a Trainer

Ending = Literal["success", "failed", "interrupted"]
STATUS: Final[Mapping[Ending, str]] = {"success": "success", "failed": "failed", "interrupted": "aborted"}  # `finalize`


class Silent:
    """Accepts any call and attribute and does nothing; `logger.experiment` on ranks that don't log.

    >>> Silent().add_scalar("loss", 1.0).anything.at_all
    <silent>
    """

    def __getattr__(self, name: str) -> Silent:
        if name.startswith("__"):  # copy and pickle would call any such attribute
            raise AttributeError(name)
        return self

    def __call__(self, *args: object, **kwargs: object) -> Silent:
        return self

    def __getitem__(self, key: object) -> Silent:
        return self

    def __setitem__(self, key: object, value: object) -> None: ...

    def __repr__(self) -> str:
        return "<silent>"


class Logger(NamesChecked, ABC):
    """Writes metrics to a destination; its methods are called on the main rank only.

    A logger is a plain, picklable description until `open`: it is created in the caller's process and used in a worker.

    Attributes:
        updates_of_row: weight updates at the row that `log_metrics` writes, if its step is another number: that of a
            value named "step" of the module, or of an evaluation batch. `rewind` goes by weight updates.
    """

    updates_of_row: int | None = None
    shows_telemetry: ClassVar[bool] = False  # whether TensorBoard shows its folder, with telemetry of all ranks

    @abstractmethod
    def open(self, run_dir: Path) -> None:
        """Create files and connections; a second call does nothing.

        Args:
            run_dir: folder of the run.
        """

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write metrics of a step.

        Args:
            metrics: metrics by name.
            step: weight updates so far.
        """

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        """Write the run's hyperparameters.

        Args:
            params: parameters by name.
            metrics: final metrics; None before the end of the run.
        """

    def log_text(self, name: str, text: str, step: int = 0) -> None:
        """Write a text, such as the configuration.

        Args:
            name: name of the text.
            text: text to write.
            step: weight updates so far.
        """

    def log_graph(self, module: nn.Module, example: object = None) -> None:
        """Write the graph of the model; a fit calls it with the module alone.

        Args:
            module: the model.
            example: input for tracing; None for its `example_input_array`.
        """

    def checkpoints_saved(self, kept: list[str]) -> None:
        """Use the checkpoints of a `ModelCheckpoint`; called when a checkpoint is complete.

        Args:
            kept: paths of the checkpoints that it keeps now.
        """

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Use the checkpoints of a `ModelCheckpoint`, under Lightning's name; called after `checkpoints_saved`.

        Args:
            checkpoint_callback: the callback.
        """

    def rewind(self, step: int) -> None:
        """Delete metrics of later steps, because the run resumes from an earlier step.

        Args:
            step: weight updates from which the run resumes.
        """

    def flush(self) -> None:
        """Write buffered data to disk."""

    def after_row(self) -> None:
        """Do what follows each row; loggers with Lightning's methods save."""

    def close(self, status: Ending = "success") -> None:
        """Finish; the logger can be opened again for another run.

        Args:
            status: the run's status.
        """

    def for_caller(self) -> dict[str, Any]:
        """Return attributes that the logger of the calling process takes over, if a worker has logged."""
        return {}

    @property
    def name(self) -> str:
        """Return a display name."""
        return type(self).__name__

    @property
    def version(self) -> str | int | None:
        """Return an identifier among runs of the same name; None without."""
        return None

    @property
    def log_dir(self) -> str | Path | None:
        """Return the destination folder; None without."""
        return None

    @property
    def experiment(self) -> Any:
        """Return the underlying writer; `Silent` if the logger isn't open."""
        return Silent()


@runtime_checkable
class FourMethods(Protocol):
    """Minimal protocol of a logger of any class; `Logger` has more methods."""

    def open(self, run_dir: Path) -> None:
        """Create files and connections in the run's folder; a second call does nothing.

        Args:
            run_dir: the run's folder.
        """

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write metrics of a step (weight updates so far).

        Args:
            metrics: values by name.
            step: number of weight updates so far.
        """

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write the run's hyperparameters.

        Args:
            params: nested hyperparameters by name.
        """

    def close(self, status: Ending) -> None:
        """Finish; a second call does nothing.

        Args:
            status: ending of the run.
        """


@final
class Adapted(Logger):
    """Adapter of an object with these four methods to `Logger`.

    Args:
        inner: the object.
    """

    def __init__(self, inner: FourMethods) -> None:
        self.inner = inner

    def open(self, run_dir: Path) -> None:
        self.inner.open(run_dir)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.inner.log_metrics(metrics, step)

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        self.inner.log_hyperparams(params)

    def close(self, status: Ending = "success") -> None:
        self.inner.close(status)

    @property
    def name(self) -> str:
        return type(self.inner).__name__

    @property
    def experiment(self) -> Any:
        """Return the adapted object."""
        return self.inner


@final
class DummyLogger(Logger):
    """Takes the place of the loggers under `fast_dev_run`: writes nothing, and accepts any call."""

    def open(self, run_dir: Path) -> None: ...

    def log_metrics(self, *args: Any, **kwargs: Any) -> None: ...

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    def __getattr__(self, name: str) -> Any:
        return getattr(Silent(), name)
