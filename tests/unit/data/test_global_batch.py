"""A run that goes on says which global batch it uses, if that isn't the checkpoint's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.session.checkpoint import _print_global_batch
from fabricx.strategies import DDP, AsyncSGD, ParameterServer
from fabricx.testing import QUIET, TinyModule, tiny_loader


def train(steps: int, batch_size: int, accumulate: int, ckpt: Path | None) -> fx.Trainer:
    trainer = fx.Trainer(max_steps=steps, accumulate_grad_batches=accumulate, **QUIET)
    trainer.fit(TinyModule(), DataLoader(tiny_loader().dataset, batch_size=batch_size), ckpt_path=ckpt)
    return trainer


@pytest.mark.parametrize(
    ("batch_size", "accumulate", "said"),
    [(4, 1, ""), (2, 2, ""), (8, 1, "each update has 8 samples from here on, where it had 4"), (2, 1, "has 2 samples")],
)
def test_another_batch_size_is_said_and_the_same_product_is_not(
    own_folder: Path, batch_size: int, accumulate: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train(2, 4, 1, None).save_checkpoint(own_folder / "one.ckpt")
    capsys.readouterr()
    resumed = train(4, batch_size, accumulate, own_folder / "one.ckpt")
    shown = capsys.readouterr().out
    assert (said in shown) if said else ("each update has" not in shown)
    assert resumed.state.samples % len(tiny_loader().dataset) == (2 * 4 + 2 * batch_size * accumulate) % len(
        tiny_loader().dataset
    )


@pytest.mark.parametrize(("batch_size", "accumulate"), [(4, 1), (8, 1), (2, 1), (2, 2), (4, 2)])
def test_the_end_of_an_epoch_is_validated_with_whatever_global_batch_it_goes_on(
    own_folder: Path, batch_size: int, accumulate: int
) -> None:
    train(1, 4, 1, None).save_checkpoint(own_folder / "one.ckpt")
    trainer = fx.Trainer(max_epochs=1, accumulate_grad_batches=accumulate, **QUIET)
    validated: list[int] = []
    module = TinyModule()
    module.on_validation_end = lambda: validated.append(trainer.global_step)  # type: ignore[method-assign]
    data = tiny_loader().dataset
    trainer.fit(module, DataLoader(data, batch_size), DataLoader(data, 8), ckpt_path=own_folder / "one.ckpt")
    assert validated == [1 + -(-12 // (batch_size * accumulate))] == [trainer.global_step]


def test_a_window_of_a_stream_is_whole_where_another_accumulation_begins(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each update of plain gradient descent moves the bias by the mean over its window: here 1, with a rate of 1."""

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
    assert "each update has 2 batches of each rank from here on, where it had 1" in capsys.readouterr().out


class Grows(fx.Callback):
    """Accumulates one batch more in each epoch."""

    def on_train_epoch_start(self, trainer: fx.Trainer, module: Any) -> None:
        trainer.accumulate_grad_batches = 1 + trainer.current_epoch


@pytest.mark.parametrize("steps", [4, 5, 6, 7])
def test_an_accumulation_that_a_callback_sets_is_no_change(
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


def data_of(global_batch: int) -> Any:
    return SimpleNamespace(train_feed=SimpleNamespace(global_batch=global_batch))


@pytest.mark.parametrize(("batch", "said"), [(8, False), (16, True)])
def test_batch_size_and_ranks_changed_together(batch: int, said: bool) -> None:
    strategy = SimpleNamespace(steps_globally=True)
    lines: list[str] = []
    session: Any = SimpleNamespace(
        data=data_of(batch),  # batch_size of each rank x the 2 ranks that it began with
        options=SimpleNamespace(accumulate_grad_batches=1), state=SimpleNamespace(ranks=2), print=lines.append,
        strategy=strategy,
    )  # fmt: skip
    _print_global_batch(session, 8)
    assert bool(lines) is said
    assert not said or ("16 samples from here on, where it had 8" in lines[0] and "the 2 ranks" in lines[0])


@pytest.mark.parametrize(
    ("strategy", "samples"),
    [
        (DDP(), 16), (ParameterServer(mode="bounded"), 16), (ParameterServer(mode="async"), 8), (AsyncSGD(), 8),
        (ParameterServer(backup_workers=1), 16), (ParameterServer(mode="bounded", apply="arrival"), 8),
    ],
)  # fmt: skip
def test_an_update_of_one_worker_has_its_batch(strategy: Any, samples: int) -> None:
    lines: list[str] = []
    session: Any = SimpleNamespace(
        data=data_of(16), options=SimpleNamespace(accumulate_grad_batches=1), state=SimpleNamespace(ranks=2),
        print=lines.append, strategy=strategy,
    )  # fmt: skip
    _print_global_batch(session, samples)
    assert lines == []
    _print_global_batch(session, 4)
    assert f"each update has {samples} samples from here on, where it had 4" in lines[0]
    assert ("of a single worker" in lines[0]) is (samples == 8)


class Plans(TinyModule):
    """Notes how many updates a schedule is to be planned for."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer is not None
        self.planned = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def test_a_schedule_is_planned_for_the_updates_of_the_run_on_whatever_ranks_it_goes_on(own_folder: Path) -> None:
    def plan(began: int, ckpt: Path | None = None) -> fx.Trainer:
        trainer = fx.Trainer(max_epochs=2, max_steps=-1 if ckpt else 1, **QUIET)
        trainer.state.ranks = began
        module = Plans()
        trainer.fit(module, DataLoader(tiny_loader().dataset, batch_size=2), ckpt_path=ckpt)
        assert ckpt is None or module.planned == 8  # 16 samples, of 4 a global batch, twice
        return trainer

    plan(2).save_checkpoint(own_folder / "of two ranks.ckpt")
    resumed = plan(0, own_folder / "of two ranks.ckpt")
    assert resumed.global_step == 8
