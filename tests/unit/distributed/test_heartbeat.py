"""Where a process stands, for the report of a hang."""

from __future__ import annotations

import threading

import pytest

from fabricx.distributed import heartbeat


@pytest.fixture(autouse=True)
def counted() -> object:
    before = heartbeat.reached()
    yield
    heartbeat.set_reached(before)


def test_finished_batches_are_counted_from_where_the_run_was() -> None:
    heartbeat.set_reached(7)
    heartbeat.advance()
    assert heartbeat.reached() == 8


def test_the_line_is_the_users_innermost_one_also_from_another_thread() -> None:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(heartbeat.where()))
    thread.start()
    thread.join()  # a line of python's own, which this test calls
    assert "test_heartbeat.py" in found[0]
    assert "in test_the_line_is_the_users_innermost_one" in found[0]
    assert "thread.join()" in found[0] or "thread.start()" in found[0]


def test_files_of_python_torch_and_fabricx_are_not_the_users() -> None:
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
    assert "thread MainThread:" not in diagnosis.stacks  # the caller's own
    assert (diagnosis.pending, diagnosis.done) == ("", "")
    assert not heartbeat.waits()
