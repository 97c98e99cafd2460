"""Sums of sine waves with noise: pairs of the past and the future of a curve."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset, random_split

import fabricx as fx


class Waves(fx.DataModule):
    def __init__(self, past: int = 48, future: int = 8, noise: float = 0.05, batch_size: int = 64) -> None:
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        hparams = self.hparams
        random = torch.Generator().manual_seed(0)
        time = torch.arange(hparams.past + hparams.future) / 8
        speed = 0.5 + torch.rand(6000, 3, 1, generator=random)
        phase = 6.3 * torch.rand(6000, 3, 1, generator=random)
        curves = (speed * time + phase).sin().sum(1)
        curves += hparams.noise * torch.randn(curves.shape, generator=random)
        data = TensorDataset(curves[:, : hparams.past], curves[:, hparams.past :])
        self.train, self.val = random_split(data, [5000, 1000], random)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.hparams.batch_size)
