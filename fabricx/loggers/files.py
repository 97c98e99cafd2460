"""Folders of loggers, and atomic writing of small files."""

from __future__ import annotations

import atexit
import functools
import json
import os
import uuid
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, ParamSpec, Protocol, TypeVar, final

from lightning_utilities.core.rank_zero import rank_zero_only

from fabricx.checkpoint.hyperparameters import plain, plain_containers
from fabricx.core.logger import STATUS, Ending, Logger, Silent
from fabricx.core.rank_zero import launched_rank

UPDATES: Final = "weight_updates"  # name of the weight updates at a row whose step is another number
P = ParamSpec("P")
W = TypeVar("W", bound="Writer")


class Writer(Protocol):
    """Writer of a `FolderLogger`, such as an open file."""

    def flush(self) -> None:
        """Write buffered data to disk."""

    def close(self) -> None:
        """Write buffered data, and close the files."""


@dataclass
class LoggerFolder:
    """The configured folder of a logger; `make` creates it.

    Args:
        save_dir: parent folder; None for the run's folder, with subfolders only for explicit names and versions.
        name: subfolder of `save_dir`.
        version: subfolder of `name`: text, or a number n for "version_n". With a `save_dir` and without a version, the
            next number, so that two runs never share a folder. All runs with the same logger have its folder.
        sub_dir: subfolder below the version.

    Attributes:
        path: the folder; None before it is created.
    """

    save_dir: str | os.PathLike[str] | None = None
    name: str | None = None
    version: int | str | None = None
    sub_dir: str | os.PathLike[str] | None = None
    path: Path | None = field(default=None, init=False)

    def make(self, run_dir: Path | None) -> Path:
        """Create the folder and return its path.

        Args:
            run_dir: the run's folder, or `path`; None with a `save_dir`.
        """
        if run_dir is not None and run_dir == self.path:  # to write after the run
            return run_dir
        root = run_dir if self.save_dir is None else self.save_dir
        assert root is not None
        parent = self._parent(root)
        if self.version is None and self.save_dir is not None:
            self.version = _first_unused(parent)
        self.path = self._below(parent)
        self.path.mkdir(parents=True, exist_ok=True)
        return self.path

    def before_run(self) -> Path | None:
        """Return the folder, and create it if it does not depend on the run; None if it is still undecided.

        Under a launcher it is not created, because all ranks have to choose the same version.
        """
        if self.path is not None or self.save_dir is None:
            return self.path
        if launched_rank() is None:
            return self.make(None)
        parent = self._parent(self.save_dir)
        if self.version is None:
            self.version = _next_version(parent)
        return self._below(parent)

    def _parent(self, root: str | os.PathLike[str]) -> Path:
        return Path(root).expanduser() / (self.name or "")

    def _below(self, parent: Path) -> Path:
        version = f"version_{self.version}" if isinstance(self.version, int) else self.version
        return parent / (version or "") / (self.sub_dir or "")


