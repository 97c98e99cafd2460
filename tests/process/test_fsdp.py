"""Sharded training computes what one process computes, whatever is asked of it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fabricx as fx
from fabricx import checkpoint
from fabricx.callbacks import ModelCheckpoint
from fabricx.strategies import DDP, FSDP, Single
from fabricx.testing import QUIET

WIDTH = 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)  # 9 rows: uneven shards

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(torch.tanh(self.up(inputs)))


class Layers(fx.Module):
    """Three repeated layers and a rest; `first` and `second` are what a manual loop trains apart."""

    def __init__(self, manual: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Sequential(*[Layer() for _ in range(3)])
        self.second = nn.Linear(WIDTH, 1)
        self.dropout = nn.Dropout(dropout)
        self.automatic_optimization = not manual
        self.held_bytes = 0
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.second(self.dropout(self.first(inputs)))
        return output

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.seen += 1
        if self.automatic_optimization:
            return loss
        for number, optimizer in enumerate(self.optimizers()):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(self(batch[0]), batch[1] * (1 + number))
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        if self.automatic_optimization:
            groups = [{"params": self.first.parameters(), "weight_decay": 0.1}, {"params": self.second.parameters()}]
            return torch.optim.AdamW(groups, lr=0.02)
        return [torch.optim.AdamW(part.parameters(), lr=0.02) for part in (self.first, self.second)]


def loader(batch: int, samples: int = 21) -> DataLoader[Any]:
    inputs = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch, shuffle=True)


def train(strategy: Any, devices: int = 2, *, ckpt: Path | None = None, **options: Any) -> tuple[Layers, fx.Trainer]:
    torch.manual_seed(2)
    module = Layers(**{name: options.pop(name) for name in ("manual", "dropout") if name in options})
    trainer = fx.Trainer(devices=devices, strategy=strategy, **{"max_epochs": 2, **QUIET, **options})
    samples = 21 if module.automatic_optimization else 24  # a manual loop's losses are not weighted by their samples
    trainer.fit(module, loader(6 // devices, samples), loader(5), ckpt_path=ckpt)
    return module, trainer


def assert_same(one: Layers, other: Layers, atol: float = 1e-6) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=2e-5, atol=atol), (name, (a - b).abs().max())  # float32 in another order


class Weighs(fx.Callback):
    """Notes what this rank holds of weights, gradients and moments."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        held = [t for p in module.parameters() for t in (p, p.grad, *optimizer.state.get(p, {}).values())]
        local = [t.to_local() if hasattr(t, "to_local") else t for t in held if t is not None]
        module.held_bytes = sum(t.nbytes for t in local)


def test_a_rank_keeps_half_of_weights_gradients_and_moments() -> None:
    sharded, _ = train(FSDP(), callbacks=[Weighs()])
    whole, _ = train(DDP(), callbacks=[Weighs()])
    assert int(sharded.held_bytes) < 0.6 * int(whole.held_bytes)  # 9 rows on 2 ranks are 5 and 4


@pytest.mark.timeout(240)
def test_single_ddp_and_fsdp_take_up_each_others_checkpoints_bit_for_bit(tmp_path: Path) -> None:
    ways: list[tuple[Any, int]] = [(Single(), 1), (DDP(), 2), (FSDP(), 2), (DDP(), 2), (FSDP(wrap=["Linear"]), 2)]
    before: dict[str, Any] | None = None
    path: Path | None = None
    for number, (strategy, devices) in enumerate(itertools.chain(ways, ways[:1])):
        # At the limit already: the run takes the checkpoint up, and writes another at once.
        saver = SaveAtEnd(tmp_path / f"{number}.ckpt")
        train(strategy, devices, ckpt=path, callbacks=[saver], max_steps=3)
        path = tmp_path / f"{number}.ckpt"
        state = checkpoint.load(path)["strategy"]
        if before is not None:
            assert_equal(state, before)
        before = state


class SaveAtEnd(fx.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.path)


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    else:
        assert one == other


class Later(Layers):
    """Builds its layers where they take no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Any = None
        self.was: list[str] = []

    def configure_model(self) -> None:
        if self.first is None:
            self.first = nn.Sequential(*[Layer() for _ in range(3)])
            self.was = [str(parameter.device) for parameter in self.first.parameters()]


def test_layers_of_configure_model_take_memory_as_shards_only() -> None:
    module = Later()
    trainer = fx.Trainer(devices=2, strategy="fsdp", max_epochs=8, **QUIET)
    trainer.fit(module, loader(3), loader(5))
    assert set(module.was) == {"meta"}
    assert all(str(parameter.device) == "cpu" for parameter in module.parameters())
    deviations = [layer.up.weight.std().item() for layer in module.first]
    assert min(deviations) > 0.1  # Linear's own first values: uniform within 1 / sqrt(6), on every shard
    assert float(trainer.callback_metrics["val"]) < 3.0  # 6 is the variance of what is learnt


class Mixed(Layers):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.second.double()


def test_parameters_of_two_dtypes_are_refused_by_name() -> None:
    trainer = fx.Trainer(devices=2, strategy="fsdp", max_epochs=1, **QUIET)
    with pytest.raises(Exception, match=r"second\.weight is torch\.float64"):
        trainer.fit(Mixed(), loader(3))


def test_checkpoints_of_shards_are_kept_by_the_callback(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, monitor="val", save_last=True)
    module, trainer = train("fsdp", callbacks=[saver], enable_checkpointing=True)
    assert Path(trainer.checkpoint_callback.best_model_path).is_dir()
    assert checkpoint.read_manifest(tmp_path / "last.ckpt")["module"].endswith(".Layers")
    weights = checkpoint.load(tmp_path / "last.ckpt")["strategy"]["module"]
    for name, tensor in module.state_dict().items():
        assert torch.equal(weights[name], tensor)
