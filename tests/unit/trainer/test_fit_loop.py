"""Lightning's names of the loop of a fit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import fabricx as fx
from fabricx.testing import TinyModule, tiny_loader


def test_the_fit_loop_has_the_limits_of_the_trainer(quiet: dict[str, Any]) -> None:
    trainer, module = fx.Trainer(max_epochs=1, **quiet), TinyModule()
    trainer.fit(module, tiny_loader())
    trainer.fit_loop.max_epochs += 1
    trainer.fit(module, tiny_loader())
    assert (trainer.fit_loop.max_epochs, trainer.current_epoch, trainer.fit_loop.max_steps) == (2, 2, -1)
    trainer.fit_loop.max_epochs = None
    assert trainer.max_epochs == -1
    steps = trainer.fit_loop.epoch_loop
    assert (steps._batches_that_stepped, steps.global_step) == (8, 8)
    steps.max_steps = 6
    assert (trainer.max_steps, trainer.fit_loop.epoch_loop.max_steps, steps.min_steps) == (6, 6, None)
    with pytest.raises(AttributeError, match=r"epoch_loop\.batch_progress can't be set: .*trainer\.fit_loop: it has"):
        steps.batch_progress = None
    with pytest.raises(AttributeError, match=r"epoch_loop has no attribute 'val_loop'.*trainer\.enable_validation"):
        steps.val_loop  # noqa: B018
    assert steps.batch_idx == 3
    assert trainer.fit_loop.epoch_progress.current.completed == trainer.fit_loop.epoch_progress.total.ready == 2
    with pytest.raises(AttributeError, match="has no attribute 'done': it has max_epochs"):
        trainer.fit_loop.done  # noqa: B018
    with pytest.raises(AttributeError, match=r"fit_loop\.epoch_progress can't be set"):
        trainer.fit_loop.epoch_progress = 3
    with pytest.raises(AttributeError, match=r"^completed of the counters.*fit\(ckpt_path=...\) begins at"):
        trainer.fit_loop.epoch_progress.current.completed = 3


class Counts(TinyModule):
    """Records Lightning's counters in its hooks."""

    def __init__(self, seen: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.seen = seen

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        progress = self.trainer.fit_loop.epoch_progress.current
        loop = self.trainer.fit_loop
        places = (loop.epoch_loop.batch_idx, loop.batch_idx, loop.total_batch_idx, loop.epoch_loop.total_batch_idx)
        self.seen.append((batch_idx, *places, progress.ready, progress.processed, progress.completed))
        batches = loop.epoch_loop.batch_progress
        self.seen.append((batches.current.ready, batches.total.ready, batches.is_last_batch, int(loop.max_batches)))
        self.seen.append((batches.current.completed, batches.total.completed))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        batches = self.trainer.fit_loop.epoch_loop.batch_progress
        self.seen.extend((p.ready, p.started, p.processed, p.completed) for p in (batches.current, batches.total))

    def on_train_epoch_end(self) -> None:
        self.on_before_optimizer_step(None)


def test_counters_of_loops_are_equal_to_lightnings(quiet: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Lightning sets it
    lightning = pytest.importorskip("lightning.pytorch")

    class Theirs(lightning.LightningModule):  # type: ignore[name-defined, misc]
        on_train_batch_end = Counts.on_train_batch_end
        on_before_optimizer_step = Counts.on_before_optimizer_step
        on_train_epoch_end = Counts.on_train_epoch_end

        def __init__(self, seen: list[tuple[int, ...]]) -> None:
            super().__init__()
            self.layer, self.seen = torch.nn.Linear(1, 1), seen

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(torch.ones(1)).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    ours: list[tuple[int, ...]] = []
    theirs: list[tuple[int, ...]] = []
    fx.Trainer(max_epochs=2, **quiet).fit(Counts(ours), tiny_loader())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(Theirs(theirs), tiny_loader())  # fmt: skip
    assert ours == theirs


def test_the_loader_is_set_in_configure_optimizers_without_setup_data(quiet: dict[str, Any]) -> None:
    class Schedules(TinyModule):
        def configure_optimizers(self) -> Any:
            self.trainer.fit_loop.setup_data()
            self.batches = len(self.trainer.train_dataloader)
            return super().configure_optimizers()

    module, loader = Schedules(), tiny_loader()
    fx.Trainer(max_epochs=1, **quiet).fit(module, loader)
    assert module.batches == len(loader)
