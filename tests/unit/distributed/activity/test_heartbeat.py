"""The position of a process, for the report of a hang."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType

import pytest

from fabricx.distributed.activity import heartbeat


@pytest.fixture(autouse=True)
def counted() -> object:
    before = heartbeat.reached()
    yield
    heartbeat.set_reached(before)


def test_finished_batches_are_counted_from_the_position_of_the_run() -> None:
    heartbeat.set_reached(7)
    heartbeat.advance()
    assert heartbeat.reached() == 8


def test_the_line_is_the_innermost_line_of_user_code_in_any_thread() -> None:
    lines: list[str] = []
    thread = threading.Thread(target=lambda: lines.append(heartbeat.where()))
    thread.start()
    thread.join()  # a line of Python's standard library, called by this test
    assert "test_heartbeat.py" in lines[0]
    assert "in test_the_line_is_the_innermost_line_of_user_code" in lines[0]
    assert "thread.join()" in lines[0] or "thread.start()" in lines[0]


def test_files_of_python_torch_and_fabricx_are_not_user_code() -> None:
    import torch

    assert heartbeat.is_users(__file__)
    assert not any(map(heartbeat.is_users, (threading.__file__, torch.__file__, heartbeat.__file__, "<string>")))


def test_a_diagnosis_has_the_stacks_of_other_threads_by_name() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="waits in a test")
    thread.start()
    try:
        diagnosis = heartbeat.diagnosis()
    finally:
        stop.set()
        thread.join()
    assert "thread waits in a test:\n" in diagnosis.stacks
    assert "thread MainThread:" not in diagnosis.stacks  # the caller's stack
    assert (diagnosis.pending, diagnosis.done) == ("", "")
    assert not heartbeat.waits()


@pytest.mark.parametrize("look", [heartbeat.where, heartbeat.waits, heartbeat.diagnosis])
def test_reading_a_stack_does_not_keep_variables_of_a_thread_alive(look: Callable[[], object]) -> None:
    began, go_on = threading.Event(), threading.Event()
    batches: list[weakref.ref[Sampled]] = []

    def train() -> None:
        batch = Sampled()
        batches.append(weakref.ref(batch))
        began.set()
        go_on.wait()

    limits = gc.get_threshold()
    gc.set_threshold(0)  # no collection, but it counts as enabled
    try:
        thread = threading.Thread(target=train)
        thread.start()
        began.wait()
        look()
        go_on.set()
        thread.join()
        assert batches[0]() is None
    finally:
        gc.set_threshold(*limits)


class Sampled:
    """Such as a batch, which can be large."""


def test_no_garbage_is_collected_while_stacks_of_all_threads_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    collects: list[bool] = []
    take = sys._current_frames

    def taken() -> dict[int, FrameType]:
        collects.append(gc.isenabled())
        return take()

    monkeypatch.setattr(sys, "_current_frames", taken)
    heartbeat.where()
    heartbeat.waits()
    heartbeat.diagnosis()
    assert collects == [sys.version_info >= (3, 12)] * 4
    assert gc.isenabled()
    gc.disable()  # by the user
    try:
        assert not heartbeat.waits()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_cpu_time_is_available_in_a_process_not_forked_by_the_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = heartbeat.cpu_time()

    def fail(ident: int) -> int:
        raise OSError("Invalid argument")

    monkeypatch.setattr(time, "pthread_getcpuclockid", fail)
    other = heartbeat.cpu_time()
    assert usual is not None
    assert other is not None
    assert other > usual - 0.1  # ticks of 10 ms
