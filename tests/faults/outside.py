"""Runs a cell in a process of its own, whose supervisor a fault can hit, and looks at what is left of it.

`python -m tests.faults.outside CELL FOLDER` is that process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from fabricx.launch.run_lock import lock_owner
from tests import warm
from tests.faults.cells import AFTER, Cell

END_S = 90.0  # a run takes a tenth of that
GONE_S = 60.0  # how long processes may take to see that their supervisor is gone
STATUS = {"kill": -signal.SIGKILL, "term": 128 + signal.SIGTERM, "freeze": 0, "int": 0}


def run_outside(cell: Cell, folder: Path) -> list[str]:
    """Run a cell in a session of its own until it ends; returns what is wrong with its end.

    Args:
        cell: of a fault that hits the supervisor.
        folder: of the run.
    """
    (folder / "tmp").mkdir()
    environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "tests.faults.outside", str(cell), str(folder)]
    with (folder / "said").open("w") as said:
        process = warm.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)
    try:
        status = process.wait(END_S)
    except subprocess.TimeoutExpired:
        status = None
    left = _members(process.pid) if status is None else _wait_for_end(process.pid)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    said_last = " ".join((folder / "said").read_text().splitlines()[-8:])[-600:]
    if status is None:
        return [f"the run doesn't end: {said_last}"]
    wrong = [f"process {pid} was left" for pid in left]
    complete = cell.moment in (*AFTER, "on_train_end")  # there is nothing left to stop
    after = cell.fault == "term" and status == 0 and complete
    lost = cell.disk == "failing" and status == 1 and "could not be written" in said_last  # while it stops
    if status != STATUS[cell.fault] and not after and not lost:
        wrong.append(f"exit status {status}, and not {STATUS[cell.fault]}: {said_last}")
    wrong += [f"{path} is locked by a run that has ended" for path in folder.glob("runs/*") if lock_owner(path)]
    if (cell.process, cell.fault) != ("all", "kill"):  # nobody is left to do it: the next run does
        wrong += [f"a folder was left: {path.name}" for path in (folder / "tmp").glob("*")]
    return wrong


def kill_session(session: int) -> None:
    """Kill all processes of a session, in which each rank has a process group of its own, and wait for their end."""
    for number in (signal.SIGSTOP, signal.SIGKILL):  # none goes on while others are killed
        for pid in _members(session):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    left = _wait_for_end(session)
    assert not left, left


def _wait_for_end(session: int) -> list[int]:
    """Wait until no process of a session is left; returns those that are, after a time."""
    deadline = time.monotonic() + GONE_S
    while (left := _members(session)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _members(session: int) -> list[int]:
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(pid) == session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


if __name__ == "__main__":
    from tests.faults.running import fit

    fit(Cell.parse(sys.argv[1]), Path(sys.argv[2]), calm=False)
