"""Gradients that manual steps keep for later batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fabricx as fx
from fabricx.callbacks import ModelCheckpoint
from fabricx.core.strategy_support.held_gradients import (
    ENOUGH,
    HELD,
    HeldGradients,
    KeptGradients,
    held_gradients,
    keep_in_state,
    take_from_state,
)
from fabricx.testing import TinyModule, tiny_loader


class Model:
    """Two optimizers with a parameter each; records their steps."""

    def __init__(self) -> None:
        self.first, self.second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
        self.optimizers = [torch.optim.SGD([parameter], lr=0.1, momentum=0.9) for parameter in self.parameters]
        self.held = HeldGradients(self.optimizers)

    @property
    def parameters(self) -> tuple[nn.Parameter, nn.Parameter]:
        return self.first, self.second

    def zero(self, *, to_none: bool = True) -> None:
        self.optimizers[0].zero_grad(set_to_none=to_none)

    def backward(self, *parameters: Tensor) -> None:
        self.held.before_backward()
        sum((parameter.sum() for parameter in parameters), torch.zeros(())).backward()

    def step(self, number: int = 0) -> None:
        self.held.before_step(self.optimizers[number])
        self.optimizers[number].step()
        self.held.after_step(self.optimizers[number])

    def names(self) -> list[str]:
        """Return the indices of held gradients."""
        identities = [id(parameter) for optimizer in self.optimizers for parameter in held_gradients(optimizer)]
        return [name for name in ("first", "second") if id(getattr(self, name)) in identities]


def usual(model: Model, batch: int) -> None:
    model.zero(to_none=batch % 2 == 0)
    model.backward(model.first)
    model.step()


def of_two_batches(model: Model, batch: int) -> None:
    if batch % 2 == 0:
        model.zero()
    model.backward(model.first)
    if batch % 2 == 1:
        model.step()


def of_three_batches(model: Model, batch: int) -> None:
    if batch % 3 != 1:  # unrelated to the batch between
        model.backward(model.first)
    if batch % 3 == 2:
        model.step()
        model.zero()


def reaches_the_other(model: Model, batch: int) -> None:
    for number, optimizer in enumerate(model.optimizers):
        optimizer.zero_grad()
        model.backward(model.first, model.second)
        model.step(number)


def step_first(model: Model, batch: int) -> None:
    if batch:
        model.step()
    model.zero()
    model.backward(model.first)


def never_cleared(model: Model, batch: int) -> None:
    model.backward(model.first)
    model.step()


@pytest.mark.parametrize(
    ("loop", "held", "needed"),
    [
        (usual, [], False),
        (of_two_batches, ["first"], True),
        (of_three_batches, ["first"], True),
        (reaches_the_other, ["first"], False),
        (step_first, ["first"], True),
        (never_cleared, ["first"], True),
    ],
)
def test_gradients_are_held_until_they_are_used_or_cleared(
    loop: Callable[[Model, int], None], held: list[str], needed: bool
) -> None:
    model = Model()
    for batch in range(7):
        begun = model.held.begin_batch()
        assert begun or not needed or not model.names() or batch == 0
        loop(model, batch)
    assert model.names() == held
    assert model.held.needed is model.held.may_be_needed is needed


def test_held_gradients_are_part_of_the_state() -> None:
    model, other = Model(), Model()
    model.backward(model.first)
    keep_in_state(model.optimizers[0])
    assert torch.equal(model.optimizers[0].state[model.first][HELD], torch.ones(2))
    other.backward(other.second)
    for optimizer, source in zip(other.optimizers, model.optimizers, strict=True):
        optimizer.load_state_dict(source.state_dict())
        take_from_state(optimizer, loaded=True)
    assert other.first.grad is not None
    assert torch.equal(other.first.grad, torch.ones(2))
    assert other.second.grad is None  # of a different state
    assert not other.optimizers[0].state[other.first]
    model.held.close()
    assert held_gradients(model.optimizers[0]) == {}
    model.backward(model.first)  # its hooks are removed, too
    assert model.names() == []


def zeroed(model: Model, kept: KeptGradients, *, to_none: bool | None) -> None:
    """Compute gradients after they were set to None (True) or zero (False), or were kept (None)."""
    with kept.zeroes(model.optimizers[0]):
        if to_none is not None:
            model.zero(to_none=to_none)
    model.backward(model.first)


@pytest.mark.parametrize(
    ("to_none", "carried", "needed"), [(True, False, False), (False, True, False), (None, True, True)]
)
def test_gradients_are_kept_until_a_module_has_cleared_them_often(
    to_none: bool | None, carried: bool, needed: bool
) -> None:
    model = Model()
    model.held.close()
    kept = KeptGradients(model.optimizers)
    assert not kept.may_be_needed
    zeroed(model, kept, to_none=to_none)
    assert kept.may_be_needed  # not known yet
    for _ in range(ENOUGH):
        assert model.names() == ["first"]
        zeroed(model, kept, to_none=to_none)
    assert (model.names() == ["first"]) is carried
    assert kept.may_be_needed is kept.accumulates is needed
    kept.begin_again()  # with a rank that has joined
    assert model.names() == ["first"]
    kept.close()
    assert model.names() == []


class Accumulates(TinyModule):
    """Steps after each second batch."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(nn.functional.mse_loss(self(batch[0]), batch[1]))
        if batch_idx % 2 == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


class Keeps(TinyModule):
    """Clears gradients before each third batch only."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 3 == 0:
            optimizer.zero_grad()


class ZeroGradients(TinyModule):
    """Has a layer that every second batch uses; momentum continues for a zero gradient, but not without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.other(batch[0]).square().mean() if batch_idx % 2 == 0 else loss

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("kind", [Accumulates, Keeps, ZeroGradients])
def test_a_run_resumes_within_an_accumulation_window(
    kind: type[TinyModule], quiet: dict[str, Any], tmp_path: Path
) -> None:
    class Saves(fx.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}-{batch_idx}")

    def weights(*callbacks: fx.Callback, ckpt: Path | None = None) -> list[float]:
        module, options = kind(), {**quiet, "enable_checkpointing": True}
        trainer = fx.Trainer(max_epochs=2, callbacks=[*callbacks, ModelCheckpoint(tmp_path / "last")], **options)
        trainer.fit(module, tiny_loader(16, 4, shuffle=True), ckpt_path=ckpt)
        return [weight for parameter in module.parameters() for weight in parameter.flatten().tolist()]

    torch.manual_seed(3)
    whole = weights(Saves())
    for name in ("0-0", "0-1", "0-3", "1-0", "1-1"):
        torch.manual_seed(3)
        assert weights(ckpt=tmp_path / name) == whole, name
