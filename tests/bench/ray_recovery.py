"""Time from the loss of a process or a machine of a Ray cluster to the next step: `python -m tests.bench.ray_recovery`.

The cluster is on this machine: a node of Ray for each machine. It looks for lost nodes each second.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.callbacks import FaultRecovery
from fabricx.strategies import FSDP, Mesh
from fabricx.testing import QUIET, Ledger
from tests.process.ledgers import BATCH, SAMPLES, Numbered

MACHINES: Final = 2
PROCESSES, LOST = 5, 3  # deaths of a process, and losses of a machine
EVERY, STEP_S = 40, 0.05  # steps between two of them, and seconds of a step
HEALTH: Final = {
    "health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 2,
}  # fmt: skip
# name: strategy, ranks on a machine, data ranks
RUNS: Final[dict[str, tuple[Any, int, int]]] = {
    "ddp": ("ddp", 1, 2), "fsdp": ("fsdp", 1, 2), "local_sgd": ("local_sgd", 1, 2), "hsdp": (FSDP(replicas=2), 2, 4),
    "tensor x ddp": (Mesh(data="ddp", tensor=2), 2, 2),
}  # fmt: skip


class Losses(fx.Callback):
    """Kills the last rank, or its machine, at a step, and records the times of steps and losses."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(STEP_S)
        lost, step = len(trainer.failures), trainer.global_step
        if trainer.is_global_zero:
            _write("steps", lost, step)
        if trainer.global_rank + 1 == trainer.world_size and step == EVERY * (lost + 1) and lost < PROCESSES + LOST:
            _write("losses", lost, step)
            os.kill(os.getpid() if lost < PROCESSES else int(os.environ["RAY_RAYLET_PID"]), signal.SIGKILL)
            time.sleep(120)  # until this rank ends with its machine


def _write(name: str, lost: int, step: int) -> None:
    with Path(name).open("a") as file:
        file.write(f"{time.time()} {lost} {step}\n")


def _read(name: str) -> list[tuple[float, int, int]]:
    rows = [line.split() for line in Path(name).read_text().splitlines()]
    return [(float(at), int(lost), int(step)) for at, lost, step in rows]


def measure(name: str) -> None:
    """Print the times of a strategy.

    Args:
        name: of `RUNS`.
    """
    strategy, devices, shares = RUNS[name]
    for file in ("steps", "losses"):
        Path(file).unlink(missing_ok=True)
    torch.manual_seed(3)
    module = Ledger(SAMPLES, BATCH)
    epochs = -(-EVERY * (PROCESSES + LOST + 1) * BATCH // SAMPLES)
    trainer = fx.Trainer(
        launcher="ray", num_nodes=MACHINES, devices=devices, strategy=strategy, max_epochs=epochs, **QUIET,
        callbacks=[Losses(), FaultRecovery()],
    )  # fmt: skip
    trainer.fit(module, DataLoader(Numbered(), BATCH // shares, shuffle=True))
    entries = module.entries.detach()
    missing = float((entries + epochs).abs().max())
    steps, losses = _read("steps"), _read("losses")
    gaps, again = [], []
    for at, lost, step in losses:
        first = next(row for row in steps if row[1] == lost + 1)
        gaps.append(first[0] - at)
        again.append(step - first[2])
    print(
        f"{name:14} process {statistics.median(gaps[:PROCESSES]):5.2f} s (up to {max(gaps[:PROCESSES]):.2f}), "
        f"machine {statistics.median(gaps[PROCESSES:]):5.2f} s (up to {max(gaps[PROCESSES:]):.2f}), "
        f"{statistics.median(again):.0f} steps again, {missing:g} samples missing", flush=True,
    )  # fmt: skip


def main() -> None:
    """Measure the strategies that are arguments of the command, or all."""
    import ray
    from ray.cluster_utils import Cluster

    for name in sys.argv[1:] or RUNS:
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": HEALTH})
        for _ in range(MACHINES + LOST):
            cluster.add_node(num_cpus=RUNS[name][1])
        ray.init(address=cluster.address, log_to_driver=False)
        measure(name)
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
