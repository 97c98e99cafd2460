"""Cost of checkpoints: none, every 50 steps in the background, and `torch.save` between steps.

The model has 20 million parameters and AdamW (240 MB a checkpoint). A second table has the time to the first step of
a new run and of a resumed run.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from table import Row, interleaved, show
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fabricx as fx
from fabricx.callbacks import ModelCheckpoint

EVERY = 50


class Large(fx.Module):
    """20 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 4700), nn.ReLU(), nn.Linear(4700, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Clock(fx.Callback):
    """Records the start and the end of training, including background writes."""

    def __init__(self, saves: bool) -> None:
        self.saves, self.ends = saves, []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.saves and trainer.global_step % EVERY == 0:
            state = {"model": module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}
            torch.save(state, Path(trainer.default_root_dir) / "plain.pt")
        self.ends.append(time.perf_counter())


def run(way: str, steps: int, folder: str, ckpt: Path | None = None) -> Clock:
    clock = Clock(saves=way == "torch.save")
    callbacks = [clock, *([ModelCheckpoint(folder, every_n_train_steps=EVERY)] if way == "checkpoints" else [])]
    inputs = torch.randn(32 * 64, 64, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(inputs, torch.zeros(len(inputs), dtype=torch.int64)), 32, shuffle=True)
    trainer = fx.Trainer(
        max_steps=steps, devices=1, accelerator="cpu", default_root_dir=folder, callbacks=callbacks, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=way == "checkpoints",
    )  # fmt: skip
    trainer.fit(Large(), data, ckpt_path=ckpt)
    return clock


def per_step_ms(way: str, rounds: int) -> float:
    """Return the time of a step, over stretches of steps with a checkpoint in the middle of each."""
    with tempfile.TemporaryDirectory() as folder:
        clock = run(way, rounds * EVERY + EVERY // 2, folder)
        return (clock.ends[-1] - clock.ends[EVERY // 2 - 1]) / (rounds * EVERY) * 1e3


def to_first_step_s(path: Path | None) -> float:
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        return run("none", EVERY + 1 if path else 1, folder, path).ends[0] - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=int, default=3, help="in each run")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    ways = {"no checkpoints": "none", f"fabricx, one each {EVERY} steps": "checkpoints", "torch.save": "torch.save"}
    rows = {name: (lambda way=way: per_step_ms(way, args.checkpoints)) for name, way in ways.items()}
    times = interleaved(rows, args.rounds)
    wanted = dict(zip(rows, (None, 1.05, None), strict=True))
    show("20 million parameters, AdamW", [Row(n, values, "ms a step", wanted[n]) for n, values in times.items()])
    with tempfile.TemporaryDirectory() as folder:
        run("checkpoints", EVERY, folder)
        path = next(Path(folder).glob("*.ckpt"))
        starts = {"from nothing": lambda: to_first_step_s(None), "from a checkpoint": lambda: to_first_step_s(path)}
        times = interleaved(starts, args.rounds + 2)
    most = {"from nothing": None, "from a checkpoint": 1.5}
    show("from fit to the end of the first step", [Row(n, v, "s", most[n]) for n, v in times.items()])


if __name__ == "__main__":
    main()
