"""Run a cell in a separate process, whose supervisor can be affected by faults, and check for leftovers of the run.

The process runs `python -m tests.faults.outside CELL FOLDER`.
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

END_S = 90.0  # about ten times the duration of a run
ORPHAN_S = 60.0  # limit for processes to notice the end of their supervisor
STATUS = {"kill": -signal.SIGKILL, "term": 128 + signal.SIGTERM, "freeze": 0, "int": 0}


def run_outside(cell: Cell, folder: Path) -> list[str]:
    """Run a cell in a separate session until it ends; return deviations from the expected end.

    Args:
        cell: a cell with a fault of the supervisor.
        folder: folder of the run.
    """
    (folder / "tmp").mkdir()
    environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "tests.faults.outside", str(cell), str(folder)]
    with (folder / "log").open("w") as log:
        process = warm.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        status = process.wait(END_S)
    except subprocess.TimeoutExpired:
        status = None
    left = _members(process.pid) if status is None else _wait_for_end(process.pid)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    last_lines = " ".join((folder / "log").read_text().splitlines()[-8:])[-600:]
    if status is None:
        return [f"the run doesn't end: {last_lines}"]
    wrong = [f"process {pid} remains" for pid in left]
    complete = cell.moment in (*AFTER, "on_train_end")  # nothing remains to be stopped
    after = cell.fault == "term" and status == 0 and complete
    lost = cell.disk == "failing" and status == 1 and "could not be written" in last_lines  # while the run stops
    if status != STATUS[cell.fault] and not after and not lost:
        wrong.append(f"exit status {status}, and not {STATUS[cell.fault]}: {last_lines}")
    wrong += [f"{path} is locked by a run that has ended" for path in folder.glob("runs/*") if lock_owner(path)]
    if (cell.process, cell.fault) != ("all", "kill"):  # otherwise the next run removes them
        wrong += [f"a folder remains: {path.name}" for path in (folder / "tmp").glob("*")]
    return wrong


def kill_session(session: int) -> None:
    """Kill all processes of a session, including all process groups of its ranks, and wait for their end."""
    for number in (signal.SIGSTOP, signal.SIGKILL):  # stop all processes before killing the first
        for pid in _members(session):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    left = _wait_for_end(session)
    assert not left, left


def _wait_for_end(session: int) -> list[int]:
    """Wait until a session has no processes; return those that remain after the time limit."""
    deadline = time.monotonic() + ORPHAN_S
    while (left := _members(session)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _members(session: int) -> list[int]:
    pids = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(pid) == session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                pids.append(pid)
    return pids


if __name__ == "__main__":
    from tests.faults.running import fit

    fit(Cell.parse(sys.argv[1]), Path(sys.argv[2]), undisturbed=False)
