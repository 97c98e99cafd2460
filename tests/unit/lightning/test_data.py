from __future__ import annotations

import pickle
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fabricx as fx
from fabricx.lightning import adapt_data
from fabricx.testing import QUIET, TinyModule


class Data(L.LightningDataModule):
    def __init__(self, samples: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.prepared = 0
        self.stages: list[str] = []

    def prepare_data(self) -> None:
        self.prepared += 1

    def setup(self, stage: str) -> None:
        self.stages.append(stage)
        self.inputs = torch.ones(self.hparams.samples, 4)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.inputs, self.inputs.sum(1, keepdim=True)), 4)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def test_a_lightning_data_module_is_accepted_by_position_or_keyword():
    trainer, data = fx.Trainer(max_epochs=1, **QUIET), Data(12)
    trainer.fit(TinyModule(), data)
    assert trainer.global_step == 3
    assert isinstance(data, Data)
    assert isinstance(data, fx.DataModule)
    trainer.validate(TinyModule(), datamodule=data, verbose=False)
    assert (data.prepared, data.stages, data.trainer) == (2, ["fit", "validate"], trainer)


def test_a_data_module_is_sent_to_workers_with_its_hyperparameters():
    twin = pickle.loads(pickle.dumps(adapt_data(Data(5))))
    assert type(twin) is type(adapt_data(Data()))
    assert twin.hparams.samples == 5


def test_preparing_on_one_rank_of_all_machines_is_respected():
    data = Data()
    data.prepare_data_per_node = False
    fx.Trainer(max_epochs=1, **QUIET).fit(TinyModule(), data)
    assert data.prepared == 1


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")  # as Lightning sets it
def test_from_datasets_creates_the_loaders():
    dataset = TensorDataset(torch.ones(8, 4), torch.ones(8, 1))
    data = L.LightningDataModule.from_datasets(dataset, batch_size=4)
    trainer = fx.Trainer(max_epochs=1, **QUIET)
    trainer.fit(TinyModule(), datamodule=data)
    assert trainer.global_step == 2


@pytest.mark.filterwarnings("ignore:.*treespec.*:FutureWarning")
def test_a_combined_loader_of_lightning_is_read_like_fabricxs() -> None:
    class Records(TinyModule):
        seen: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append(batch)
            return self.layer.weight.sum()

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.seen.append((batch, batch_idx, dataloader_idx))

    combined = L.pytorch.utilities.CombinedLoader
    trainer, module = fx.Trainer(max_epochs=1, num_sanity_val_steps=0, **QUIET), Records()
    trainer.fit(module, combined({"a": range(2), "b": range(1)}, "max_size"), combined([[1], [2, 3]], "sequential"))
    assert module.seen == [{"a": 0, "b": 0}, {"a": 1, "b": None}, (1, 0, 0), (2, 0, 1), (3, 1, 1)]
