"""Launchers of clusters: Ray on two simulated machines, and jobs of submitit."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.callbacks import FaultRecovery
from fabricx.launchers import Slurm
from fabricx.testing import QUIET, Ledger, kill
from tests.soak import params

from .ledgers import BATCH, EPOCHS, SAMPLES, STEPS, Numbered, exact

NEW_PROCESS = subprocess.Popen  # with the signal mask of its parent process, which a clone lacks

CLUSTER = """
import os, signal, time
import ray, torch
from ray.cluster_utils import Cluster
from torch.utils.data import DataLoader
import fabricx as fx
from fabricx.callbacks import FaultRecovery
from fabricx.testing import QUIET, Ledger, kill
from tests.process.ledgers import BATCH, EPOCHS, SAMPLES, STEPS, Numbered, exact

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
for _ in range(3):  # including a spare node
    cluster.add_node(num_cpus=1)
ray.init(address=cluster.address, log_to_driver=False)

class LosesMachine(fx.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step in (5, 7):  # all ranks have copied the previous step
            trainer.world.barrier()
        if trainer.global_rank == 1 and trainer.global_step == 7 and len(trainer.failures) == 1:
            os.kill(int(os.environ["RAY_RAYLET_PID"]), signal.SIGKILL)
            time.sleep(120)  # until this rank ends with its machine

class Begins(fx.Callback):
    def on_train_start(self, trainer, module):
        if trainer.is_global_zero:
            with open("begun", "a") as file:
                file.write(f"{trainer.global_step} ")

torch.manual_seed(3)
module = Ledger(SAMPLES, BATCH)
trainer = fx.Trainer(launcher="ray", num_nodes=2, devices=1, strategy="ddp", max_epochs=EPOCHS, **QUIET, callbacks=[
    Begins(), LosesMachine(), kill(rank=1).during("backward", step=5),
    FaultRecovery(snapshots=False, copy_every_n_steps=1)])
trainer.fit(module, DataLoader(Numbered(), BATCH // 2, shuffle=True, num_workers=1))
for line in trainer.failures:
    print(line)
print("fit", trainer.global_step == STEPS, exact(module))
ray.shutdown()
cluster.shutdown()
"""


DRIVER = """
import os, time
import ray, torch
from torch.utils.data import DataLoader
import fabricx as fx
from fabricx.callbacks import FaultRecovery, ModelCheckpoint
from fabricx.testing import QUIET, Ledger
from tests.process.ledgers import BATCH, SAMPLES, Numbered, exact

class Slow(fx.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        time.sleep(0.2)
        if trainer.is_global_zero:
            with open("steps", "a") as file:
                file.write(f"{trainer.global_step} {os.getpid()} {len(trainer.failures)}\\n")

ray.init(address=os.environ["ADDRESS"], log_to_driver=False)
torch.manual_seed(3)
module = Ledger(SAMPLES, BATCH)
trainer = fx.Trainer(launcher="ray", num_nodes=2, devices=1, strategy="ddp", max_epochs=40, callbacks=[
    Slow(), FaultRecovery(copy_every_n_steps=1), ModelCheckpoint()])
trainer.fit(module, DataLoader(Numbered(), BATCH // 2, shuffle=True), ckpt_path="last")
print("fit", trainer.global_step, exact(module, 40))
"""

WITHOUT_DRIVER = """
import os, signal, subprocess, sys, time
from pathlib import Path
import psutil, ray
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
for _ in range(3):  # including a spare node
    cluster.add_node(num_cpus=1)
ray.init(address=cluster.address, log_to_driver=False)

def driver():
    environment = {**os.environ, "ADDRESS": cluster.address}
    return subprocess.Popen([sys.executable, "driver.py"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env=environment)

def newest():
    file = Path("steps")
    return [int(number) for number in file.read_text().split()[-3:]] if file.exists() else [-1, 0, 0]

def until(condition):
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, newest()
        time.sleep(0.1)

def advance(failures):
    until(lambda: newest()[2] == failures)
    step = newest()[0]
    until(lambda: newest()[0] >= step + 3)

def kill_standby():
    started = psutil.Process().children(recursive=True)
    [own] = [process for process in started if process.cmdline()[:1] == ["ray::Standby"]]
    own.kill()

def actors():
    return ray.util.list_named_actors(all_namespaces=True)

first = driver()
advance(0)
rank = newest()[1]
first.kill()
first.wait()
until(lambda: "detached" in "".join(lock.read_text() for lock in Path("runs").glob("*/running")))
second = driver()
print("second", "although the process that started it has died" in second.communicate()[0])
kill_standby()
advance(0)
print("same process", newest()[1] == rank)
os.kill(newest()[1], signal.SIGKILL)
advance(1)
os.kill(int(psutil.Process(newest()[1]).environ()["RAY_RAYLET_PID"]), signal.SIGKILL)
advance(2)
environment = {**os.environ, "RAY_ADDRESS": cluster.address}
command = [sys.executable, "-m", "fabricx.launchers.ray_standby", actors()[0]["namespace"]]
print(subprocess.run(command, capture_output=True, text=True, env=environment).stdout.strip())
until(lambda: not actors())
print("stopped", newest()[0] < 150)
print("groups", {group["state"] for group in ray.util.placement_group_table().values()})
third = driver()
print(next(line for line in third.communicate()[0].splitlines() if line.startswith("fit ")))
ray.shutdown()
cluster.shutdown()
"""


# A cluster of Ray takes 15 seconds to start.
@pytest.mark.parametrize("script", params([], [CLUSTER]))
def test_ray_replaces_a_killed_process_and_a_lost_machine(own_folder: Path, script: str) -> None:
    if importlib.util.find_spec("ray") is None:  # an import would leave an environment variable behind
        pytest.skip("Ray is not installed: pip install 'fabricx[ray]'")
    (own_folder / "script.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, text=True, timeout=280, check=False, env=environment
    )
    printed = done.stdout.splitlines()[-3:]
    assert printed[-1:] == ["fit True True"], done.stdout + done.stderr
    assert ["killed by SIGKILL" in printed[0], "was lost" in printed[1]] == [True, True], printed
    assert (own_folder / "begun").read_text() == "0 5 7 "


# A minute and a half.
@pytest.mark.parametrize("script", params([], [WITHOUT_DRIVER]))
def test_a_run_on_ray_survives_its_driver_and_the_actor_that_takes_its_place(own_folder: Path, script: str) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'fabricx[ray]'")
    (own_folder / "script.py").write_text(script)
    (own_folder / "driver.py").write_text(DRIVER)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, text=True, timeout=560, check=False, env=environment
    )
    own = ("second ", "same ", "the ranks ", "stopped ", "groups ", "fit ")  # without lines of Ray
    assert [line for line in done.stdout.splitlines() if line.startswith(own)] == [
        "second True",
        "same process True",
        "the ranks stop at their next step",
        "stopped True",
        "groups {'REMOVED'}",
        "fit 160 True",
    ], done.stdout + done.stderr


class Preempted(fx.Callback):
    """SLURM preempts the job of a run once."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 5 and not trainer.failures:
            signal.raise_signal(signal.SIGTERM)


# Each of the two jobs takes 15 seconds.
@pytest.mark.parametrize(("fault", "message"), params([], [
    (Preempted(), "the job has received SIGTERM"), (kill(rank=1).during("backward", step=5), "was lost"),
]))  # fmt: skip
def test_a_preempted_or_lost_job_of_slurm_is_resubmitted(own_folder: Path, fault: Any, message: str) -> None:
    if importlib.util.find_spec("submitit") is None:
        pytest.skip("submitit is not installed: pip install 'fabricx[slurm]'")
    torch.manual_seed(3)
    module = Ledger(SAMPLES, BATCH)
    trainer = fx.Trainer(
        launcher=Slurm(cluster="local"), devices=2, strategy="ddp", max_epochs=EPOCHS, **QUIET,
        callbacks=[fault, FaultRecovery(every_n_train_steps=2)],
    )  # fmt: skip
    trainer.fit(module, DataLoader(Numbered(), BATCH // 2, shuffle=True))
    assert (trainer.global_step, exact(module), len(trainer.failures)) == (STEPS, True, 1)
    assert message in trainer.failures[0]


INTERRUPTED = """
import os, signal, time
from pathlib import Path
from torch.utils.data import DataLoader
import fabricx as fx
from fabricx.launchers import Slurm
from fabricx.testing import QUIET, Ledger
from tests.process.ledgers import BATCH, EPOCHS, SAMPLES, Numbered

class PressesCtrlC(fx.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_rank == 1 and trainer.global_step == 5:
            os.killpg(int(Path("group").read_text()), signal.SIGINT)
            time.sleep(5)  # the launcher looks for signals twice a second

Path("group").write_text(str(os.getpgrp()))
trainer = fx.Trainer(launcher=Slurm(cluster="local"), devices=2, strategy="ddp", max_epochs=EPOCHS, **QUIET,
                     callbacks=PressesCtrlC())
try:
    trainer.fit(Ledger(SAMPLES, BATCH), DataLoader(Numbered(), BATCH // 2, shuffle=True))
finally:
    print("stopped", trainer.interrupted, 5 <= trainer.global_step <= 7)
"""


@pytest.mark.parametrize("script", params([], [INTERRUPTED]))
def test_ctrl_c_in_a_terminal_stops_tasks_without_slurm_at_their_next_step(
    own_folder: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", NEW_PROCESS)
    (own_folder / "script.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, text=True, timeout=280, check=False, env=environment,
        start_new_session=True,
    )  # fmt: skip
    assert "stopping at the next step" in done.stdout, done.stdout + done.stderr
    assert "stopped True True" in done.stdout, done.stdout + done.stderr
