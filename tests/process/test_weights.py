"""Losses that are means over tokens: the gradient is the mean over the tokens of the global batch on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fabricx as fx
from fabricx.callbacks import LoadBalancer
from fabricx.strategies import DDP, FSDP, AsyncSGD, Mesh, ParameterServer, Single
from fabricx.testing import QUIET
from tests.soak import params

pytestmark = pytest.mark.usefixtures("warm_ranks")

IGNORED, SAMPLES, WORDS = -100, 44, 7


class Tokens(fx.Module):
    """Predicts each word from itself; most targets are ignored."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def loss(self, batch: Any) -> Tensor:
        words, targets = batch
        return nn.functional.cross_entropy(self.head(self.embedding(words)).flatten(0, 1), targets.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def batch_weight(self, batch: Any) -> Any:
        return (batch[1] != IGNORED).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def data() -> TensorDataset:
    random = torch.Generator().manual_seed(4)
    words = torch.randint(WORDS, (SAMPLES, 5), generator=random)
    ignored = torch.rand(SAMPLES, 5, generator=random) < torch.linspace(0, 1, SAMPLES).unsqueeze(1)
    ignored[10:24] = True  # samples without targets: the batches of some ranks, and a whole global batch
    return TensorDataset(words, (words * 3 % WORDS).masked_fill(ignored, IGNORED))


def train(
    strategy: Any, tmp_path: Path, *callbacks: Any, devices: int = 2, data_ranks: int | None = None, **options: Any
) -> tuple[Any, fx.Trainer]:  # fmt: skip
    trainer = fx.Trainer(
        devices=devices, strategy=strategy, max_epochs=4, default_root_dir=tmp_path, callbacks=list(callbacks),
        gradient_clip_val=0.5, **{**QUIET, **options},
    )  # fmt: skip
    module = Tokens()
    batch = 6 // (data_ranks or devices)
    trainer.fit(module, DataLoader(data(), batch), DataLoader(data(), batch))
    return module, trainer


@pytest.mark.parametrize("accumulate", params([2], [1]))
@pytest.mark.parametrize(
    ("strategy", "devices"),
    params([(DDP(), 2), (FSDP(), 2), (ParameterServer(optimizer="server"), 3)], [(DDP(), 3), (ParameterServer(), 2)]),
)
def test_weights_do_not_depend_on_the_division_of_samples_over_ranks(
    strategy: Any, devices: int, accumulate: int, tmp_path: Path
) -> None:
    expected, single = train(Single(), tmp_path / "a", devices=1, accumulate_grad_batches=accumulate)
    shares = LoadBalancer(shares=[0.5, 0.2, 0.3] if devices == 3 else [0.7, 0.3])
    module, several = train(strategy, tmp_path / "b", shares, devices=devices, accumulate_grad_batches=accumulate)
    assert several.global_step == single.global_step
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)  # AdamW divides by gradients that are rounding errors
    for name in ("loss", "val"):
        torch.testing.assert_close(several.callback_metrics[name], single.callback_metrics[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("accumulate", "devices"), params([(2, 2), (1, 4)], [(1, 2)]))
def test_microbatches_of_a_pipeline_are_weighted_by_their_tokens(
    accumulate: int, devices: int, tmp_path: Path
) -> None:  # fmt: skip
    expected, single = train(Single(), tmp_path / "a", devices=1, accumulate_grad_batches=accumulate)
    mesh = Mesh(pipeline=2, blocks=["embedding", "head"], microbatches=3)
    options = {"devices": devices, "data_ranks": devices // 2, "accumulate_grad_batches": accumulate}
    module, several = train(mesh, tmp_path / "b", **options)
    assert several.global_step == single.global_step
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    for name in ("loss", "val"):
        torch.testing.assert_close(several.callback_metrics[name], single.callback_metrics[name], atol=1e-5, rtol=1e-4)


def test_a_single_process_with_batch_weights_equals_plain_torch(tmp_path: Path) -> None:
    module, _ = train(Single(), tmp_path, devices=1, accumulate_grad_batches=2)
    reference = Tokens()
    optimizer = reference.configure_optimizers()
    batches = list(DataLoader(data(), 12))
    for words, targets in batches * 4:
        if not (targets != IGNORED).any():
            continue
        optimizer.zero_grad()
        reference.loss((words, targets)).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
    for a, b in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_asynchronous_workers_weight_their_own_batches(tmp_path: Path) -> None:
    module, trainer = train(AsyncSGD(), tmp_path)
    assert trainer.current_epoch == 4
    assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_a_negative_batch_weight_is_an_error(tmp_path: Path) -> None:
    class Negative(Tokens):
        def batch_weight(self, batch: Any) -> Any:
            return -1.0

    trainer = fx.Trainer(max_epochs=1, devices=1, default_root_dir=tmp_path, **QUIET)
    with pytest.raises(ValueError, match=r"Negative.batch_weight returned -1"):
        trainer.fit(Negative(), DataLoader(data(), 6))
