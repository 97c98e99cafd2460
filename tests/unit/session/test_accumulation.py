"""The accumulation window of an update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.testing import QUIET, TinyModule, tiny_loader


def train(steps: int, batch_size: int, accumulate: int, ckpt: Path | None) -> fx.Trainer:
    trainer = fx.Trainer(max_steps=steps, accumulate_grad_batches=accumulate, **QUIET)
    trainer.fit(TinyModule(), DataLoader(tiny_loader().dataset, batch_size=batch_size), ckpt_path=ckpt)
    return trainer


def test_a_window_of_a_stream_is_whole_where_another_accumulation_begins(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each update of plain gradient descent moves the bias by the mean over its window: 1, with a rate of 1."""

    class Ones(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.layer.bias.sum()

    batches = list(tiny_loader(20))
    trainer = fx.Trainer(max_steps=1, **QUIET)
    trainer.fit(Ones(lr=1.0), batches)
    trainer.save_checkpoint(own_folder / "one.ckpt")
    module = Ones(lr=1.0)
    trainer = fx.Trainer(max_epochs=1, accumulate_grad_batches=2, **QUIET)
    trainer.fit(module, batches, ckpt_path=own_folder / "one.ckpt")
    assert trainer.global_step == 3
    assert float(module.layer.bias.detach()) == 0.5 - 3
    assert "each update now has 2 batches per rank, and had 1" in capsys.readouterr().out


class Grows(fx.Callback):
    """Accumulates an additional batch in each epoch."""

    def on_train_epoch_start(self, trainer: fx.Trainer, module: Any) -> None:
        trainer.accumulate_grad_batches = 1 + trainer.current_epoch


@pytest.mark.parametrize("steps", [4, 5, 6, 7])
def test_an_accumulation_set_by_a_callback_is_accepted(
    own_folder: Path, steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(steps: int, ckpt: Path | None) -> tuple[fx.Trainer, fx.Module]:
        trainer, module = fx.Trainer(max_epochs=3, max_steps=steps, callbacks=Grows(), **QUIET), TinyModule()
        trainer.fit(module, tiny_loader(), ckpt_path=ckpt)
        return trainer, module

    _, whole = train(-1, None)
    train(steps, None)[0].save_checkpoint(own_folder / "some.ckpt")
    trainer, module = train(-1, own_folder / "some.ckpt")
    assert trainer.global_step == 4 + 2 + 2
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), module.parameters(), strict=True))
    assert "each update has" not in capsys.readouterr().out


def test_an_accumulation_that_changes_within_an_epoch_is_refused() -> None:
    class Late(fx.Callback):
        def on_train_batch_end(self, trainer: fx.Trainer, *_: Any) -> None:
            trainer.accumulate_grad_batches = 2

    trainer = fx.Trainer(max_epochs=1, callbacks=Late(), **QUIET)
    with pytest.raises(ValueError, match=r"changed from 1 to 2 within an epoch.*change it in on_train_epoch_start"):
        trainer.fit(TinyModule(), tiny_loader())
    assert trainer.global_step == 1


@pytest.mark.parametrize("batches", [4, 5, 6, 8])
def test_the_last_partial_window_has_the_whole_gradient(batches: int, quiet: dict[str, Any]) -> None:
    norms: list[float] = []

    class Constant(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.layer.weight.sum()  # all gradients are 1

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms.append(float(self.layer.weight.grad.mean()))

    fx.Trainer(max_epochs=1, accumulate_grad_batches=4, **quiet).fit(Constant(), tiny_loader(4 * batches, 4))
    assert norms == [1.0] * -(-batches // 4)


def test_a_stream_without_length_closes_its_last_window_whole(quiet: dict[str, Any]) -> None:
    norms: list[float] = []

    class Constant(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.layer.weight.sum()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms.append(float(self.layer.weight.grad.mean()))

    class Stream:
        def __iter__(self) -> Any:
            return iter(list(tiny_loader(20, 4)))

    fx.Trainer(max_epochs=1, accumulate_grad_batches=4, **quiet).fit(Constant(), Stream())
    assert norms == [1.0, 1.0]


@pytest.mark.filterwarnings("ignore:training_step returned no loss")
@pytest.mark.parametrize("weighs", [False, True])
def test_the_gradient_of_a_parameter_of_two_optimizers_is_divided_once(weighs: bool) -> None:
    """The gradient is 1 in each batch with a loss; the first batch of the window has none."""

    class Shared(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
            return self.layer.bias.sum() if batch_idx or weighs else None

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            gradients.append(float(self.layer.bias.grad))

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([self.layer.bias], lr=0.1) for _ in range(2)]

    class Weighs(Shared):
        def batch_weight(self, batch: Any) -> float:
            return 3.0 * len(batch[0])

    gradients: list[float] = []
    fx.Trainer(max_steps=1, accumulate_grad_batches=2, **QUIET).fit((Weighs if weighs else Shared)(), tiny_loader())
    assert gradients == [1.0, 1.0]
