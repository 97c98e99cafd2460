"""Start of processes from a fork server that may be killed, and the cause of an end without a report."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
import torch

from fabricx.launch import worker_process


class Process:
    """A process that starts after some errors."""

    def __init__(self, *errors: Exception, takes_s: float = 0.0) -> None:
        self.errors, self.started, self.takes_s = list(errors), False, takes_s

    def start(self) -> None:
        if self.errors:
            time.sleep(self.takes_s)
            raise self.errors.pop()
        self.started = True


def test_a_process_is_started_after_a_fork_server_has_been_replaced() -> None:
    process: Any = Process(EOFError("unexpected EOF"), BrokenPipeError(), ConnectionRefusedError())
    worker_process.start(process)
    assert process.started


def test_a_fork_server_may_be_killed_after_a_long_time_of_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "FORK_S", 0.01)
    process: Any = Process(EOFError("unexpected EOF"), takes_s=0.05)
    worker_process.start(process)
    assert process.started


def test_a_fork_server_that_never_answers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "FORK_S", 0.0)
    process: Any = Process(*[EOFError("unexpected EOF")] * 100)
    with pytest.raises(EOFError) as error:
        worker_process.start(process)
    assert "the fork server, which starts workers, was killed" in error.value.__notes__[0]


@pytest.mark.parametrize(
    ("code", "reason", "kind", "message"),
    [
        (-signal.SIGKILL, None, "killed", "killed by SIGKILL (was the machine out of memory?)"),
        (-signal.SIGSEGV, None, "death", "killed by SIGSEGV; it left no traceback"),
        (3, None, "death", "ended with exit code 3"),
        (-signal.SIGKILL, "no heartbeat for 60 s", "killed", "no heartbeat for 60 s"),
    ],
)
def test_an_end_without_a_report_has_its_cause(code: int, reason: str | None, kind: str, message: str) -> None:
    failure = worker_process.failure_of_end(1, code, reason)
    assert (failure.rank, failure.kind) == (1, kind)
    assert message in failure.traceback


CRASH = f"""\
Fatal Python error: Aborted

Thread 0x00007f1 (most recent call first):
  File "/home/me/beat.py", line 3 in beat

Thread 0x00007f2 (most recent call first):
  File "{torch.distributed.__file__}", line 166 in all_reduce
  File "/home/me/train.py", line 15 in validation_step

Extension modules: numpy.linalg (total: 1)"""


def test_a_crash_in_a_library_thread_is_reported_with_the_line_of_the_main_thread() -> None:
    crashed = worker_process.failure_of_end(1, -signal.SIGSEGV, None, CRASH)
    assert crashed.traceback == "its process was killed by SIGSEGV at /home/me/train.py:15 in validation_step"
    aborted = worker_process.failure_of_end(1, -signal.SIGABRT, None, CRASH)
    assert "at /home/me/train.py:15 in validation_step, probably by gloo" in aborted.traceback
    alone = worker_process.failure_of_end(1, -signal.SIGABRT, None, CRASH.replace("distributed", "nn"))
    assert "gloo" not in alone.traceback
