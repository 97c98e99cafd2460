"""The cost model of `fabricx simulate` beside measured steps of small meshes on this machine.

Four speeds are measured on two ranks at once: products, by forward and backward of a plain loop without any exchange;
memory, by its update; and latency and speed of collectives of gloo, by a small and a large sum. The model predicts each
mesh from these alone.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.model_parallel.scaling.cost import FULL, UPDATE, Prediction, predict
from fabricx.model_parallel.scaling.dimensions import Cluster, Layout, Transformer
from fabricx.strategies import DDP, Mesh
from fabricx.testing import QUIET, run_ranks
from tests.bench.table import Row, show
from tests.process.llama import Llama

MODEL = Transformer(layers=6, hidden=384, heads=6, kv_heads=2, ffn=1024, vocabulary=1024, sequence=128)
ROWS, WARM, STEPS = 4, 2, 8
VOCABULARY = {"embed": "vocab", "head": "head"}
SPEEDS = ("flops", "memory_speed", "inside", "inside_latency")
SMALL, LARGE = 2**10, ROWS * MODEL.sequence * MODEL.hidden  # elements of a sum
MESHES: dict[str, tuple[Mesh, Layout]] = {
    "data=ddp, 2 ranks": (Mesh(), Layout(data=2)),
    "data=fsdp, 2 ranks": (Mesh(data="fsdp"), Layout(data=2, sharded=True)),
    "tensor=2": (Mesh(tensor=2, plan=VOCABULARY), Layout(tensor=2)),
    "tensor=2, sequence": (Mesh(tensor=2, plan=VOCABULARY, sequence=True), Layout(tensor=2, sequence=True)),
    "context=2": (Mesh(context=2), Layout(context=2)),
    "pipeline=2, 4 microbatches": (Mesh(pipeline=2, microbatches=4), Layout(pipeline=2, microbatches=4)),
}


class Timed(Llama):
    def __init__(self) -> None:
        super().__init__(model=MODEL)
        self.times: list[float] = []

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.times.append(time.perf_counter())


def data(rows: int) -> DataLoader[Any]:
    ids = torch.randint(MODEL.vocabulary, (rows, MODEL.sequence), generator=torch.Generator().manual_seed(0))
    return DataLoader(ids, ROWS)  # type: ignore[arg-type]


def seconds(work: Callable[[], Any], repeats: int) -> float:
    """Return the median time of a piece of work."""
    times = []
    for _ in range(repeats + WARM):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times[WARM:])


def speeds() -> Cluster:
    """Measure the speeds of this machine, on all ranks at once."""
    module = Llama(model=MODEL)
    optimizer = module.configure_optimizers()
    [batch] = data(ROWS)

    def compute() -> None:
        optimizer.zero_grad()
        module.training_step(batch, 0).backward()

    def exchange(elements: int) -> float:
        tensor = torch.ones(elements)
        return seconds(lambda: dist.all_reduce(tensor), 50)

    small, large, products, update = (
        exchange(SMALL),
        exchange(LARGE),
        seconds(compute, STEPS),
        seconds(optimizer.step, STEPS),
    )
    return Cluster(
        flops=MODEL.step_operations * ROWS / products, efficiency=1.0, node=dist.get_world_size(),
        memory_speed=UPDATE * FULL * MODEL.parameters / update,
        inside=(LARGE - SMALL) * FULL / (large - small), inside_latency=small / 2,
    )  # fmt: skip


def step(strategy: Mesh) -> float:
    """Return the seconds of a step."""
    module, steps = Timed(), STEPS + WARM + 1
    trainer = fx.Trainer(devices=2, strategy=strategy, **{**QUIET, "max_steps": steps})  # type: ignore[arg-type]
    # Speeds of links are measured with gloo.
    with mock.patch.object(DDP, "_can_share_memory", return_value=False):
        trainer.fit(module, data(ROWS * steps * 2))
    times = module.times[WARM:]
    return statistics.median(end - begin for begin, end in itertools.pairwise(times))


def compare(strategy: Mesh, layout: Layout) -> tuple[Prediction, float]:
    """Return the prediction and the measured seconds of a step, with speeds from before and after it."""
    torch.set_num_threads(1)
    before, measured, after = speeds(), step(strategy), speeds()
    mean = {name: (getattr(before, name) + getattr(after, name)) / 2 for name in SPEEDS}
    return predict(MODEL, replace(before, **mean), replace(layout, rows=ROWS, element=FULL)), measured  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    predictions: dict[str, list[tuple[Prediction, float]]] = {name: [] for name in MESHES}
    for _ in range(args.rounds):
        for name, (strategy, layout) in MESHES.items():
            predictions[name].append(run_ranks(compare, 2, strategy, layout)[0])
    for name, pairs in predictions.items():
        predicted, measured = (
            [value * 1e3 for value in values] for values in zip(*((p.step, m) for p, m in pairs), strict=True)
        )
        show(name, [Row("predicted", predicted, "ms a step"), Row("measured", measured, "ms a step")])
        parts = {part: statistics.median(p.seconds[part] for p, _ in pairs) for part in pairs[0][0].seconds}
        print("  predicted: " + ", ".join(f"{part} {value * 1e3:.1f}" for part, value in parts.items() if value))


if __name__ == "__main__":
    main()