class FolderLogger(Logger, Generic[W]):
    """A logger that writes to a folder with a writer that has `flush` and `close`.

    Args:
        location: the configured folder.
    """

    def __init__(self, location: LoggerFolder) -> None:
        self._location = location
        self._writer: W | None = None
        self._waiting: dict[str, Any] = {}  # hyperparameters that were logged before the logger was open
        self._outside_run = False  # `experiment` has opened it
        self._status: Ending = "success"  # of the newest run

    @abstractmethod
    def _start(self, folder: Path) -> W:
        """Open the files, which may exist.

        Args:
            folder: the logger's folder.
        """

    def _finish(self, status: Ending) -> None:
        """Write the files of a finished run, after the writer is closed.

        Args:
            status: the run's status.
        """

    @final
    def open(self, run_dir: Path) -> None:
        if self._outside_run:  # perhaps in the folder of another run
            self.close()
        if self._writer is None:
            self._writer = self._start(self._location.make(run_dir))
            # A script may have replaced the method of the object, after it has logged its own hyperparameters.
            if self._waiting:
                type(self).log_hyperparams(self, self._waiting)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def _keep(self, params: Mapping[str, Any], name: str) -> None:
        """Keep hyperparameters until the logger is open; write them now if the folder does not depend on the run.

        Args:
            params: by name.
            name: of the file.
        """
        self._waiting.update(params)
        if self.save_dir is not None and launched_rank() is None and not rank_zero_only.rank:  # type: ignore[attr-defined]
            write_hyperparameters(self._location.make(self._location.path) / name, params)

    @final
    def close(self, status: Ending = "success") -> None:
        if self._writer is not None and not self._outside_run:
            self.finalize(STATUS[status])  # subclasses of Lightning's projects extend it
        self._close(status)  # unless it has

    def _close(self, status: Ending) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        if self._outside_run:
            self._outside_run = False
            atexit.unregister(self.close)
        elif writer is not None:
            self._status = status
            self._finish(status)

    def __getstate__(self) -> dict[str, Any]:
        if self._outside_run:  # the logger of a worker takes its place
            self.close()
        return {**self.__dict__, "_writer": None}

    @property
    def experiment(self) -> Any:
        """Return the writer; outside of a run it is opened in the logger's folder, until the process ends.

        It is `Silent` on ranks that don't log, and before a run whose folder isn't known yet, with a warning.
        """
        if self._writer is None and not rank_zero_only.rank:  # type: ignore[attr-defined]
            folder = self._folder_outside_run("experiment")
            if folder is not None:
                self.open(folder)
                self._outside_run = True
                atexit.register(self.close)
        return self._writer or Silent()

    def _folder_outside_run(self, method: str) -> Path | None:
        """Return the folder; warn and return None if it depends on the run, which hasn't begun.

        Args:
            method: name of the method that writes.
        """
        if self.log_dir is None:
            warnings.warn(
                f"{type(self).__name__}.{method} is used before the run, whose folder is not known yet: nothing is "
                "written. Use it in a hook or after the run, or set save_dir",
                stacklevel=3,
            )
        return None if self.log_dir is None else Path(self.log_dir)

    @property
    def name(self) -> str:
        return self._location.name or type(self).__name__.removesuffix("Logger").lower()

    @property
    def version(self) -> int | str | None:
        if self._location.version is None:
            self._location.before_run()  # chooses it, as for `log_dir`
        return self._location.version

    @property
    def log_dir(self) -> str | None:
        """Return the folder; with a `save_dir` it is created when it is read before a run. None otherwise."""
        path = self._location.before_run()
        return None if path is None else str(path)

    @property
    def root_dir(self) -> str | None:
        """Return the folder of all versions; None for the run's folder."""
        return None if self.save_dir is None else str(Path(self.save_dir) / (self._location.name or ""))

    @property
    def save_dir(self) -> str | None:
        """Return the parent folder; None for the run's folder."""
        folder = self._location.save_dir
        return None if folder is None else str(Path(folder).expanduser())

    def save(self) -> None:
        """Write buffered data, as Lightning's loggers do, and hyperparameters that were logged before a run."""
        undecided = self._writer is not None or self.log_dir is None
        if self._waiting and not undecided and not rank_zero_only.rank:  # type: ignore[attr-defined]
            self.open(Path(str(self.log_dir)))
            self.close(self._status)
        self.flush()

    def after_row(self) -> None:
        if type(self).save is not FolderLogger.save:  # of the user
            self.save()

    def finalize(self, status: str = "success") -> None:
        """Close the logger, as Lightning's loggers do; called at the end of a run.

        Args:
            status: "success", "aborted" or another word.
        """
        endings: dict[str, Ending] = {word: ending for ending, word in STATUS.items()}
        self._close(endings.get(status, "failed"))

    def for_caller(self) -> dict[str, Any]:
        return {"_location": self._location, "_waiting": {}, "_status": self._status}


