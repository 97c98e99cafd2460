"""Loggers with files whose folder is named as by Lightning's loggers: `fabricx.pytorch.loggers` has them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from fabricx.loggers import csv, tensorboard
from fabricx.loggers.files import LoggerFolder, write_hyperparameters

_NAME: Final = "lightning_logs"


class _Named:
    """The name of the subfolder as text. Instances of the second base, such as `Trainer(logger=True)` has, count."""

    _location: LoggerFolder

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        return cls.__bases__[1] in other.__mro__ if _Named in cls.__bases__ else NotImplemented

    @property
    def name(self) -> str:
        return self._location.name or ""

    def _start(self, folder: Path) -> Any:
        if not (file := folder / "hparams.yaml").exists():  # programs pass its path to load_from_checkpoint
            write_hyperparameters(file, {})
        return super()._start(folder)  # type: ignore[misc]


class CSVLogger(_Named, csv.CSVLogger):
    """`fabricx.loggers.CSVLogger` with Lightning's default of `name`.

    Args:
        save_dir: parent folder; None for the run's folder.
        name: subfolder of `save_dir`.
        version, prefix, flush_logs_every_n_steps: see `fabricx.loggers.CSVLogger`.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = _NAME,
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(save_dir, _below(save_dir, name), version, prefix, flush_logs_every_n_steps)


class TensorBoardLogger(_Named, tensorboard.TensorBoardLogger):
    """`fabricx.loggers.TensorBoardLogger` with Lightning's default of `name`.

    Args:
        save_dir: parent folder; None for the run's folder.
        name: subfolder of `save_dir`.
        version, log_graph, default_hp_metric, prefix, sub_dir, kwargs: see `fabricx.loggers.TensorBoardLogger`.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = _NAME,
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        name = _below(save_dir, name)
        super().__init__(save_dir, name, version, log_graph, default_hp_metric, prefix, sub_dir, **kwargs)


def _below(save_dir: str | os.PathLike[str] | None, name: str | None) -> str | None:
    """Return the subfolder; none in the run's folder, unless the name was chosen."""
    return None if save_dir is None and name == _NAME else name
