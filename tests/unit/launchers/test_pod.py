"""What a pod of the Kubernetes launcher does when it isn't the first of its number; tests/process has the others."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from fabricx.launch.launcher import Program
from fabricx.launchers import pod


def test_a_pod_that_kubernetes_starts_again_trains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NODE_RANK", "1")
    program = Program(b"the job", nodes=2, processes=3, gpus=True, gpus_unused=False, stops_at_step=True)
    pod.write_program(tmp_path, program, {"NAME": "value"})
    read, environment = pod.read_program(tmp_path)
    assert (read.nodes, read.processes, read.stops_at_step, environment) == (2, 3, True, {"NAME": "value"})
    (tmp_path / "started-1").touch()
    pod.main(tmp_path)
    ended = pickle.loads((tmp_path / "ended-1").read_bytes())
    assert [(failure.rank, failure.traceback) for failure in ended.failures] == [
        (3, "pod 1 was lost; Kubernetes started it again")
    ]
