"""Configurations of OmegaConf have the values of the script in workers and in their loader processes."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import fabricx as fx
from fabricx.strategies import DDP
from fabricx.testing import QUIET, TinyModule


class Configured(Dataset[Any]):
    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), float(self.cfg.scale)), torch.zeros(1)


class Reads(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.of_loader_process = batch[0].max().item()
        self.of_worker = OmegaConf.create({"scale": "${times_three:2}"}).scale
        return super().training_step(batch, batch_idx)


def test_resolvers_of_the_script_are_known_in_workers_and_loader_processes() -> None:
    factor = 3
    OmegaConf.register_new_resolver("times_three", lambda number: factor * number)
    try:
        cfg = OmegaConf.create({"data": {"base": 5, "scale": "${times_three:${data.base}}"}})
        module = Reads()
        trainer = fx.Trainer(max_epochs=1, devices=2, strategy=DDP(), **QUIET)
        trainer.fit(module, DataLoader(Configured(cfg.data), batch_size=4, num_workers=1))
    finally:
        OmegaConf.clear_resolver("times_three")
    assert (module.of_loader_process, module.of_worker) == (15, 6)
