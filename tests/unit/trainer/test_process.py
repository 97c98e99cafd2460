"""Signals during a job in the user's own process."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import fabricx as fx
from fabricx.launch.supervisor import _Workers
from fabricx.testing import QUIET, TinyModule, tiny_loader
from fabricx.trainer import process


@pytest.fixture
def own_handlers() -> Iterator[list[str]]:
    """Set handlers as a user's program does, and return the names of the signals that they receive."""
    received: list[str] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, lambda number, frame: received.append(signal.Signals(number).name))
    yield received
    for number, handler in before.items():
        signal.signal(number, handler)


class Raises(TinyModule):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            signal.raise_signal(self.number)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_the_programs_own_handler_is_called_before_the_run_stops(
    number: signal.Signals, own_handlers: list[str]
) -> None:
    trainer, handler = fx.Trainer(max_epochs=1, **QUIET), signal.getsignal(number)
    ends = pytest.raises(SystemExit, match="143") if number is signal.SIGTERM else contextlib.nullcontext()
    with ends:
        trainer.fit(Raises(int(number)), tiny_loader())
    assert own_handlers == [number.name]
    assert trainer.interrupted
    assert trainer.global_step == 2
    assert signal.getsignal(number) is handler


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def test_a_stop_is_requested_if_nobody_can_read_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[str] = []
    monkeypatch.setattr(sys, "stderr", Closed())  # such as of a terminal that was closed
    with process.interruptible("fit", requested.append, (signal.SIGTERM,)):
        signal.raise_signal(signal.SIGTERM)
    workers: Any = object.__new__(_Workers)
    workers._stopping, workers._store = (
        False,
        SimpleNamespace(set=lambda key, reason: requested.append(reason.decode())),
    )
    with workers.signals():
        signal.raise_signal(signal.SIGINT)
    assert requested == ["terminated", "interrupted"]


def test_forked_processes_ignore_the_first_signal_and_obey_sigterm() -> None:
    """A signal to all processes of a rank must not use the rank's connections in its data loader processes."""
    requested: list[str] = []
    with process.interruptible("fit", requested.append, (signal.SIGTERM, signal.SIGUSR1)):
        assert ending(signal.SIGUSR1) == 0
        assert ending(signal.SIGTERM) == -signal.SIGTERM
        assert not requested
        os.kill(os.getpid(), signal.SIGUSR1)
        assert requested == ["terminated"]


def ending(number: int) -> int:
    """Return the exit status of a forked process that receives a signal."""
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), number)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
