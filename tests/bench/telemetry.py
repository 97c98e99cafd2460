"""Cost of telemetry with its defaults: steps of about 5 ms, with a logger and checkpoints, with and without it.

A single process is the worst case: the thread that writes records, and the thread that reads them for TensorBoard, are
in the training process. With two ranks, the second thread is in the launching process.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import torch
from table import Row, interleaved, show
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fabricx as fx

WARM = 50


class Timed(fx.Module):
    """A perceptron whose step takes about 5 ms on a core."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )
        self.times: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.times.append(time.perf_counter())
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def step_ms(telemetry: bool, ranks: int, batches: int, width: int) -> float:
    random = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(64 * batches * ranks, 64, generator=random),
        torch.randint(10, (64 * batches * ranks,), generator=random),
    )
    module = Timed(width)
    with tempfile.TemporaryDirectory() as folder:
        trainer = fx.Trainer(
            max_epochs=1, devices=ranks, accelerator="cpu", default_root_dir=folder, enable_progress_bar=False,
            enable_model_summary=False, enable_telemetry=telemetry,
        )  # fmt: skip
        trainer.fit(module, DataLoader(data, batch_size=64, shuffle=True))
    times = module.times
    return (times[-1] - times[WARM]) / (len(times) - 1 - WARM) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=768)
    args = parser.parse_args()

    torch.set_num_threads(1)
    for ranks in (1, 2):
        rows = {
            "without telemetry": lambda ranks=ranks: step_ms(False, ranks, args.batches, args.width),
            "with telemetry": lambda ranks=ranks: step_ms(True, ranks, args.batches, args.width),
        }
        values = interleaved(rows, args.rounds)
        wanted = dict(zip(rows, (None, 1.02), strict=True))
        title = f"{ranks} rank{'s' if ranks > 1 else ''}"
        show(title, [Row(name, value, "ms a step", wanted[name]) for name, value in values.items()])


if __name__ == "__main__":
    main()
