"""Runs in pods, simulated by processes of this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.callbacks import FaultRecovery
from fabricx.launchers import Kubernetes, kubernetes
from fabricx.testing import QUIET, Ledger
from tests import warm
from tests.faults.outside import kill_session
from tests.ports import reserved_port
from tests.soak import params

from .ledgers import BATCH, EPOCHS, SAMPLES, STEPS, Numbered, exact


class Cluster:
    """A substitute for `kubectl` and Kubeflow Trainer: starts the pods of a TrainJob, and ends them.

    Args:
        port: of the store, on this machine.
    """

    def __init__(self, port: int) -> None:
        self.port, self.pods, self.created = port, list[subprocess.Popen[Any]](), 0

    def __call__(self, word: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        answer = {"create": self.create, "get": self.get, "delete": self.delete}[word](arguments[-1])
        return subprocess.CompletedProcess(word, 0, answer, "")

    def create(self, file: str) -> str:
        trainer = yaml.safe_load(Path(file).read_text())["spec"]["trainer"]
        assert not self.pods
        self.created += 1
        for number in range(trainer["numNodes"]):
            variables = {"PET_NODE_RANK": number, "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": self.port}
            environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
            command = [*trainer["command"], *trainer["args"]]
            with Path(f"log-{self.created}-{number}").open("w") as log:
                self.pods.append(warm.Popen(command, env=environment, start_new_session=True, stdout=log, stderr=log))
        return ""

    def get(self, output: str) -> str:
        ended = all(pod.poll() is not None for pod in self.pods)
        return json.dumps({"status": {"conditions": [{"type": "Complete", "status": str(ended)}]}})

    def delete(self, option: str) -> str:
        for pod in self.pods:
            pod.terminate()
        for pod in self.pods:
            pod.wait(60)
        self.pods = []
        return ""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, own_folder: Path) -> Any:
    monkeypatch.setattr(kubernetes.shutil, "which", lambda name: name)  # type: ignore[attr-defined]
    for name in ("REPORT_S", "KILL_S"):  # a folder of this machine has no delay
        monkeypatch.setattr(kubernetes, name, 1.0)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    with reserved_port() as port:
        made = Cluster(port)
        monkeypatch.setattr(kubernetes._TrainJob, "_run", lambda job, *arguments: made(*arguments))
        yield made
        made.delete("")


class Fault(fx.Callback):
    """A fault of the second pod in the middle of the run, once.

    Args:
        number: signal to the pod. SIGKILL also kills its ranks, like the loss of the machine. With SIGTERM, another pod
            with its number starts before it ends, as in Kubernetes.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 0:
            print(f"begins step {trainer.global_step}")
        if trainer.global_rank == 1 and trainer.global_step == 5 and not trainer.failures:
            pod = psutil.Process().parent()
            assert pod is not None
            if self.number == signal.SIGKILL:
                kill_session(os.getsid(pod.pid))
            pod.send_signal(self.number)
            [folder] = Path("kubernetes_jobs").iterdir()
            subprocess.Popen([sys.executable, "-m", "fabricx.launchers.pod", str(folder)], start_new_session=True)


@pytest.mark.parametrize(
    ("fault", "text"),
    params([(signal.SIGKILL, "rank 0 failed")], [(signal.SIGTERM, "pod 1 has received SIGTERM")]),
)
def test_the_run_continues_in_new_pods_after_the_loss_of_a_pod(
    own_folder: Path, cluster: Cluster, capfd: pytest.CaptureFixture[str], fault: int, text: str
) -> None:
    torch.manual_seed(3)
    module = Ledger(SAMPLES, BATCH)
    trainer = fx.Trainer(
        launcher=Kubernetes(python=sys.executable), num_nodes=2, devices=1, strategy="ddp", max_epochs=EPOCHS,
        callbacks=[Fault(fault), FaultRecovery(every_n_train_steps=4)], **{**QUIET, "enable_checkpointing": True},
    )  # fmt: skip
    trainer.fit(module, DataLoader(Numbered(), BATCH // 2, shuffle=True))
    assert (trainer.global_step, exact(module), len(trainer.failures)) == (STEPS, True, 1)
    assert text in trainer.failures[0]
    assert cluster.created == 2
    captured = capfd.readouterr()
    # From the checkpoint that the ranks save before their pod ends, or from the snapshot before it.
    assert ("all workers restart from step 4" in captured.err) == (fault == signal.SIGKILL)
    printed = [line for line in captured.out.splitlines() if line.startswith("begins step ")]
    assert printed[-1] == f"begins step {STEPS - 1}"
    logs = [line for number in (1, 2) for line in Path(f"log-{number}-0").read_text().splitlines()]
    assert [line for line in logs if line.startswith("begins step ")] == printed
