"""Loggers of Lightning as loggers of fabricx."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_only

from fabricx.core.logger import STATUS, Ending, Logger, Silent
from fabricx.lightning.classes import adapted_class, form, lightning_base, local_name


def adapt_logger(logger: Any) -> Any:
    """Make a logger of Lightning a logger of fabricx; other objects are returned as they are.

    It writes to its own folder or service, on the main rank only.

    Args:
        logger: its class is replaced by a class that derives from it.

    Returns:
        the same object.
    """
    cls = type(logger)
    if not isinstance(logger, Logger) and lightning_base(cls, "loggers.Logger") is not None:
        logger.__class__ = logger_class(cls)
    return logger


@form("logger")
def logger_class(cls: type) -> type:
    """Return the class of an adapted logger.

    Args:
        cls: Lightning's, or of the user.
    """
    writer, table = (inspect.getattr_static(cls, name, None) for name in ("experiment", "log_text"))

    def experiment(self: Any) -> Any:
        # Lightning creates the writer on first access, also on ranks that do not log.
        if writer is None or not vars(self).get("_opened"):
            return Silent()
        return writer.__get__(self, type(self))

    def log_text(self: Any, *text: Any, **options: Any) -> None:
        of_user = options or not all(isinstance(part, (str, int)) for part in text)  # a table, for some loggers
        if table is not None and of_user:
            table.__get__(self, type(self))(*text, **options)

    return adapted_class(cls, _Contract, {"experiment": property(experiment), "log_text": log_text})


class _Contract(Logger):
    """Methods of fabricx that loggers of Lightning lack; all other methods are Lightning's."""

    __qualname__ = local_name("_Contract")

    def open(self, run_dir: Path) -> None:
        vars(self)["_opened"] = True

    def flush(self) -> None:
        if vars(self).get("_opened"):
            self.save()

    def after_row(self) -> None:
        self.flush()

    def close(self, status: Ending = "success") -> None:
        if vars(self).get("_opened"):
            self.finalize(STATUS[status])  # reads the writer
            vars(self)["_opened"] = False

    if TYPE_CHECKING:
        save: Any
        finalize: Any


class LightningLogger(Logger):
    """Base class of loggers that users write with Lightning's methods: `log_metrics`, `save`, `finalize`.

    It writes to its own folder or service, on the main rank only.
    """

    def open(self, run_dir: Path) -> None:
        vars(self)["_run_dir"] = run_dir

    def flush(self) -> None:
        self.save()

    def after_row(self) -> None:
        self.save()

    def close(self, status: Ending = "success") -> None:
        self.finalize(STATUS[status])

    def save(self) -> None:
        """Write what is kept."""

    def finalize(self, status: str) -> None:
        """End the log of a run.

        Args:
            status: "success", "failed" or "aborted".
        """
        self.save()

    @property
    def root_dir(self) -> str | None:
        """Return the folder of all runs; None for the run's folder."""
        return None

    @property
    def save_dir(self) -> str | None:
        """Return the folder of all runs; None for the run's folder."""
        return self.root_dir

    @property
    def group_separator(self) -> str:
        """Return the text between the groups of a name."""
        return "/"


def rank_zero_experiment(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a method that returns the writer on the main rank, and an object that does nothing on other ranks.

    Args:
        function: the logger's method `experiment`, under `@property`.
    """

    @functools.wraps(function)
    def experiment(self: Any) -> Any:
        return Silent() if rank_zero_only.rank else function(self)  # type: ignore[attr-defined]

    return experiment
