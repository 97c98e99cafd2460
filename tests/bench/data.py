"""Data: the time of a batch from a DataLoader in a plain loop, and in `fit`, without and with loader processes.

Images of 32 x 32 in batches of 32, with random mirroring. The step is a multiplication, so that the run waits for
data.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from table import Row, interleaved, show
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import fabricx as fx

WARM = 20


class Images(Dataset[Any]):
    def __init__(self, batches: int) -> None:
        random = torch.Generator().manual_seed(0)
        self.images = torch.randint(0, 256, (32 * batches, 3, 32, 32), dtype=torch.uint8, generator=random)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        image = self.images[index].float() / 255
        return image.flip(-1) if torch.rand(()) < 0.5 else image


class Scale(fx.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.times = nn.Parameter(torch.zeros(())), []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.times.append(time.perf_counter())
        return self.scale * batch[0, 0, 0, 0]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader(data: Images, processes: int) -> DataLoader:
    return DataLoader(data, 32, shuffle=True, num_workers=processes)


def per_batch_ms(times: list[float]) -> float:
    return (times[-1] - times[WARM]) / (len(times) - 1 - WARM) * 1e3


def plain(data: Images, processes: int) -> float:
    scale, times = nn.Parameter(torch.zeros(())), []
    optimizer = torch.optim.SGD([scale], lr=0.01)
    for batch in loader(data, processes):
        times.append(time.perf_counter())
        loss = scale * batch[0, 0, 0, 0]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return per_batch_ms(times)


def ours(data: Images, processes: int) -> float:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    module = Scale()
    fx.Trainer(max_epochs=1, devices=1, accelerator="cpu", enable_checkpointing=False, **quiet).fit(
        module, loader(data, processes)
    )
    return per_batch_ms(module.times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    data = Images(args.batches)
    for processes in (0, 1, 2, 4):
        ways = {
            "a plain loop": lambda processes=processes: plain(data, processes),
            "fabricx": lambda processes=processes: ours(data, processes),
        }
        times = interleaved(ways, args.rounds)
        rows = [Row(way, values, "ms", None if way == "a plain loop" else 1.0) for way, values in times.items()]
        show(f"a batch of 32 images, {processes} loader processes", rows)


if __name__ == "__main__":
    main()
