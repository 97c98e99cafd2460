"""Return freed memory from the C library to the operating system."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any, Final

LARGE: Final = 64 << 20  # bytes of freed weights after which a call pays: 31 ms for 150 MiB, else 0.1 ms


def release_freed_memory() -> bool:
    """Return freed memory to the operating system.

    glibc keeps freed blocks of up to 32 MiB that lie between blocks in use, such as gathered weights on a CPU.

    Returns:
        Whether the C library supports it (glibc does).
    """
    trim = _malloc_trim()
    return trim is not None and trim(0) >= 0


@functools.cache
def _malloc_trim() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
