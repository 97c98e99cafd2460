"""Progress counter and current activity of this process, for its heartbeats."""

from __future__ import annotations

import contextlib
import gc
import operator
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

import torch

from fabricx.distributed.activity import collective_trace, message_counts
from fabricx.distributed.activity.collective_trace import GroupTrace, TransferTrace

_TORCH: Final = os.path.dirname(torch.__file__)
_OWN: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_PYTHON: Final = os.path.dirname(os.__file__)
_COMMUNICATION: Final = (
    *(os.path.join(_TORCH, name) for name in ("distributed", "nn/parallel", "autograd/graph.py")),
    *(os.path.join(_OWN, name) for name in ("distributed", "model_parallel", "strategies")),
)
_WAITING: Final = (_TORCH, os.path.join(_OWN, "distributed"))
_FILES: Final = os.path.join(_TORCH, "distributed/checkpoint")  # waits for disks
_STEPS: Final = [0]
_JOINED: Final = [0]
_WAITS_FOR: Final = [""]
_NO_TRANSFERS: Final = TransferTrace()
_COLLECTS_IN_CALLS: Final = sys.version_info < (3, 12)  # else only between two instructions of Python


def advance() -> None:
    """Count a batch that the main thread has finished."""
    _STEPS[0] += 1


def set_reached(steps: int) -> None:
    """Set the number of finished batches, when this process joins a run that has already made progress.

    Args:
        steps: batches that the other ranks have finished.
    """
    _STEPS[0] = steps


def reached() -> int:
    """Return the number of finished batches."""
    return _STEPS[0]


def is_users(path: str) -> bool:
    """Return whether a source file belongs to the user: not to Python, torch or fabricx.

    Args:
        path: file name of a stack frame.
    """
    return not path.startswith((_TORCH, _OWN, _PYTHON, "<"))


def where() -> str:
    """Return the current line of the main thread, as `informative_frame` selects it."""
    stack = traceback.extract_stack(_frames().get(threading.main_thread().ident or 0))  # None: of the calling thread
    at = stack[-1 - informative_frame([entry.filename for entry in reversed(stack)])]
    return f"{at.filename}:{at.lineno} in {at.name}: {at.line}"


def informative_frame(files: Sequence[str]) -> int:
    """Return the index of the frame that describes the position of a stack best.

    It is the innermost frame of a program that fabricx calls, else of an installed package, else of fabricx without
    communication, else the innermost frame. Frames that have called fabricx, such as of a script, are not considered.

    Args:
        files: file names of the frames, the innermost first.

    >>> informative_frame([torch.__file__, "train.py", torch.__file__])
    1
    """
    called = [number for number, file in enumerate(files) if file.startswith(_OWN)]
    files = files[: called[-1] + 1] if called else files
    users = [number for number, file in enumerate(files) if is_users(file)]
    program = [number for number in users if "site-packages" not in files[number]]
    own = [number for number, file in enumerate(files) if file.startswith(_OWN) and not file.startswith(_COMMUNICATION)]
    return next(iter(program or users or own), 0)


def _frames() -> dict[int, FrameType]:
    """Return the current frame of each thread except the calling thread.

    The caller's frame would refer to itself through the result. This cycle would keep the variables of all frames,
    such as batches and loader iterators, until the next garbage collection.

    A garbage collection within `sys._current_frames` may release the interpreter's lock, and then blocks the process
    for ever if another thread starts at that moment (python/cpython#106883). Therefore collection is off meanwhile.
    No other thread runs during the three calls, because `map` executes no instruction of Python between them.
    """
    frames: dict[int, FrameType]
    if _COLLECTS_IN_CALLS and gc.isenabled():
        calls: list[Callable[[], Any]] = [gc.disable, sys._current_frames, gc.enable]
        _, frames, _ = map(operator.call, calls)
    else:
        frames = sys._current_frames()
    del frames[threading.get_ident()]
    return frames


def waits() -> bool:
    """Return whether the main thread waits for other processes: for an event, or in torch as in a collective."""
    if _WAITS_FOR[0]:
        return True
    frame = _frames().get(threading.main_thread().ident or 0)
    return frame is not None and frame.f_code.co_filename.startswith(_WAITING)


def communicates() -> bool:
    """Return whether the innermost frame of the main thread is in code that runs collectives, or in a backward."""
    frame = _frames().get(threading.main_thread().ident or 0)
    path = "" if frame is None else frame.f_code.co_filename
    return path.startswith(_COMMUNICATION) and not path.startswith(_FILES)


def awaits() -> bool:
    """Return whether the main thread waits for an event of another process, or runs a collective or a backward."""
    return bool(_WAITS_FOR[0]) or communicates()


def waits_for(event: str) -> None:
    """Set the event that this process is about to wait for, for the report of a hang.

    Args:
        event: such as "receive of microbatch 3 from stage 0"; "" when the wait has ended.
    """
    _WAITS_FOR[0] = event


def joined() -> None:
    """Discard the records of earlier process groups' collectives, since this process has joined a new group."""
    _JOINED[0] = time.time_ns()
    collective_trace.forget_transfers()
    message_counts.forget()


@dataclass(frozen=True)
class Diagnosis:
    """Current activity of a process, for the report of a hang.

    Attributes:
        where: current line of the main thread.
        pending: transfer that the process waits for, else the first collective that was started and is not complete,
            such as "all_reduce #119"; "" if there is none.
        done: last complete collective; "" if there is none.
        stacks: stack traces of all threads.
        groups: collectives and counted messages of each group; those that the main thread waits for are pending.
        transfers: transfers to and from single ranks.
        cpu_s: CPU time that the main thread has used; None if the system does not report it.
    """

    where: str
    pending: str
    done: str
    stacks: str
    groups: tuple[GroupTrace, ...] = ()
    transfers: TransferTrace = _NO_TRANSFERS
    cpu_s: float | None = None


def diagnosis() -> Diagnosis:
    """Collect the current activity of this process."""
    entries = collective_trace.recorded(_JOINED[0])
    pending, done = collective_trace.ends(entries)
    groups = *collective_trace.by_group(entries, waits_outside=bool(_WAITS_FOR[0])), *message_counts.traces()
    return Diagnosis(
        where(), _WAITS_FOR[0] or pending, done, _stacks(), groups, collective_trace.transfers(), cpu_time()
    )  # fmt: skip


def cpu_time() -> float | None:
    """Return the CPU time that the main thread has used, in seconds; None if the system does not report it."""
    ident = threading.main_thread().ident
    if not hasattr(time, "pthread_getcpuclockid") or ident is None:
        return None
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(ident))
    except OSError:  # a program has cloned this process without the C library
        with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/stat") as file:
            user, system = file.read().rpartition(")")[2].split()[11:13]
            return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
        return None


def _stacks() -> str:
    """Return the stack traces of all threads except the calling thread, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(_frames().items(), key=lambda item: item[0] != main)
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames
    )
