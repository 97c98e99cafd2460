"""TrainJobs, with a fake `kubectl`."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from fabricx.launch import signals
from fabricx.launch.launcher import Ended, Program
from fabricx.launchers import kubernetes, pod
from fabricx.launchers.kubernetes import Kubernetes

PROGRAM = Program(b"the job", nodes=2, processes=8, gpus=True, gpus_unused=False, stops_at_step=True)
SCHEMA = json.loads(Path(__file__).with_name("trainjob_schema.json").read_text())


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the fake command, which records its arguments in `asked` and answers with `state`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "LOOK_S": 0.01,
        "STATE_S": 0.0,
        "LATE_S": 0.0,
        "GATHER_S": 0.1,
        "REPORT_S": 0.0,
        "KILL_S": 0.1,
    }.items():
        monkeypatch.setattr(kubernetes, name, value)
    command = folder / "kubectl"
    command.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\ncase "$*" in *"get trainjobs"*) cat {tmp_path}/state;; esac\n'
    )
    command.chmod(0o700)
    (tmp_path / "state").write_text("{}")
    return command


def job_folder() -> Path:
    """Wait for the folder of the only job; returns it."""
    while not (jobs := list(Path("kubernetes_jobs").glob("*/trainjob.yaml"))):
        time.sleep(0.01)
    return jobs[0].parent


@contextlib.contextmanager
def meanwhile(act: Callable[[Path], None]) -> Iterator[None]:
    """Run a function in the job's folder while the job runs."""
    thread = threading.Thread(target=lambda: act(job_folder()))
    thread.start()
    yield
    thread.join()


def end(folder: Path, number: int, ended: Ended) -> None:
    (folder / f"started-{number}").touch()
    pod.replace(folder / f"ended-{number}", pickle.dumps(ended))


@pytest.mark.parametrize("user", [0, 1000])
def test_the_train_job_conforms_to_kubeflows_schema(user: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: user)
    launcher = Kubernetes(
        "registry.example/train:1", volumes={"shared": "/shared", "data": "/data"}, namespace="team", grace_s=90,
        cpus_per_rank=6, resources={"memory": "64Gi", "rdma/hca": 1}, folder="/shared/jobs", labels={"queue": "team"},
        spec={"activeDeadlineSeconds": 3600, "trainer": {"env": [{"name": "A", "value": "1"}]},
              "runtimePatches": [{"manager": "team.example/nodes"}]},
    )  # fmt: skip
    job = launcher.train_job(PROGRAM, Path("/shared/jobs/one"), "fabricx-1")
    jsonschema.validate(job, SCHEMA)
    assert job["metadata"] == {"name": "fabricx-1", "namespace": "team", "labels": {"queue": "team"}}
    trainer = job["spec"]["trainer"]
    assert trainer["command"] + trainer["args"] == ["python", "-m", "fabricx.launchers.pod", "/shared/jobs/one"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert trainer["resourcesPerNode"] == {
        "requests": {"cpu": 48, "memory": "64Gi", "rdma/hca": 1, "nvidia.com/gpu": 8},
        "limits": {"rdma/hca": 1, "nvidia.com/gpu": 8},
    }  # fmt: skip
    assert job["spec"]["activeDeadlineSeconds"] == 3600
    assert trainer["env"] == [{"name": "A", "value": "1"}]
    assert job["spec"]["runtimePatches"][1] == {"manager": "team.example/nodes"}
    patch = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    pods = patch["template"]["spec"]["template"]["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in pods["containers"][0]["volumeMounts"]}
    claims = {volume["name"]: volume.get("persistentVolumeClaim", {}).get("claimName") for volume in pods["volumes"]}
    assert {claims[name]: path for name, path in mounts.items()} == {
        None: "/dev/shm", "shared": "/shared", "data": "/data",
    }  # fmt: skip
    assert pods["securityContext"]["runAsUser"] == user  # read access to the job
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**job, "spec": {**job["spec"], "nodes": 2}}, SCHEMA)
    least = Kubernetes(shared_memory=False).train_job(PROGRAM, Path("/one"), "fabricx-1")
    jsonschema.validate(least, SCHEMA)
    assert "image" not in least["spec"]["trainer"]


