"""Local rounds, against the claims of the papers: communication interval and its cost in accuracy."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from torch import Tensor, nn

import fabricx as fx
from fabricx.demo.charlm import CharData, CharGRU
from fabricx.demo.digits import DigitsData
from fabricx.strategies import DDP, AsyncSGD, LocalSGD
from fabricx.testing import QUIET

WORKERS = 4
PERIODS = (1, 4, 16, 64)


class Digits(fx.Module):
    """A hidden layer, trained by plain gradient descent."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("error", 100.0 * (self.net(batch[0]).argmax(1) != batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def error(seed: int, strategy: Any, epochs: int) -> float:
    """Return the part of the test images that are mistaken, in percent."""
    fx.seed_everything(seed)
    module, data = Digits(), DigitsData(batch_size=16)
    fx.Trainer(devices=WORKERS, strategy=strategy, max_epochs=epochs, **QUIET).fit(module, datamodule=data)
    [result] = fx.Trainer(devices=1, **QUIET).test(module, datamodule=data, verbose=False)
    return result["error"]


def bits(strategy: Any, epochs: int) -> float:
    """Return the bits a character on text that wasn't seen, of a small model on two workers."""
    fx.seed_everything(0)
    trainer = fx.Trainer(devices=2, strategy=strategy, max_epochs=epochs, gradient_clip_val=1.0, **QUIET)
    trainer.fit(CharGRU(width=64), datamodule=CharData(batch_size=16, length=64))
    return float(trainer.callback_metrics["val_bits"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=25, help="of digits")
    parser.add_argument("--rounds", type=int, default=195, help="of 25 steps, of characters")
    args = parser.parse_args()
    print(f"\ntest error on digits, %, {WORKERS} workers that bring what they have moved every so many steps")
    print(f"  {'steps of a round':<36}" + "".join(f"{every:>14}" for every in PERIODS))
    rows = {"Downpour": "sum", "elastic averaging": "elastic", "averaging": "average"}
    for name, outer in rows.items():
        cells = []
        for every in PERIODS:
            errors = [error(seed, AsyncSGD(every=every, outer=outer), args.epochs) for seed in range(args.seeds)]
            spread = statistics.stdev(errors) / len(errors) ** 0.5 if len(errors) > 1 else 0.0
            cells.append(f"{statistics.mean(errors):6.2f} ({spread:.2f})")
        print(f"  {name:<36}" + "".join(f"{cell:>14}" for cell in cells), flush=True)
    ways = {
        "ddp, which meets at each step": DDP(),
        "every=25, outer=nesterov (DiLoCo)": LocalSGD(every=25, outer="nesterov"),
        "the same, lr 1.0, momentum 0.8": LocalSGD(every=25, outer="nesterov", outer_lr=1.0, outer_momentum=0.8),
        "every=25, outer=average": LocalSGD(every=25),
    }
    rounds = args.rounds
    epochs = -(-25 * rounds // 204)
    print(f"\nbits a character on unseen text, 2 workers, {epochs} epochs ({rounds} rounds of 25 steps); wanted 1.03")
    first = None
    for name, strategy in ways.items():
        found_bits = bits(strategy, epochs)
        first = first or found_bits
        print(f"  {name:<36}  {found_bits:6.3f}  {found_bits / first:.3f}", flush=True)


if __name__ == "__main__":
    main()
