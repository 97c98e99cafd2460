"""Lock file that admits a single run at a time to a folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def exclusive_run(run_dir: Path, label: str = "") -> Iterator[None]:
    """Hold the lock of a run's folder; the system releases it at the end of this process, even after SIGKILL.

    Args:
        run_dir: the folder; created if missing.
        label: text that `lock_owner` returns to other processes.

    Raises:
        ValueError: a different process holds the lock.
    """
    try:
        import fcntl
    except ImportError:  # systems without file locks
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
                f"process {process} is training in {run_dir}: wait until it ends, or stop it with Ctrl-C"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()} {label}".rstrip())
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def lock_owner(run_dir: Path) -> str | None:
    """Return the process id and the label of the process that trains in a folder; None if no process does.

    Args:
        run_dir: the folder of a run.
    """
    path = run_dir / "running"
    try:
        with exclusive_run(run_dir):
            return None
    except ValueError:
        return path.read_text()