def of_open_logger(function: Callable[P, None]) -> Callable[P, None]:
    """Let a method of a `FolderLogger` also write before and after a run: open the logger's folder for the call.

    Args:
        function: method that writes.
    """

    @functools.wraps(function)
    def method(*args: P.args, **kwargs: P.kwargs) -> None:
        logger: Any = args[0]
        if logger._writer is not None:
            return function(*args, **kwargs)
        if rank_zero_only.rank:  # type: ignore[attr-defined]
            return None
        folder = logger._folder_outside_run(function.__name__)
        if folder is None:
            return None
        logger.open(folder)
        try:
            return function(*args, **kwargs)
        finally:
            logger.close(logger._status)

    return method


def with_whole_epoch(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as numbers, with the epoch as an int.

    >>> with_whole_epoch({"loss": 1.0, "epoch": 2.0})
    {'loss': 1.0, 'epoch': 2}

    Args:
        metrics: numbers, or tensors and arrays of one element, by name.
    """
    numbers = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
    epoch = numbers.get("epoch", 0.5)
    return {**numbers, "epoch": int(epoch)} if float(epoch).is_integer() else numbers


def with_updates(metrics: Mapping[str, float], updates: int | None) -> Mapping[str, float]:
    """Return the values of a row, with the number of weight updates where the row's step is another number.

    Args:
        metrics: values by name.
        updates: weight updates; None if they are the step.
    """
    return metrics if updates is None else {UPDATES: updates, **metrics}


def _next_version(parent: Path) -> int:
    """Return the number after the last folder version_0, version_1, ...; numbers of deleted folders are not reused."""
    numbers = (folder.name.removeprefix("version_") for folder in parent.glob("version_*"))
    return max((int(number) for number in numbers if number.isdecimal()), default=-1) + 1


def _first_unused(parent: Path) -> int:
    """Create the folder of the next version, after all that exist, and return its number."""
    number = _next_version(parent)
    while True:
        try:
            (parent / f"version_{number}").mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return number


def prefixed(metrics: Mapping[str, float], prefix: str, join: str = "-") -> dict[str, float]:
    """Return metrics with a prefix before each name.

    >>> prefixed({"loss": 1.0}, "train")
    {'train-loss': 1.0}

    Args:
        metrics: metrics by name.
        prefix: "" for none.
        join: between prefix and name.
    """
    return {f"{prefix}{join}{name}": value for name, value in metrics.items()} if prefix else dict(metrics)


def by_name(params: Any) -> dict[str, Any]:
    """Return hyperparameters by name; interpolations of OmegaConf are resolved, as a worker may lack their resolvers.

    Args:
        params: a mapping, a namespace, or None.
    """
    named = dict(params if isinstance(params, Mapping) else vars(params) if params is not None else {})
    return dict(plain_containers(named))


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically.

    Args:
        path: path of the file, which may exist.
        text: new contents.
    """
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
    temporary.write_text(text)
    temporary.replace(path)


def write_hyperparameters(path: Path, params: Mapping[str, Any]) -> None:
    """Add hyperparameters to a file.

    Args:
        path: path of a YAML file, as `load_from_checkpoint(hparams_file=)` reads it, or of a JSON file.
        params: hyperparameters by name; they replace earlier values of the same name.
    """
    import yaml  # type: ignore[import-untyped]

    earlier = (yaml.safe_load(path.read_text()) or {}) if path.exists() else {}
    merged = {**earlier, **plain(params)}
    as_json = path.suffix == ".json"
    text = json.dumps(merged, indent=2) + "\n" if as_json else yaml.safe_dump(merged, sort_keys=False)
    replace_text(path, text)


def truncate_partial_line(path: Path) -> None:
    """Remove an incomplete last line, which a kill or a full disk may cause.

    Args:
        path: path of the file, which may not exist.
    """
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 2**20))  # longer than any row
        tail = file.read()
        file.truncate(size - len(tail) + tail.rfind(b"\n") + 1)
