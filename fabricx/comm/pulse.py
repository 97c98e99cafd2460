"""Signs of life: how far this process has come, for whoever watches it from outside."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from typing import Final

import torch

_TORCH: Final = os.path.dirname(torch.__file__)
_OWN: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PYTHON: Final = os.path.dirname(os.__file__)
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


def where() -> str:
    """Return what the main thread is at: the innermost line of the user's own, if it is in any."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame) if frame is not None else []
    others = (_TORCH, _OWN, _PYTHON, "<")
    users = [entry for entry in stack if not entry.filename.startswith(others)]
    if not stack:
        return ""
    at = (users or stack)[-1]
    return f"{at.filename}:{at.lineno} in {at.name}: {at.line}"


def waits() -> bool:
    """Return whether the main thread is in torch at this moment, as one that waits for other ranks is."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH)
