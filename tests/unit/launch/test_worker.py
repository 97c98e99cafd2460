"""A worker's result, its answers to the supervisor, and its end."""

from __future__ import annotations

import pickle
import sys
import threading
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from fabricx import by_value
from fabricx.launch import worker


def test_a_result_too_large_for_the_disk_names_the_folder_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    assert pickle.loads(Path(worker._write_result([1], tmp_path / "result-0")).read_bytes()) == [1]
    monkeypatch.setattr(by_value, "dump", full)
    with pytest.raises(OSError, match=rf"No space left.*doesn't fit into {tmp_path}; make room.*TMPDIR"):
        worker._write_result([1], tmp_path / "result-1")
    assert [path.name for path in tmp_path.iterdir()] == ["result-0"]


def test_a_failed_diagnosis_is_an_answer_and_later_messages_are_received(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise KeyError("a source file that another thread has forgotten")

    ended: list[int] = []
    monkeypatch.setattr(worker.heartbeat, "diagnosis", fail)
    monkeypatch.setattr(worker, "ABANDONED_S", 0.0)
    monkeypatch.setattr(worker.os, "killpg", lambda group, number: ended.append(number))
    here, there = Pipe()
    pipe = worker._SupervisorPipe(there)
    thread = threading.Thread(target=worker._receive_messages, args=(there, pipe, str(tmp_path / "run")))
    thread.start()
    for _ in range(2):
        here.send((worker.ASKED, None))
        assert here.poll(10.0)
        assert here.recv() == (worker.ASKED, None)
    here.close()
    thread.join()
    assert len(ended) == 1
    there.close()


def test_a_process_ends_if_its_output_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    codes: list[int] = []
    for name in ("stdout", "stderr"):
        stream: Any = Full()
        monkeypatch.setattr(sys, name, stream)
    monkeypatch.setattr(worker.os, "_exit", codes.append)
    worker.exit_now(3)
    assert codes == [3]
