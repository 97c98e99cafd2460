"""Signs of life: how far this process has come, for whoever watches it from outside."""

from __future__ import annotations

import os
import sys
import threading
from typing import Final

import torch

_TORCH: Final = os.path.dirname(torch.__file__)
_STEPS: Final = [0]


def advance() -> None:
    """Note that the main thread has come a batch further."""
    _STEPS[0] += 1


def set_reached(steps: int) -> None:
    """Count from where others are, whom this process comes to."""
    _STEPS[0] = steps


def reached() -> int:
    """Return how often it has."""
    return _STEPS[0]


def waits() -> bool:
    """Return whether the main thread is in torch at this moment, as one that waits for other ranks is."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH)
