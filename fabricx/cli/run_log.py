"""Python's logging in commands that run a training: handlers of a run, which end with it."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_FILE: Final = "fabricx.log"
_FORMAT: Final = "[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"  # Hydra's


@contextlib.contextmanager
def own_logging() -> Iterator[None]:
    """Close the handlers that Hydra adds to the root logger and to that of fabricx, and restore those of the caller."""
    with contextlib.ExitStack() as stack:
        for logger in (logging.getLogger(), logging.getLogger("fabricx")):
            stack.callback(_restore_logger, logger, list(logger.handlers), logger.level, logger.propagate)
        yield


def _restore_logger(logger: logging.Logger, handlers: list[logging.Handler], level: int, propagate: bool) -> None:
    for handler in [handler for handler in logger.handlers if handler not in handlers]:
        logger.removeHandler(handler)
        handler.close()
    for handler in [handler for handler in handlers if handler not in logger.handlers]:
        logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = propagate


@contextlib.contextmanager
def logging_of_run(run_dir: Path) -> Iterator[None]:
    """Log as Hydra does in a fit: messages from level INFO on to the console and to `fabricx.log`.

    Messages of fabricx are in the file only.

    Args:
        run_dir: the run's folder; lines are appended to its file.
    """
    file, console = logging.FileHandler(run_dir / _FILE, delay=True), logging.StreamHandler(sys.stdout)
    root, library = logging.getLogger(), logging.getLogger("fabricx")
    with own_logging():
        for handler in (file, console):
            handler.setFormatter(logging.Formatter(_FORMAT))
            root.addHandler(handler)
        root.setLevel(logging.INFO)
        library.addHandler(file)
        library.setLevel(logging.INFO)
        library.propagate = False
        yield
