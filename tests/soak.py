"""How much of a long test is done: a little in `make test`, all of it in `make soak`."""

from __future__ import annotations

import os
from typing import Final

SOAK: Final = float(os.environ.get("FABRICX_SOAK", "0"))


def rounds(short: int, full: int) -> int:
    """Return how many cases a test tries.

    Args:
        short: cases in `make test`.
        full: cases with FABRICX_SOAK=1; FABRICX_SOAK=n tries n times as many, and never fewer than `short`.
    """
    return max(short, round(full * SOAK))
