"""Model that forecasts the next points of a curve."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fabricx as fx


class Forecaster(fx.Module):
    def __init__(self, past: int = 48, future: int = 8, hidden: int = 128, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(past, hidden), nn.GELU(), nn.Linear(hidden, future))

    def forward(self, past: Tensor) -> Tensor:
        return self.net(past)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.hparams.lr)
