"""The contract of a logger: a destination of a run's metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, final, runtime_checkable

from torch import nn

from fabricx.errors import NamesChecked

Ending = Literal["success", "failed", "interrupted"]


class Silent:
    """Takes any call and attribute and does nothing: what `logger.experiment` is on ranks that don't log.

    >>> Silent().add_scalar("loss", 1.0).anything.at_all
    <silent>
    """

    def __getattr__(self, name: str) -> Silent:
        if name.startswith("__"):  # copy and pickle ask for these and take an answer seriously
            raise AttributeError(name)
        return self

    def __call__(self, *args: object, **kwargs: object) -> Silent:
        return self

    def __repr__(self) -> str:
        return "<silent>"


class Logger(NamesChecked, ABC):
    """Writes metrics somewhere. Opened on the main rank only; everywhere else its methods are never called.

    A logger is a plain, picklable description until `open`: it is made in the caller's process and used in a worker.
    """

    shows_telemetry: ClassVar[bool] = False  # is it for TensorBoard, which then shows all ranks beside the metrics?

    @abstractmethod
    def open(self, run_dir: Path) -> None:
        """Make files and connections; `run_dir` is the run's folder. A second call does nothing."""

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write numbers at a step (weight updates so far)."""

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        """Write the run's hyperparameters, with its final metrics once they are known."""

    def log_text(self, name: str, text: str, step: int = 0) -> None:
        """Write a text, such as the configuration."""

    def log_graph(self, module: nn.Module, example: object) -> None:
        """Write the graph of the model, traced with an example input."""

    def rewind(self, step: int) -> None:
        """Forget numbers of later steps, should there be any: a run goes on from here that had come further."""

    def flush(self) -> None:
        """Bring what was written to disk."""

    def close(self, status: Ending = "success") -> None:
        """Finish; the logger can be opened again for another run."""

    @property
    def name(self) -> str:
        """Return a name for people."""
        return type(self).__name__

    @property
    def version(self) -> str | int | None:
        """Return what tells this run from others of the same name."""
        return None

    @property
    def log_dir(self) -> Path | None:
        """Return the folder that is written to, or None where there is none."""
        return None

    @property
    def experiment(self) -> Any:
        """Return the underlying writer; `Silent` where the logger isn't open."""
        return Silent()


@runtime_checkable
class FourMethods(Protocol):
    """What makes an object a logger, whatever its class; a `Logger` can do more."""

    def open(self, run_dir: Path) -> None:
        """Make files and connections; `run_dir` is the run's folder. A second call does nothing."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write numbers at a step (weight updates so far)."""

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write the run's hyperparameters."""

    def close(self, status: Ending) -> None:
        """Finish; a second call does nothing."""


@final
class Adapted(Logger):
    """An object of four methods as a logger."""

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
        """Return the object itself."""
        return self.inner
