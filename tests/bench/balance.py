"""Ranks of unequal speed: ddp with equal shares, with `LoadBalancer`, and the bound from the sum of all speeds.

Ranks are slowed by a sleep per sample, so that they don't contend for the cores, and in a second part by computation
on separate cores. A rank's speed is measured alone with the batches of equal shares; with computation it is measured
while all ranks compute (two cores may be hyperthreads).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from table import Row, show
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fabricx as fx
from fabricx.callbacks import LoadBalancer
from fabricx.testing import QUIET

BATCH, STEPS = 72, 200
SAMPLE_S = 0.0015  # of the fastest rank; the communication of ddp adds about 4 ms a step on this machine
Speeds = Sequence[float]


class Paced(fx.Module):
    """Waits for each sample according to the speed of its rank; records the end of each step.

    Args:
        speeds: of the ranks; the fastest is 1.
        later: speeds in the second half.
        computes: on a separate core, instead of sleeping.
    """

    def __init__(self, speeds: Speeds, later: Speeds | None = None, *, computes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
        self.speeds, self.later, self.computes = speeds, later or speeds, computes
        self.ends: list[float] = []

    def on_fit_start(self) -> None:
        if self.computes:
            self.cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {self.cores[self.global_rank % len(self.cores)]})
            torch.set_num_threads(1)

    def on_fit_end(self) -> None:
        if self.computes:
            os.sched_setaffinity(0, self.cores)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        speeds = self.speeds if self.trainer.global_step < STEPS // 2 else self.later
        if self.computes:
            compute(len(batch[0]) / speeds[self.global_rank])
        else:
            time.sleep(len(batch[0]) * SAMPLE_S / speeds[self.global_rank])
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ends.append(time.perf_counter())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def run(module: Paced, ranks: int, *callbacks: Any, batch: int = BATCH, steps: int = STEPS) -> float:
    """Train with a global batch; return the milliseconds of a step, the median of the last quarter."""
    inputs = torch.randn(BATCH * 50, 16, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    trainer = fx.Trainer(
        devices=ranks, strategy="ddp" if ranks > 1 else "single", max_steps=steps, callbacks=list(callbacks), **QUIET
    )
    torch.manual_seed(5)
    trainer.fit(module, DataLoader(data, batch // ranks, shuffle=True))
    times = [b - a for a, b in zip(module.ends, module.ends[1:], strict=False)]
    return statistics.median(times[-steps // 4 :]) * 1e3


def compute(samples: float) -> None:
    """Take as long as the fastest rank for a number of samples."""
    square = torch.randn(96, 96)
    for _ in range(int(samples * 48)):
        square = (square @ square).clamp_(-1, 1)


def samples_per_ms(rank: int, speed: float, results: Any) -> None:
    """Compute on a core for three seconds, and count."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    begun, samples = time.perf_counter(), 0
    while (passed := time.perf_counter() - begun) < 3.0:
        compute(8 / speed)
        samples += 8
    results.put(samples / passed / 1e3)


def sum_of_speeds(speeds: Speeds, *, computes: bool) -> float:
    """Return the samples that all ranks train in a millisecond."""
    if computes:
        context = multiprocessing.get_context("spawn")
        results = context.Queue()
        both = [context.Process(target=samples_per_ms, args=(n, speed, results)) for n, speed in enumerate(speeds)]
        for process in both:
            process.start()
        for process in both:
            process.join()
        return sum(results.get() for _ in both)
    equal_share = BATCH // len(speeds)
    alone = {speed: run(Paced([speed]), 1, batch=equal_share, steps=40) for speed in set(speeds)}
    return sum(equal_share / alone[speed] for speed in speeds)


def compare(title: str, speeds: Speeds, later: Speeds | None, rounds: int, *, computes: bool = False) -> None:
    """Print the time of steps with equal and balanced shares, beside the bound from the sum of all speeds."""
    times: dict[str, list[float]] = {"equal": [], "balanced": []}
    ideal: list[float] = []
    last = later or speeds
    for number in range(rounds):
        ideal.append(BATCH / sum_of_speeds(last, computes=computes))
        for way in list(times) if number % 2 == 0 else list(times)[::-1]:
            module = Paced(speeds, later, computes=computes)
            times[way].append(run(module, len(speeds), *([LoadBalancer()] if way == "balanced" else [])))
    alike = min(last) == max(last)
    rows = [
        Row("the sum of all speeds", ideal, "ms"),
        Row("ddp, equal shares", times["equal"], "ms"),
        Row("ddp, LoadBalancer", times["balanced"], "ms", None if alike else 1.11),
    ]
    show(title, rows)
    if alike:
        show("the same, beside equal shares", [rows[1], Row(rows[2].name, times["balanced"], "ms", 1.03)])


def agreement() -> None:
    """Print the distance of the weights from a single process on the same global batches."""
    balanced, single = Paced([1.0, 0.25]), Paced([1.0])
    run(balanced, 2, LoadBalancer())
    run(single, 1)
    pairs = list(zip(balanced.parameters(), single.parameters(), strict=True))
    off = max(float((a - b).detach().abs().max()) for a, b in pairs)
    size = max(float(b.detach().abs().max()) for _, b in pairs)
    print(f"\nweights after {STEPS} steps differ from one process's by {off:.1e}, and are up to {size:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    rounds = parser.parse_args().rounds
    compare(f"two ranks, 1 : 1/2, a global batch of {BATCH} samples", [1, 1 / 2], None, rounds)
    compare("two ranks, 1 : 1/4", [1, 1 / 4], None, rounds)
    compare("three ranks, 1 : 1 : 1/3", [1, 1, 1 / 3], None, rounds)
    compare("two ranks, 1 : 1, and 1 : 1/4 from the middle on", [1, 1], [1, 1 / 4], rounds)
    compare("two ranks of the same speed", [1, 1], None, rounds)
    compare("two ranks that compute, 1 : 1/3, on a core each", [1, 1 / 3], None, rounds, computes=True)
    agreement()


if __name__ == "__main__":
    main()