def test_a_job_is_created_awaited_and_deleted(
    kubectl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends(folder: Path) -> None:
        assert pod.read_program(folder)[1] == {"OMP_NUM_THREADS": "4", "NCCL_DEBUG": "INFO"}
        assert (folder / "job").stat().st_mode & 0o077 == folder.stat().st_mode & 0o077 == 0
        (folder / "output-0").write_text("epoch 1\nthe end")
        end(folder, 1, Ended())
        end(folder, 0, Ended(b"the result"))

    launcher = Kubernetes(context="here", cpus_per_rank=4, environment={"NCCL_DEBUG": "INFO"})
    with meanwhile(ends):
        assert launcher.run(PROGRAM) == Ended(b"the result")
    folder = job_folder()
    name = yaml.safe_load((folder / "trainjob.yaml").read_text())["metadata"]["name"]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[0] == f"--context=here create -f {folder.absolute()}/trainjob.yaml"
    assert asked[-1].startswith(f"--context=here delete trainjobs.trainer.kubeflow.org {name} ")
    assert "epoch 1\nthe end" in capsys.readouterr().out
    assert not (folder / "job").exists()
    assert not (folder / "ended-0").exists()


@pytest.mark.parametrize(
    ("state", "text", "stopping"),
    [
        ('{"status": {"conditions": [{"type": "Failed", "status": "True", "message": "no memory"}]}}',
         "was lost: the TrainJob has ended (Failed: no memory)", False),
        ('Error from server (NotFound)', "was lost: the TrainJob was deleted", True),
    ],
)  # fmt: skip
def test_a_job_that_ends_without_results_is_lost_and_a_deleted_job_is_not_started_again(
    kubectl: Path, tmp_path: Path, state: str, text: str, stopping: bool
) -> None:
    (tmp_path / "state").write_text(state)
    if stopping:
        kubectl.write_text(kubectl.read_text().replace("/state;;", "/state >&2; exit 1;;"))
    ended = Kubernetes().run(PROGRAM)
    assert [failure.traceback for failure in ended.failures] == [f"pod 0 {text}", f"pod 1 {text}"]
    assert [failure.rank for failure in ended.failures] == [0, 8]
    assert ended.stopping is stopping


def test_a_pod_without_a_heartbeat_is_lost_and_all_other_pods_are_killed(
    kubectl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def freezes(folder: Path) -> None:
        for number in range(2):
            (folder / f"started-{number}").touch()
            (folder / f"alive-{number}").write_text("1")
        for turn in range(1000):
            pod.replace(folder / "alive-0", str(turn).encode())
            time.sleep(0.01)
            if (folder / "signal").exists():
                return

    launcher = Kubernetes()
    launcher.lost_after_s = 1.0
    with meanwhile(freezes):
        ended = launcher.run(PROGRAM)
    assert [failure.traceback for failure in ended.failures] == ["pod 1 was lost: it gave no sign of life for 1 s"]
    assert (job_folder() / "signal").read_text() == "9"


def test_ctrl_c_deletes_a_job_without_pods_and_reaches_the_pods_of_another(
    kubectl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pressed = threading.Event()

    @contextlib.contextmanager
    def handled(handler: Callable[[int, Any], None]) -> Iterator[None]:
        handler(signal.SIGINT, None)
        yield

    monkeypatch.setattr(signals, "handled", handled)
    with pytest.raises(KeyboardInterrupt):
        Kubernetes(folder="first").run(PROGRAM)
    assert "delete" in (tmp_path / "asked").read_text()

    def stops(folder: Path) -> None:
        while not (folder / "signal").exists():
            time.sleep(0.01)
        assert (folder / "signal").read_text() == str(int(signal.SIGINT))
        pressed.set()
        for number in range(2):
            end(folder, number, Ended(b"stopped" if number == 0 else None))

    begin = pod.write_program

    def started(folder: Path, *more: Any) -> None:
        begin(folder, *more)
        for number in range(2):
            (folder / f"started-{number}").touch()

    monkeypatch.setattr(pod, "write_program", started)
    with meanwhile(stops):
        assert Kubernetes().run(PROGRAM) == Ended(b"stopped", stopping=True)
    assert pressed.is_set()


def test_without_kubectl_and_without_a_pod_the_next_command_is_printed(
    kubectl: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def applied_elsewhere(folder: Path) -> None:
        time.sleep(0.2)
        for number in range(2):
            end(folder, number, Ended(b"result" if number == 0 else None))

    monkeypatch.setattr(kubernetes, "HINT_S", 0.05)
    monkeypatch.setattr(kubernetes.shutil, "which", lambda name: None)  # type: ignore[attr-defined]
    with meanwhile(applied_elsewhere):
        assert Kubernetes(namespace="team").run(PROGRAM).result == b"result"
    output = capsys.readouterr().out
    assert f"kubectl --namespace=team create -f {job_folder().absolute()}/trainjob.yaml" in output
    assert (
        "2 of 2 pods have not started; this shows the reason:\n  kubectl --namespace=team describe trainjobs" in output
    )
    assert "the TrainJob has to be deleted by hand:\n  kubectl --namespace=team delete trainjobs" in output


def test_an_invalid_configuration_names_the_remedy(kubectl: Path) -> None:
    kubectl.write_text("#!/bin/sh\necho 'no matches for kind TrainJob' >&2\nexit 1\n")
    with pytest.raises(ValueError, match=r"was not created:\nno matches for kind(?s:.*)needs Kubeflow Trainer 2.2"):
        Kubernetes().run(PROGRAM)
    with pytest.raises(ValueError, match="set accelerator to 'gpu', or to 'cpu'"):
        Kubernetes().run(Program(b"", 2, 8, gpus=False, gpus_unused=True, stops_at_step=True))
    with pytest.raises(ValueError, match="is on none of the volumes of the pods, which are at /shared"):
        Kubernetes(volumes={"shared": "/shared"})
    for wrong in ({"cpus_per_rank": 0}, {"grace_s": 0}, {"lost_after_s": 1.0}, {"prefix": "My run"},
                  {"volumes": {"shared": "here"}}):  # fmt: skip
        with pytest.raises(ValueError, match=r"set |absolute"):
            Kubernetes(**wrong)  # type: ignore[arg-type]


def test_a_temporarily_unreachable_cluster_does_not_end_the_run_and_a_failed_deletion_is_reported(
    kubectl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends(folder: Path) -> None:
        while not (asked.exists() and "get trainjobs" in asked.read_text()):  # the TrainJob was created
            time.sleep(0.01)
        (tmp_path / "unreachable").touch()
        while asked.read_text().count("get trainjobs") < 5:
            time.sleep(0.01)
        for number in range(2):
            end(folder, number, Ended(b"result" if number == 0 else None))

    monkeypatch.setattr(kubernetes, "SILENT", 3)
    asked, launcher = tmp_path / "asked", Kubernetes()
    fails = f"[ -e {tmp_path}/unreachable ] && echo 'connection refused' >&2 && exit 1"
    kubectl.write_text(kubectl.read_text() + f"\n{fails}\nexit 0\n")
    with meanwhile(ends):
        assert launcher.run(PROGRAM).result == b"result"
    output = capsys.readouterr().out
    assert "kubectl can't read the TrainJob fabricx-" in output
    assert "connection refused" in output
    assert "the TrainJob has to be deleted by hand" in output
    job_folder().joinpath("trainjob.yaml").unlink()
    requests = asked.read_text().count("create -f")

    def reachable_again(folder: Path) -> None:
        while asked.read_text().count("create -f") < requests + 3:
            time.sleep(0.01)
        (tmp_path / "unreachable").unlink()
        for number in range(2):
            end(folder, number, Ended(b"again" if number == 0 else None))

    with meanwhile(reachable_again):
        assert launcher.run(PROGRAM).result == b"again"


def test_a_request_to_stop_ends_the_attempts_to_create_a_further_job(
    kubectl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def handled(handler: Callable[[int, Any], None]) -> Iterator[None]:
        handler(signal.SIGINT, None)
        yield

    monkeypatch.setattr(signals, "handled", handled)
    kubectl.write_text("#!/bin/sh\nexit 1\n")
    launcher = Kubernetes()
    launcher._created = True
    with pytest.raises(ValueError, match="the TrainJob was not created"):
        launcher.run(PROGRAM)
