"""A restarted pod of the Kubernetes launcher; tests/process has first pods."""

from __future__ import annotations

import pickle
import threading
import time
from pathlib import Path

import pytest

from fabricx.launch.launcher import Program
from fabricx.launchers import pod


def test_a_pod_restarted_by_kubernetes_does_not_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NODE_RANK", "1")
    monkeypatch.setattr(pod, "LOOK_S", 0.01)
    monkeypatch.setattr(pod, "GONE_S", 0.5)
    program = Program(b"the job", nodes=2, processes=3, gpus=True, gpus_unused=False, stops_at_step=True, servers=1)
    pod.write_program(tmp_path, program, {"NAME": "value"})
    read, environment = pod.read_program(tmp_path)
    assert (read.nodes, read.processes, read.servers, read.stops_at_step) == (2, 3, 1, True)
    assert environment == {"NAME": "value"}
    (tmp_path / "started-1").touch()
    pod.main(tmp_path)
    ended = pickle.loads((tmp_path / "ended-1").read_bytes())
    assert [(failure.rank, failure.traceback) for failure in ended.failures] == [
        (3, "pod 1 was lost; Kubernetes started it again")
    ]
    (tmp_path / "ended-1").unlink()

    def saves() -> None:  # the first pod, which has received SIGTERM
        for number in range(100):
            (tmp_path / "alive-1").write_text(str(number))
            time.sleep(0.01)
        (tmp_path / "ended-1").write_text("its end")

    thread = threading.Thread(target=saves)
    thread.start()
    pod.main(tmp_path)
    thread.join()
    assert (tmp_path / "ended-1").read_text() == "its end"


def test_an_error_before_the_ranks_start_is_the_end_of_the_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PET_NODE_RANK", "0")
    pod.write_program(
        tmp_path, Program(b"", nodes=1, processes=1, gpus=False, gpus_unused=False, stops_at_step=True), {}
    )
    (tmp_path / "job").chmod(0o644)
    pod.main(tmp_path)
    [failure] = pickle.loads((tmp_path / "ended-0").read_bytes()).failures
    assert "PermissionError" in failure.traceback
