"""Runs that torchrun restarts: from snapshots, and from in-memory checkpoints."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tests import warm
from tests.soak import params

from .ledgers import STEPS

SCRIPT = """
import sys, torch
import fabricx as fx
from torch.utils.data import DataLoader
from fabricx.callbacks import EarlyStopping, FaultRecovery
from fabricx.testing import QUIET, Ledger, kill
from tests.process.ledgers import BATCH, EPOCHS, SAMPLES, Numbered, exact

if __name__ == "__main__":
    for number in range(2):
        torch.manual_seed(3)
        module = Ledger(SAMPLES, BATCH)
        faults = [kill(rank=1).during("backward", step=5), kill(rank=0).during("forward", step=9, attempt=1)]
        trainer = fx.Trainer(strategy=sys.argv[1], max_epochs=EPOCHS, **QUIET,
                             callbacks=[*(faults if number else []), FaultRecovery(every_n_train_steps=2)])
        trainer.fit(module, DataLoader(Numbered(), BATCH // 2, shuffle=True))
        if trainer.is_global_zero:
            print("fit", number, trainer.global_step, exact(module), len(trainer.failures), flush=True)
"""


def test_a_run_continues_after_restarts_by_torchrun(own_folder: Path) -> None:
    (own_folder / "script.py").write_text(SCRIPT)
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               "--max-restarts", "3", "script.py", "ddp"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    done = warm.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("fit")]
    assert lines[-1] == f"fit 1 {STEPS} True 2", done.stdout + done.stderr[-3000:]
    assert lines[:-1] == [f"fit 0 {STEPS} True 0"] * 3  # a script begins at its first line after each restart
    assert not list(own_folder.glob("runs/*/recovery"))


MEMORY = """
import os, signal, sys, torch
import fabricx as fx
from torch.utils.data import DataLoader
from fabricx.callbacks import EarlyStopping, FaultRecovery
from fabricx.fault_tolerance import memory_checkpoint, memory_holder
from fabricx.strategies import FSDP
from fabricx.testing import QUIET, Ledger, kill
from tests.process.ledgers import BATCH, EPOCHS, SAMPLES, Numbered

def write_line(line):
    os.write(1, (line + "\\n").encode())  # a single write, not mixed with those of other ranks

class ReportsStart(Ledger):
    def on_train_start(self):
        reached = self.trainer.failure_log.step_reached
        write_line(f"rank {self.global_rank} begins at {self.trainer.global_step} of {reached}")

class AllHaveCopied(fx.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step in (5, 9):  # complete these copies before a death, even if a rank is slow
            trainer.world.barrier()

class DiesInCopy(fx.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_rank == 1 and trainer.global_step == 11 and len(trainer.failures) == 2:
            memory_checkpoint._sum = lambda memory: os.kill(os.getpid(), signal.SIGKILL)  # within its next copy

class LosesMachine(fx.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_rank == 1 and trainer.global_step == 5 and not trainer.failures:
            for process in (int((memory_holder.folder_of(0) / "holder").read_text()), os.getppid(), os.getpid()):
                os.kill(process, signal.SIGKILL)

if __name__ == "__main__":
    torch.manual_seed(3)
    module = ReportsStart(SAMPLES, BATCH)
    nodes = int(sys.argv[2])
    kills = [kill(rank=1).during("backward", step=5), kill(rank=0).during("forward", step=9, attempt=1), DiesInCopy()]
    strategy = FSDP(replicas=2) if sys.argv[1] == "hsdp" else sys.argv[1]
    trainer = fx.Trainer(strategy=strategy, max_epochs=EPOCHS, num_nodes=nodes, **QUIET, callbacks=[
        AllHaveCopied(), *(kills if nodes == 1 else [LosesMachine()]),
        FaultRecovery(every_n_train_steps=1000, copy_every_n_steps=1)])
    trainer.fit(module, DataLoader(Numbered(), BATCH // 2, shuffle=True))
    entries = module.entries.detach()
    whole = entries.full_tensor() if hasattr(entries, "full_tensor") else entries
    if trainer.is_global_zero:
        write_line(f"fit {trainer.global_step} {float((whole + EPOCHS).abs().max()) < 1e-4}")
"""


def begun_by_torchrun(script: str, folder: Path, strategy: str) -> list[str]:
    """Start two ranks by torchrun, which restarts them after deaths; return the steps of their starts."""
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               "--max-restarts", "3", "script.py", strategy, "1"]  # fmt: skip
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(folder)
    }  # fmt: skip
    done = warm.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    lines = done.stdout.splitlines()
    assert lines[-1:] == [f"fit {STEPS} True"], done.stdout + done.stderr[-3000:]
    deadline = time.monotonic() + 60
    while list(folder.glob("fabricx-*")):  # the processes that host store and memory poll for the end of the launch
        assert time.monotonic() < deadline, list(folder.iterdir())
        time.sleep(0.02)
    return [line.removeprefix("rank 0 begins at ") for line in lines if line.startswith("rank 0 begins")]


@pytest.mark.parametrize("strategy", params(["fsdp"], ["ddp", "local_sgd"]))
def test_in_memory_checkpoints_survive_restarts_by_torchrun(strategy: str, own_folder: Path) -> None:
    """The last death is within a copy, so that only the previous copy is complete on both ranks."""
    begun = [line.split(" of ") for line in begun_by_torchrun(MEMORY, own_folder, strategy)]
    assert [int(step) for step, _ in begun] == [0, 5, 9, 10]
    ahead = 1 if strategy == "local_sgd" else 0  # a rank may be ahead of the step that both ranks have reached
    assert all(
        0 <= int(reached) - expected <= ahead for (_, reached), expected in zip(begun, (0, 5, 9, 11), strict=True)
    )


UNSEEDED = """
import numpy as np
import fabricx as fx
from torch.utils.data import DataLoader, Subset
from fabricx.callbacks import FaultRecovery
from fabricx.testing import QUIET, Ledger, kill
from tests.process.ledgers import BATCH, EPOCHS, SAMPLES, Numbered

class Halves(fx.DataModule):
    def setup(self, stage):
        self.chosen = np.random.permutation(SAMPLES)[: SAMPLES // 2].tolist()

    def train_dataloader(self):
        return DataLoader(Subset(Numbered(), self.chosen), BATCH // 2, shuffle=True)

if __name__ == "__main__":
    np.random.seed()  # as in a new interpreter
    module = Ledger(SAMPLES, BATCH)
    trainer = fx.Trainer(strategy="ddp", max_epochs=EPOCHS, **QUIET, callbacks=[
        kill(rank=1).during("backward", step=3), FaultRecovery(every_n_train_steps=1)])
    trainer.fit(module, datamodule=Halves())
    if trainer.is_global_zero:
        print("fit", len(trainer.failures), sorted({round(-entry, 3) for entry in module.entries.tolist()}), flush=True)
"""


def test_a_script_without_a_seed_has_the_same_data_after_a_restart(own_folder: Path) -> None:
    """Regression: numpy and python seed themselves per process, and other samples were trained after a restart."""
    (own_folder / "script.py").write_text(UNSEEDED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               "--max-restarts", "3", "script.py"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = warm.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert "fit 1 [0.0, 3.0]" in [line.replace("-0.0", "0.0") for line in done.stdout.splitlines()], (
        done.stdout + done.stderr[-3000:]
    )


DIVERGES = """
class Diverges(fx.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 4:
            trainer.finish_checkpoint()  # the snapshot of step 3 is written in the background
        if trainer.global_rank == 1 and trainer.global_step == 4 and not trainer.failures:
            module.layer.weight.data += 1.0

if __name__"""


def test_in_memory_checkpoints_of_diverged_weights_are_not_restored(own_folder: Path) -> None:
    script = MEMORY.replace("\nif __name__", DIVERGES).replace(
        "*(kills if nodes == 1 else [LosesMachine()])", "Diverges()"
    )
    script = script.replace("every_n_train_steps=1000", "every_n_train_steps=3, compare_every_n_steps=5")
    # The snapshot, not the copies of step 4.
    assert begun_by_torchrun(script, own_folder, "ddp") == ["0 of 0", "3 of 4"]
