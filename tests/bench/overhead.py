"""Overhead of a step: a plain loop, fabricx with all options off, and fabricx with its defaults.

The model is small (three linear layers, batches of 32, about 0.3 ms a step), so that the overhead is visible. Times
are of steps only, without the start and the end of a run.
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

WARM = 200


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def loader(batches: int) -> DataLoader:
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(32 * batches, 32, generator=random)
    labels = torch.randint(10, (32 * batches,), generator=random)
    return DataLoader(TensorDataset(inputs, labels), batch_size=32, shuffle=True)


class Timed(fx.Module):
    """Notes when its steps happen."""

    def __init__(self, logs: bool) -> None:
        super().__init__()
        self.net, self.logs, self.times = net(), logs, []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.times.append(time.perf_counter())
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.logs:
            self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def per_step_ms(times: list[float]) -> float:
    return (times[-1] - times[WARM]) / (len(times) - 1 - WARM) * 1e3


def plain(batches: int, epochs: int) -> float:
    model, data, times = net(), loader(batches), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(epochs):
        for inputs, labels in data:
            times.append(time.perf_counter())
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return per_step_ms(times)


def ours(batches: int, epochs: int, everything: bool) -> float:
    options = {"enable_checkpointing": everything, "enable_progress_bar": everything, "logger": everything}
    with tempfile.TemporaryDirectory() as folder:
        trainer = fx.Trainer(
            max_epochs=epochs,
            devices=1,
            accelerator="cpu",
            default_root_dir=folder,
            enable_model_summary=False,
            **options,
        )
        module = Timed(logs=everything)
        trainer.fit(module, loader(batches))
    return per_step_ms(module.times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=1500)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()

    torch.set_num_threads(1)
    size = (args.batches, args.epochs)
    rows = {
        "a plain loop": lambda: plain(*size),
        "fabricx, everything off": lambda: ours(*size, everything=False),
        "fabricx, one log, TensorBoard, bar, checkpoints": lambda: ours(*size, everything=True),
    }
    values = interleaved(rows, args.rounds)
    wanted = dict(zip(rows, (None, None, 1.15), strict=True))
    show("one process", [Row(name, value, "ms a step", wanted[name]) for name, value in values.items()])


if __name__ == "__main__":
    main()
