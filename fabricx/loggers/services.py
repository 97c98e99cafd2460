"""Common parts of the loggers of tracking services."""

from __future__ import annotations

import importlib
import importlib.util
import os
import secrets
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from fabricx.checkpoint.hyperparameters import plain
from fabricx.core.logger import Ending, Logger, Silent
from fabricx.core.rank_zero import launched_rank
from fabricx.distributed.world import current

LogModel = bool | Literal["all"]


def require(logger: str, module: str, package: str, extra: str) -> None:
    """Check that the client of a service is installed, without importing it.

    Args:
        logger: class that needs it.
        module: name of the client.
        package: its distribution.
        extra: name of the optional dependencies of fabricx that include it.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(f"{logger} needs {package}: pip install 'fabricx[{extra}]', or pip install {package}")


def client(module: str) -> Any:
    """Import the client of a service; only the main rank does.

    Args:
        module: name of the client.
    """
    return importlib.import_module(module)


def new_id(length: int = 8) -> str:
    """Return a random id of a run: workers that replace each other continue the same run of the service.

    Args:
        length: length in characters, an even number.
    """
    return secrets.token_hex(length // 2)


def parameters(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters as plain data.

    Args:
        params: parameters by name.
    """
    data: dict[str, Any] = plain(params)
    return data


class ServiceLogger(Logger):
    """A logger with a run that a service keeps; derived classes start and end it.

    Args:
        run: of the service, to use and not to end; only with a single process.
    """

    def __init__(self, run: Any = None) -> None:
        self._given = self._run = run
        self._run_dir: Path | None = None
        self._sent = False  # to a worker, in which only the main rank opens it

    def __getstate__(self) -> dict[str, Any]:
        if self._run is not None and self._given is None:  # a worker continues it
            self.close()
        return {**self.__dict__, "_run": None, "_given": None, "_sent": True}

    @abstractmethod
    def _start(self, run_dir: Path) -> Any:
        """Start the run of the service, or continue it.

        Args:
            run_dir: folder of the run.
        """

    @abstractmethod
    def _end(self, run: Any, status: Ending) -> None:
        """End the run of the service.

        Args:
            run: result of `_start`.
            status: the run's status.
        """

    def open(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        if self._run is None:
            self._run = self._start(run_dir)

    def close(self, status: Ending = "success") -> None:
        if self._run is not None:
            self._finish(status)
        run, self._run = self._run, self._given
        if run is not None and self._given is None:
            self._end(run, status)

    def _finish(self, status: Ending) -> None:
        """Log the end of a run.

        Args:
            status: the run's status.
        """

    def for_caller(self) -> dict[str, Any]:
        return {"_run_dir": self._run_dir}

    @property
    def experiment(self) -> Any:
        """Return the run of the service; before and after `fit` it is opened for this.

        On ranks that do not log it is `Silent`.
        """
        world = current()
        elsewhere = self._sent or bool(launched_rank()) or (world is not None and not world.main_rank)
        if self._run is None and not elsewhere:
            self.open(self._run_dir or Path.cwd())
        return self._run or Silent()


class Uploads:
    """Checkpoints that a logger uploads: each complete checkpoint, or the kept checkpoints at the end.

    Args:
        log_model: "all", True for the kept checkpoints at the end, or False.
    """

    def __init__(self, log_model: LogModel) -> None:
        self.log_model = log_model
        self.paths: list[str] = []
        self.done: set[tuple[str, float]] = set()  # paths with their times: a name may be used again

    def after_save(self, kept: list[str]) -> list[str]:
        """Return the checkpoints to upload now.

        Args:
            kept: paths of complete checkpoints.
        """
        self.paths = kept
        return self._new() if self.log_model == "all" else []

    def at_end(self) -> list[str]:
        """Return the checkpoints to upload when the run ends."""
        return self._new() if self.log_model else []

    def _new(self) -> list[str]:
        new = {(path, _saved_at(path)): path for path in self.paths}
        new = {saved: path for saved, path in new.items() if saved not in self.done}
        self.done |= new.keys()
        return list(new.values())


def _saved_at(path: str) -> float:
    """Return the time at which a checkpoint was saved; 0 for one that is not on this machine."""
    return os.path.getmtime(path) if os.path.exists(path) else 0.0
