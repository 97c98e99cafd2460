"""The error for loader processes that fill the shared memory, with its remedy."""

from __future__ import annotations

import errno
import shutil
from typing import Any, Final

from fabricx.data.preprocess import size_of

PLACE: Final = "/dev/shm"
_SIGNS: Final = ("No space left on device", "out of shared memory", "Bus error")
_MIB: Final = 2**20


def note_on(error: BaseException, loader: Any) -> str | None:
    """Return what an error of a full /dev/shm means, with sizes and remedies; None for any other error.

    Args:
        error: of a run.
        loader: whose processes hand batches over, if it has any.
    """
    processes = getattr(loader, "num_workers", 0)
    if not processes or not _is_of_shared_memory(error):
        return None
    try:
        usage = shutil.disk_usage(PLACE)
    except OSError:
        return None
    needed = _needed(loader, processes)
    return (
        f"{PLACE} is full: {usage.free / _MIB:.3g} MiB of {usage.total / _MIB:.3g} MiB are free. The {processes} "
        f"process{'es' if processes > 1 else ''} of each rank that load data hand batches over by it"
        f"{f', which takes about {needed / _MIB:.2g} MiB for each rank' if needed else ''}. Make it larger (docker run "
        f"--shm-size=..., mount -o remount,size=... {PLACE}), remove what others have left there, or give the "
        "DataLoader a smaller num_workers, prefetch_factor or batch_size; num_workers=0 needs none"
    )


def _is_of_shared_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):  # of a semaphore: it names no file
        return error.errno == errno.ENOSPC and error.filename in (None, PLACE)
    text = str(error)
    return isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS)


def _needed(loader: Any, processes: int) -> int:
    """Return about how many bytes of batches wait at a time; 0 where that isn't known."""
    try:
        batch = size_of(loader.dataset[0]) * (loader.batch_size or 1)
        return int(batch * processes * (loader.prefetch_factor or 2))
    except Exception:  # a stream, or a dataset of the user's that fails here: the sizes are a hint only
        return 0
