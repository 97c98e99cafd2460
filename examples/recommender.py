"""A recommender: users and films are vectors of a small dimension, and a rating is their scalar product.

The embedding tables are large, and a batch uses few of their rows: `--strategy parameter_server` sends only these rows.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import fabricx as fx

USERS, FILMS, NOISE = 400, 300, 0.3
NUMBERS = 100_000  # rows of each table


class Recommender(fx.Module):
    """Matrix factorisation with biases (Koren, Bell and Volinsky, 2009)."""

    def __init__(self, width: int = 8, lr: float = 0.02) -> None:
        super().__init__()
        self.save_hyperparameters()
        # The first column of each table is a bias: the mean rating of a user or of a film.
        self.users, self.films = (nn.Embedding(NUMBERS, width + 1, sparse=True) for _ in range(2))
        self.mean = nn.Parameter(torch.zeros(()))
        for table in (self.users, self.films):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, users: Tensor, films: Tensor) -> Tensor:
        user, film = self.users(users), self.films(films)
        return self.mean + user[:, 0] + film[:, 0] + (user[:, 1:] * film[:, 1:]).sum(1)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0], batch[1]), batch[2])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("mse", nn.functional.mse_loss(self(batch[0], batch[1]), batch[2]), prog_bar=True)

    def configure_optimizers(self) -> tuple[list[object], list[object]]:
        tables = torch.optim.SparseAdam([self.users.weight, self.films.weight], self.hparams.lr)
        optimizers, steps = [tables, torch.optim.SGD([self.mean], 0.02)], int(self.trainer.estimated_stepping_batches)
        schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps) for optimizer in optimizers]
        return optimizers, [{"scheduler": schedule, "interval": "step"} for schedule in schedules]


def ratings(count: int = 30_000) -> TensorDataset:
    """Return simulated ratings, by users with a taste of three dimensions, in standard deviations around the mean."""
    random = torch.Generator().manual_seed(0)
    taste = torch.randn(USERS, 3, generator=random)
    style = torch.randn(FILMS, 3, generator=random) / 3**0.5
    users, films = (torch.randint(people, (count,), generator=random) for people in (USERS, FILMS))
    quality = 0.5 * torch.randn(FILMS, generator=random)
    noise = NOISE * torch.randn(count, generator=random)
    numbers = torch.randperm(NUMBERS, generator=random)  # row numbers of users and films, scattered over the tables
    return TensorDataset(numbers[users], numbers[films], (taste[users] * style[films]).sum(1) + quality[films] + noise)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--epochs", type=int, default=15)
    args = parser.parse_args()
    fx.seed_everything(0)
    data = ratings()
    train, val = random_split(data, [27_000, 3_000], torch.Generator().manual_seed(0))
    trainer = fx.Trainer(max_epochs=args.epochs, devices=args.devices, strategy=args.strategy)
    trainer.fit(Recommender(), DataLoader(train, 256 // args.devices, shuffle=True), DataLoader(val, 1000))
    error, baseline = float(trainer.callback_metrics["mse"]) ** 0.5, float(data.tensors[2].std())
    print(f"error {error:.3f}; error of predicting the mean {baseline:.3f}; smallest possible error {NOISE}, the noise")


if __name__ == "__main__":
    main()
