"""Heartbeats: the progress and the current activity of this process."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from typing import Any, Final

import torch

_TORCH: Final = os.path.dirname(torch.__file__)
_OWN: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PYTHON: Final = os.path.dirname(os.__file__)
_STEPS: Final = [0]
_JOINED: Final = [0]


def advance() -> None:
    """Note that the main thread has come a batch further."""
    _STEPS[0] += 1


def set_reached(steps: int) -> None:
    """Count from where others are, whom this process comes to."""
    _STEPS[0] = steps


def reached() -> int:
    """Return how often it has."""
    return _STEPS[0]


def is_users(path: str) -> bool:
    """Return whether a file of code is neither Python's own, nor torch's or fabricx's."""
    return not path.startswith((_TORCH, _OWN, _PYTHON, "<"))


def where() -> str:
    """Return what the main thread is at: the innermost line of the user's own, if it is in any."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame) if frame is not None else []
    users = [entry for entry in stack if is_users(entry.filename)]
    if not stack:
        return ""
    at = (users or stack)[-1]
    return f"{at.filename}:{at.lineno} in {at.name}: {at.line}"


def waits() -> bool:
    """Return whether the main thread is in torch at this moment, as one that waits for other ranks is."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH)


def joined() -> None:
    """Note that this process belongs to another group from now on: what the one before has left doesn't count."""
    _JOINED[0] = time.time_ns()


@dataclass(frozen=True)
class Diagnosis:
    """What a process is at.

    Attributes:
        where: the line of the main thread.
        pending: the first collective that it has begun and that isn't done, such as "all_reduce #119"; "" if none is.
        done: the last one that is.
        stacks: of all threads, as text.
    """

    where: str
    pending: str
    done: str
    stacks: str


def diagnosis() -> Diagnosis:
    """Return what this process is at."""
    pending, done = _collectives()
    return Diagnosis(where(), pending, done, _stacks())


def _collectives() -> tuple[str, str]:
    """Return the first collective that isn't done, and the last that is, from torch's flight recorder."""
    found: list[Any] = []
    with contextlib.suppress(Exception):  # a build without it
        dump = torch._C._distributed_c10d._dump_fr_trace_json()  # type: ignore[attr-defined]
        found = [entry for entry in json.loads(dump)["entries"] if entry["time_created_ns"] >= _JOINED[0]]
    names = [
        (f"{one['profiling_name'].rpartition(':')[2]} #{one['collective_seq_id']}", one["retired"]) for one in found
    ]
    pending = next((name for name, over in names if not over), "")
    return pending, next((name for name, over in reversed(names) if over), "")


def _stacks() -> str:
    """Return the stacks of this process's threads, the main one first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames
        if ident != threading.get_ident()
    )
