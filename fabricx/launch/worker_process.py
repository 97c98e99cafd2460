"""Processes of workers: their start from a fork server, their end, and the cause of an end without a report."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from multiprocessing.process import BaseProcess
from typing import Final

from fabricx.fault_tolerance.hang_report import from_dump
from fabricx.launch.worker import Failure
from fabricx.scratch import unlink_semaphores_of

_OTHER_SIZE: Final = (
    ", probably by gloo, which ends a process that receives data of another size than it expects (its message, "
    "'op.preamble.length', is above): ranks were in different collectives, or in the same one with tensors of "
    "different shapes. All ranks have to run the same collectives in the same order, and trainer.world.gather_objects "
    "gathers other shapes; if weights are divided over ranks, each forward contains collectives, so that all ranks "
    "have to call the module"
)
FORK_S: Final = 5.0  # time for the system to report the end of a killed fork server


def start(process: BaseProcess) -> None:
    """Start a process; if the fork server was just killed, retry until a new fork server is started.

    Args:
        process: not started yet.

    Raises:
        EOFError: no fork server answers for `FORK_S`.
        ConnectionError: no fork server answers for `FORK_S`.
    """
    failed = None  # time of the first failure; the attempt may have begun long before, while torch was imported
    while True:
        try:
            process.start()
        except (EOFError, ConnectionError) as error:  # its socket closes before the system reports its end
            failed = time.monotonic() if failed is None else failed
            if time.monotonic() > failed + FORK_S:
                error.add_note(
                    "the fork server, which starts workers, was killed, and no new fork server answered for "
                    f"{FORK_S:.0f} s: it may be killed repeatedly (is the machine out of memory?)"
                )
                raise
            time.sleep(0.01)
        else:
            return


def end_children(process: BaseProcess) -> None:
    """Kill the child processes of a killed process, such as data loader processes, and remove its semaphores.

    Args:
        process: has ended.
    """
    if process.exitcode and process.pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # no such process
            os.killpg(process.pid, signal.SIGKILL)
    unlink_semaphores_of(process)


def failure_of_end(rank: int, code: int | None, reason: str | None, crash: str = "") -> Failure:
    """Return the failure of a process that ended without a report.

    Args:
        rank: number of the process.
        code: its exit code; negative for a signal.
        reason: cause of the end, if the supervisor has ended the process, or the process itself; else None.
        crash: what `faulthandler` has written when a signal ended it; "" without.
    """
    if reason is not None:
        return Failure(rank, time.monotonic(), "killed", reason, None)
    kind = "killed" if code == -signal.SIGKILL else "death"  # killed from outside: other failures are consequences
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = " (was the machine out of memory?)" if name == "SIGKILL" else ""
        position = from_dump(crash)
        at = "; it left no traceback" if position is None else f" at {position.where}"
        text = f"its process was killed by {name}{hint}{at}"
        if position is not None and name == "SIGABRT" and "distributed" in crash:
            text += _OTHER_SIZE
    else:
        text = f"its process ended with exit code {code} and left no traceback (what it printed is above)"
    return Failure(rank, time.monotonic(), kind, text, None)
