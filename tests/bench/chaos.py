"""Repeated kills: the share of training time, the gaps between steps, and lost samples.

The weights of the module count how often each sample was trained. Workers are killed or frozen at random times, which
a seed determines as far as processes allow; the run continues from snapshots.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, TensorDataset

import fabricx as fx
from fabricx.callbacks import FaultRecovery
from fabricx.strategies import DDP, FSDP, AsyncSGD, LocalSGD, ParameterServer
from fabricx.testing import QUIET, Ledger

SAMPLES, BATCH, WORKERS = 240, 12, 3
WAYS: dict[str, Any] = {
    "ddp": DDP,
    "fsdp": FSDP,
    "parameter_server": ParameterServer,
    "local_sgd": lambda: LocalSGD(every=5),
    "async_sgd": lambda: AsyncSGD(damp=False),  # a delayed gradient counts whole, so that it can be counted
}


class Victim(Ledger):
    """Writes its process number to a file, and the time of each step."""

    def __init__(self, folder: Path) -> None:
        super().__init__(SAMPLES, BATCH)
        self.folder = folder

    def on_fit_start(self) -> None:
        (self.folder / f"pid-{os.getpid()}").touch()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.02)
        if self.global_rank == 0:
            with (self.folder / "steps").open("a") as file:
                file.write(f"{time.monotonic()}\n")
        return super().training_step(batch, batch_idx)


def storm(
    folder: Path, over: threading.Event, every: float, freezes: float, rng: random.Random, done: list[str]
) -> None:  # fmt: skip
    """Kill or freeze a worker every so often."""
    while not over.wait(every * rng.uniform(0.5, 1.5)):
        alive = [path for path in sorted(folder.glob("pid-*")) if Path("/proc", path.name[4:]).exists()]
        if not alive:
            continue
        victim = rng.choice(alive)
        frozen = rng.random() < freezes
        victim.unlink()
        try:
            os.kill(int(victim.name[4:]), signal.SIGSTOP if frozen else signal.SIGKILL)
        except ProcessLookupError:
            continue
        done.append("freeze" if frozen else "kill")


def run(
    strategy: Any, epochs: int, every: float | None, freezes: float, seed: int
) -> tuple[float, list[float], list[str], float]:  # fmt: skip
    """Train; returns the seconds, the gaps between steps of the main rank, the faults, and the error of the ledger."""
    with tempfile.TemporaryDirectory() as name:
        folder, over, faults = Path(name), threading.Event(), list[str]()
        module = Victim(folder)
        inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
        data = TensorDataset(inputs, inputs.sum(1, keepdim=True), torch.arange(SAMPLES))
        recovery = FaultRecovery(max_restarts=20, every_n_train_steps=10, frozen_after=2.0)
        trainer = fx.Trainer(
            devices=WORKERS, strategy=strategy, max_epochs=epochs, default_root_dir=name, callbacks=[recovery], **QUIET
        )
        killer = threading.Thread(target=storm, args=(folder, over, every, freezes, random.Random(seed), faults))
        if every is not None:
            killer.start()
        begun = time.monotonic()
        try:
            trainer.fit(module, DataLoader(data, BATCH // WORKERS, shuffle=True))
        finally:
            over.set()
            if every is not None:
                killer.join()
        seconds = time.monotonic() - begun
        times = [float(line) for line in (folder / "steps").read_text().split()]
        gaps = [b - a for a, b in itertools.pairwise(sorted(times))]
        # An asynchronous gradient is the mean of a worker's own batch, not of a global batch.
        factor = float(WORKERS) if isinstance(strategy, AsyncSGD) else 1.0
        return seconds, gaps, faults, float((module.entries.detach() / factor + epochs).abs().max())


def left_over() -> dict[str, int]:
    """Count resources that a run may leak in this process and on this machine."""
    process = psutil.Process()
    return {
        "processes": len(process.children(recursive=True)), "descriptors": process.num_fds(),
        "threads": threading.active_count(), "shared memory": len(os.listdir("/dev/shm")),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two faults")
    parser.add_argument("--freezes", type=float, default=0.2, help="part of the faults; each is waited for for 2 s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", choices=[*WAYS], nargs="*", default=[*WAYS])
    args = parser.parse_args()
    print(f"\n{WORKERS} workers, a kill or a freeze about every {args.every:g} s")
    for name in args.strategy:
        calm, _, _, _ = run(WAYS[name](), args.epochs, None, 0.0, args.seed)
        before = left_over()
        seconds, gaps, faults, off = run(WAYS[name](), args.epochs, args.every, args.freezes, args.seed)
        left = {kind: count - before[kind] for kind, count in left_over().items() if count > before[kind]}
        longest = sorted(gaps)[-max(1, len(faults)) :]
        print(
            f"  {name:<18}  {faults.count('kill')} kills, {faults.count('freeze')} freezes;  "
            f"goodput {calm / seconds:.2f};  gaps {statistics.median(longest):.2f} s (at most {longest[-1]:.2f});  "
            f"{'nothing lost' if off < 1e-2 else f'LOST OR REPEATED: {off:.3f}'};  left behind: {left or 'nothing'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
