"""Ranks off the data axis receive the same share of the data: all ranks, or two pairs of four ranks."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import fabricx as fx
from fabricx.distributed import world as worlds
from fabricx.distributed.world import World
from fabricx.strategies import DDP, FSDP, AsyncSGD, LocalSGD, Mesh, Reproducible, Single
from fabricx.testing import QUIET, LayeredModule, layered_data, run_ranks


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(layered_data(43))


class Noisy(LayeredModule):
    """Draws random numbers in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([batch[0] + torch.randn_like(batch[0]), batch[1]], batch_idx)


def train(strategy: fx.Strategy, devices: int, shuffle: bool) -> dict[str, Any]:
    fx.seed_everything(3)
    module = Noisy()
    trainer = fx.Trainer(devices=devices, strategy=strategy, max_epochs=2, accumulate_grad_batches=2, **QUIET)
    data = DataLoader(layered_data(43), 6, shuffle=True) if shuffle else DataLoader(Stream(), 6)
    trainer.fit(module, data, DataLoader(layered_data(5), 1))
    predicted = trainer.predict(module, DataLoader(layered_data(5), 2))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"weights": [p.tolist() for p in module.parameters()], "metrics": metrics, "predicted": len(predicted)}


def on_same_data(shuffle: bool) -> dict[str, Any]:
    of_all = World.axis

    def axis(world: World, name: str) -> World:
        return replace(world, rank=0, size=1) if name in ("data", "metrics") else of_all(world, name)

    World.axis = axis  # type: ignore[method-assign]
    return train(DDP(), 2, shuffle)


def test_ranks_with_the_same_share_train_the_weights_of_a_single_process() -> None:
    for shuffle in (True, False):
        alone = train(Single(), 1, shuffle)
        first, second = run_ranks(on_same_data, 2, shuffle)
        assert first["weights"] == second["weights"] == alone["weights"]  # the mean of two equal gradients is exact
        assert first["metrics"] == alone["metrics"]
        assert first["predicted"] == alone["predicted"]


def in_pairs(strategy: fx.Strategy) -> dict[str, Any]:
    """Train on four ranks: (0, 2) and (1, 3) are along the data axis, (0, 1) and (2, 3) along another axis."""
    everyone = worlds.current()
    assert everyone is not None
    group = everyone.new_subgroup([[0, 2], [1, 3]])

    of_all = World.axis

    def axis(world: World, name: str) -> World:
        if name not in ("data", "metrics"):
            return of_all(world, name)
        return replace(world, rank=world.rank // 2, size=2, group=group, coordinate=f"pair {world.rank % 2}/")

    World.axis = axis  # type: ignore[method-assign]
    return train(strategy, 4, True)


def test_strategies_reduce_over_the_ranks_along_the_data_axis_only() -> None:
    for strategy in (DDP(compression="bf16"), DDP(compression="powersgd"), LocalSGD(every=3), Reproducible(parts=4)):
        pair = run_ranks(train, 2, strategy, 2, True)
        four = run_ranks(in_pairs, 4, strategy)
        for rank in range(4):
            assert four[rank]["weights"] == pair[0]["weights"], (type(strategy).__name__, rank)
            assert four[rank]["metrics"] == pair[0]["metrics"]


class Contrasts(fx.Module):
    """Compares each sample with all samples of the global batch, gathered from all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()

    def training_step(self, batch: Any) -> Tensor:
        inputs, numbers = batch
        outputs = self.layers(inputs)
        everyone = self.all_gather({"outputs": outputs, "numbers": numbers}, sync_grads=True)
        of_all, local = everyone["outputs"].reshape(-1, 4), self.all_gather(numbers).reshape(-1)
        targets = (numbers[:, None] == local).int().argmax(1)
        return nn.functional.cross_entropy(outputs @ of_all.T, targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def contrast(strategy: Any, ranks: int, batch: int) -> dict[str, Tensor]:
    fx.seed_everything(3)
    module = Contrasts()
    samples = torch.randn(24, 6, generator=torch.Generator().manual_seed(0)).double()
    loader = DataLoader(TensorDataset(samples, torch.arange(24)), batch)
    fx.Trainer(devices=ranks, strategy=strategy, max_epochs=3, **QUIET).fit(module, loader)
    return {name: weight.detach().clone() for name, weight in module.named_parameters()}


@pytest.mark.usefixtures("warm_ranks")
def test_all_gather_returns_each_sample_of_the_global_batch_once() -> None:
    expected = contrast("single", 1, 8)
    for strategy, ranks, shares in (
        (DDP(), 2, 2), (FSDP(), 2, 2), (Mesh(tensor=2), 2, 1), (Mesh(pipeline=2, microbatches=1), 2, 1),
        (Mesh(tensor=2, data="fsdp"), 4, 2), (Mesh(pipeline=2, microbatches=1, data="ddp"), 4, 2),
    ):  # fmt: skip
        weights = contrast(strategy, ranks, 8 // shares)
        assert all(torch.allclose(weights[name], w, rtol=0, atol=1e-12) for name, w in expected.items()), strategy


class Augmented(Dataset[Any]):
    """Draws from each global generator."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, numbers = layered_data(12)[index]
        return inputs + torch.randn_like(inputs) + random.random() + float(np.random.rand()), numbers


class Drops(Noisy):
    """Draws random numbers in evaluations as well."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("drawn", float(torch.rand(())) + random.random())


def with_draws(strategy: Any, devices: int, seed: int) -> tuple[list[Any], float]:
    fx.seed_everything(seed)
    _ = torch.rand(3), random.random(), np.random.rand()  # draws of the script, before the run
    module = Drops()
    for number, parameter in enumerate(module.parameters()):  # equal for all seeds
        nn.init.constant_(parameter, 0.1 + 0.01 * number)
    trainer = fx.Trainer(devices=devices, strategy=strategy, max_epochs=2, **QUIET)
    trainer.fit(module, DataLoader(Augmented(), 4, shuffle=True))
    [tested] = trainer.test(module, DataLoader(layered_data(4), 4), verbose=False)
    return [parameter.tolist() for parameter in module.parameters()], tested["drawn"]


@pytest.mark.usefixtures("warm_ranks")
def test_ranks_that_share_a_batch_draw_the_random_numbers_of_a_single_process() -> None:
    """Regression: workers don't execute the script, and had the initial random states of their own processes."""
    expected, other = with_draws(Single(), 1, 3), with_draws(Single(), 1, 4)
    assert expected != other
    for strategy, devices in ((Mesh(tensor=2), 2), (AsyncSGD(), 1)):
        weights, _ = with_draws(strategy, devices, 3)
        for actual, weight in zip(weights, expected[0], strict=True):
            assert torch.allclose(torch.tensor(actual), torch.tensor(weight), rtol=0, atol=1e-6)
    first, second, third = (with_draws(Mesh(pipeline=2), 2, seed) for seed in (3, 3, 4))
    assert first == second != third
