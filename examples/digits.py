"""Handwritten digits: the smallest complete program, with a module, data, a trainer and a test."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import fabricx as fx
from fabricx.demo.digits import load_digits


class Digits(fx.Module):
    """Two linear layers that classify images of 64 pixels as ten digits."""

    def __init__(self, hidden: int = 128, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).float().mean(), prog_bar=True)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def loaders(batch_size: int) -> tuple[DataLoader, DataLoader, DataLoader]:
    data = TensorDataset(*load_digits())
    train, val, test = random_split(data, [1197, 300, 300], torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size, shuffle=True), DataLoader(val, 300), DataLoader(test, 300)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1, help="processes; 2 trains with DDP")
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()

    fx.seed_everything(0)
    module = Digits()
    train, val, test = loaders(batch_size=32 // args.devices)
    trainer = fx.Trainer(max_epochs=args.epochs, devices=args.devices)
    trainer.fit(module, train, val)
    trainer.test(module, test)


if __name__ == "__main__":
    main()
