"""Starting a process while the fork server has just been killed."""

from __future__ import annotations

import time
from typing import Any

import pytest

from fabricx.launch import supervisor


class Process:
    """A process that starts after some errors."""

    def __init__(self, *errors: Exception, takes_s: float = 0.0) -> None:
        self.errors, self.started, self.takes_s = list(errors), False, takes_s

    def start(self) -> None:
        if self.errors:
            time.sleep(self.takes_s)
            raise self.errors.pop()
        self.started = True


def test_a_process_is_started_once_another_fork_server_is_there() -> None:
    process: Any = Process(EOFError("unexpected EOF"), BrokenPipeError(), ConnectionRefusedError())
    supervisor._start(process)
    assert process.started


def test_a_fork_server_may_be_killed_after_a_long_time_of_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FORK_S", 0.01)
    process: Any = Process(EOFError("unexpected EOF"), takes_s=0.05)
    supervisor._start(process)
    assert process.started


def test_a_fork_server_that_never_answers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FORK_S", 0.0)
    process: Any = Process(*[EOFError("unexpected EOF")] * 100)
    with pytest.raises(EOFError) as error:
        supervisor._start(process)
    assert "the fork server, which starts workers, was killed" in error.value.__notes__[0]
