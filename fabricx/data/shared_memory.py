"""Explanation of errors when loader processes fill the shared memory, with remedies."""

from __future__ import annotations

import errno
import shutil
from typing import Any, Final

from fabricx.data.preprocess import size_of

SHM: Final = "/dev/shm"
_SIGNS: Final = ("No space left on device", "out of shared memory", "Bus error")
_MIB: Final = 2**20


def note_on(error: BaseException, loader: Any) -> str | None:
    """Explain an error of a full /dev/shm, with sizes and remedies; returns None for any other error.

    Args:
        error: a run's error.
        loader: the loader whose processes send batches through shared memory, if any.
    """
    processes = getattr(loader, "num_workers", 0)
    if not processes or not _is_of_shared_memory(error):
        return None
    try:
        usage = shutil.disk_usage(SHM)
    except OSError:
        return None
    needed = _needed(loader, processes)
    return (
        f"{SHM} is full: {usage.free / _MIB:.3g} MiB of {usage.total / _MIB:.3g} MiB are free. The {processes} loader "
        f"process{'es' if processes > 1 else ''} of each rank {'send' if processes > 1 else 'sends'} batches through it"
        f"{f', which takes about {needed / _MIB:.2g} MiB for each rank' if needed else ''}. Enlarge it (docker run "
        f"--shm-size=..., mount -o remount,size=... {SHM}), remove files that other programs have left in it, or give "
        "the DataLoader a smaller num_workers, prefetch_factor or batch_size; num_workers=0 needs none"
    )


def _is_of_shared_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):  # an error of a semaphore has no file name
        return error.errno == errno.ENOSPC and error.filename in (None, SHM)
    text = str(error)
    return isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS)


def _needed(loader: Any, processes: int) -> int:
    """Return the approximate bytes of batches that wait at a time; 0 if unknown."""
    try:
        batch = size_of(loader.dataset[0]) * (loader.batch_size or 1)
        return int(batch * processes * (loader.prefetch_factor or 2))
    except Exception:  # a stream, or an error in the user's dataset: the sizes are a hint only
        return 0
