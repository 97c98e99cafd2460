"""Runs with deterministic="elastic" are bitwise identical for any number of ranks, also after kills."""

from __future__ import annotations

import functools
import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import fabricx as fx
from fabricx.callbacks import FaultRecovery
from fabricx.errors import WorkerFailed
from fabricx.strategies import FSDP
from fabricx.testing import QUIET, kill, layered_data
from tests.soak import params

from .test_elastic import RequestsWorkers

pytestmark = pytest.mark.usefixtures("warm_ranks")

BATCH = 12


class Noisy(fx.Module):
    """A module with dropout, moments, and clipping by the trainer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.net = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.2), nn.Tanh(), nn.Linear(32, 1))
        self.unused = nn.Parameter(torch.ones(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Weighted(Noisy):
    """Has batch weights whose sum depends on its order."""

    def batch_weight(self, batch: Any) -> float:
        return float(batch[0].square().sum())


def bits(folder: Path, devices: int, faults: list[Any], **options: Any) -> tuple[str, fx.Trainer]:
    """Train; return the SHA-256 of the weights."""
    torch.manual_seed(7)
    module = Weighted()
    trainer = fx.Trainer(
        devices=devices, deterministic="elastic", max_epochs=3, default_root_dir=folder, gradient_clip_val=0.5,
        **{**QUIET, "callbacks": [*faults, FaultRecovery(patience=0.0, max_restarts=10)], **options},
    )  # fmt: skip
    trainer.fit(module, DataLoader(layered_data(43), BATCH // devices, shuffle=True))
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest(), trainer


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    return bits(tmp_path_factory.mktemp("alone"), 1, [])[0]


@pytest.mark.parametrize("devices", params([3], [2]))
def test_weights_are_bitwise_identical_for_any_number_of_ranks(devices: int, alone: str, tmp_path: Path) -> None:
    digest, trainer = bits(tmp_path, devices, [])
    assert digest == alone
    assert trainer.global_step == 3 * 4


def test_weights_are_bitwise_identical_after_kills_and_changes_of_the_number_of_workers(
    alone: str, tmp_path: Path
) -> None:
    faults = [
        kill(rank=1).during("backward", step=2),
        kill(rank=0).during("optimizer", step=4, attempt=1),
        kill(rank=0).during("batch end", step=7, attempt=2),
    ]
    digest, trainer = bits(tmp_path / "a", 3, faults)
    assert len(trainer.failures) == 3
    assert digest == alone
    requests: Any = RequestsWorkers(at_2=3, at_5=1, at_9=2)
    digest, _ = bits(tmp_path / "b", 2, [requests], enable_checkpointing=True)
    assert digest == alone


def test_a_run_resumed_with_another_number_of_ranks_is_bitwise_identical(alone: str, tmp_path: Path) -> None:
    _, trainer = bits(tmp_path / "a", 3, [], max_steps=6, enable_checkpointing=True)
    path = trainer.checkpoint_callback.last_model_path or trainer.checkpoint_callback.best_model_path
    module = Weighted()
    resumed = fx.Trainer(
        devices=2,
        deterministic="elastic",
        max_epochs=3,
        default_root_dir=tmp_path / "b",
        gradient_clip_val=0.5,
        **QUIET,
    )
    # the global batch remains that of the three ranks
    resumed.fit(module, DataLoader(layered_data(43), BATCH // 3, shuffle=True), ckpt_path=path)
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    assert digest.hexdigest() == alone


def fitted(module: fx.Module, loader: Any, **options: Any) -> None:
    fx.Trainer(max_steps=2, **{"deterministic": "elastic", "devices": 1, **QUIET, **options}).fit(module, loader)


@pytest.mark.filterwarnings("ignore:training_step returned no loss")
def test_modules_and_options_that_depend_on_the_number_of_ranks_are_refused() -> None:
    loader = DataLoader(layered_data(12), 4)
    module = Noisy()
    module.net.insert(1, nn.BatchNorm1d(32))
    with pytest.raises(ValueError, match="keeps statistics of this rank"):
        fitted(module, loader)
    with pytest.raises(ValueError, match="needs a map-style DataLoader"):
        fitted(Noisy(), [tuple(layered_data(4)[:])])
    with pytest.raises(ValueError, match="selects the strategy 'reproducible' instead of ddp"):
        fitted(Noisy(), loader, strategy=FSDP())
    module = Noisy()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="needs automatic optimization"):
        fitted(module, loader)
    module = Noisy()
    module.training_step = functools.partial(_sometimes, module)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="return a loss of zero"):
        fitted(module, loader)


def _sometimes(module: Noisy, batch: Any, batch_idx: int) -> Tensor | None:
    return Noisy.training_step(module, batch, batch_idx) if batch_idx % 2 else None


class Augmented(Dataset[Any]):
    """Adds noise from the global generators, or from the data set's own generator."""

    def __init__(self, own_generator: bool) -> None:
        self.samples, self.generator = layered_data(43), torch.Generator() if own_generator else None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        inputs, target = self.samples[index]
        return inputs + torch.rand(6, generator=self.generator) + random.random() + np.random.rand(), target


def fit_augmented(folder: Path, devices: int, *, own_generator: bool = False, workers: int = 0) -> list[Tensor]:
    torch.manual_seed(7)
    module = Noisy()
    trainer = fx.Trainer(
        devices=devices, deterministic="elastic", max_epochs=1, default_root_dir=folder, **QUIET
    )  # fmt: skip
    trainer.fit(module, DataLoader(Augmented(own_generator), BATCH // devices, shuffle=True, num_workers=workers))
    return list(module.parameters())


def test_random_numbers_of_a_data_set_depend_on_the_batch_and_not_on_the_rank(tmp_path: Path) -> None:
    alone, *others = [fit_augmented(tmp_path, devices, workers=n) for devices, n in ((1, 0), (2, 0), (3, 0), (1, 1))]
    assert all(torch.equal(a, b) for other in others for a, b in zip(alone, other, strict=True))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_with_its_own_generator_is_refused(workers: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"generator would advance on each rank separately: draw from the global"):
        fit_augmented(tmp_path, 1, own_generator=True, workers=workers)


class ComparesSamples(Noisy):
    """A contrastive loss over the samples of all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self.all_gather(self.net(batch[0]), sync_grads=True).flatten()
        return torch.softmax(outputs, 0).square().sum()


def test_a_collective_in_the_step_is_refused(tmp_path: Path) -> None:
    trainer = fx.Trainer(devices=2, deterministic="elastic", max_epochs=1, default_root_dir=tmp_path, **QUIET)
    with pytest.raises(WorkerFailed, match="a collective in training_step with deterministic='elastic'"):
        trainer.fit(ComparesSamples(), DataLoader(layered_data(24), 6))
