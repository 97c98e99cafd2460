"""A lock: one run at a time in a folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def only_here(run_dir: Path, word: str = "") -> Iterator[None]:
    """Keep other runs out of a folder; the system lets go when this process ends, however it does.

    Args:
        run_dir: the folder.
        word: what others are to know of this run.

    Raises:
        ValueError: another process trains there.
    """
    try:
        import fcntl
    except ImportError:  # a system without such locks
        yield
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "running"
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            process = (file.read().split() or ["?"])[0]
            raise ValueError(
                f"process {process} is training in {run_dir}: wait for it, or stop it with Ctrl-C"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()} {word}".rstrip())
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def who_is_here(run_dir: Path) -> str | None:
    """Return the number of the process that trains in a folder, and its word; None if there is none."""
    path = run_dir / "running"
    try:
        with only_here(run_dir):
            return None
    except ValueError:
        return path.read_text()
