"""Steps of learning rate schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fabricx as fx
from fabricx.callbacks import ModelCheckpoint
from fabricx.testing import TinyModule, tiny_loader


class _Plateau(TinyModule):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def test_a_checkpoint_of_an_epochs_end_has_the_metric_that_the_schedule_still_waits_for(
    quiet: dict[str, Any], tmp_path: Path
) -> None:
    def run(epochs: int, path: str | None) -> tuple[float, str]:
        saver = ModelCheckpoint(tmp_path, save_last=True)
        options = {**quiet, "enable_checkpointing": True, "callbacks": [saver], "max_epochs": epochs}
        trainer = fx.Trainer(**options)
        trainer.fit(_Plateau(), tiny_loader(), tiny_loader(), ckpt_path=path)
        return trainer.optimizers[0].param_groups[0]["lr"], saver.last_model_path

    whole, _ = run(4, None)
    _, path = run(2, None)
    assert run(4, path)[0] == whole < 0.1


class _Counts:
    """A custom schedule that records its steps."""

    def __init__(self) -> None:
        self.metrics: list[float | None] = []

    def step(self, metric: Any = None) -> None:
        self.metrics.append(None if metric is None else float(metric))

    def state_dict(self) -> dict[str, Any]:
        return {}


class _Schedules(TinyModule):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options, self.counts = options, _Counts()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("index", float(batch_idx))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.counts, **self.options}}


@pytest.mark.parametrize(
    ("options", "accumulate", "steps"),
    [
        ({}, 1, 2), ({"interval": "step"}, 1, 8), ({"interval": "step"}, 2, 4),
        ({"interval": "step", "frequency": 3}, 1, 2), ({"frequency": 2}, 1, 1), ({"frequency": 3}, 1, 0),
    ],
    ids=str,
)  # fmt: skip
def test_a_schedule_advances_by_updates_or_epochs(
    options: dict[str, Any], accumulate: int, steps: int, quiet: dict[str, Any]
) -> None:
    module = _Schedules(**options)
    fx.Trainer(max_epochs=2, accumulate_grad_batches=accumulate, **quiet).fit(module, tiny_loader(16, 4))
    assert module.counts.metrics == [None] * steps


def test_a_plateau_reads_the_newest_value_of_its_metric(quiet: dict[str, Any]) -> None:
    module = _Schedules(interval="step", reduce_on_plateau=True, monitor="index")
    fx.Trainer(max_epochs=1, **quiet).fit(module, tiny_loader(16, 4))
    assert module.counts.metrics == [0.0, 1.0, 2.0, 3.0]


def test_a_metric_that_was_never_logged_is_an_error_unless_the_schedule_may_wait(quiet: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"the scheduler monitors 'indx', which was never logged. Did you mean 'index'"
    ):
        fx.Trainer(max_epochs=1, **quiet).fit(_Schedules(reduce_on_plateau=True, monitor="indx"), tiny_loader())
    waits = _Schedules(reduce_on_plateau=True, monitor="indx", strict=False)
    with pytest.warns(UserWarning, match=r"monitors 'indx', which was never logged(?s:.*)strict=False"):
        fx.Trainer(max_epochs=1, **quiet).fit(waits, tiny_loader())
    assert waits.counts.metrics == []


def test_in_manual_optimization_the_user_advances_the_schedule(quiet: dict[str, Any]) -> None:
    module = _Schedules(interval="step")
    module.automatic_optimization = False
    with (
        pytest.warns(UserWarning, match="no optimizer made a step in the epoch"),
        pytest.warns(UserWarning, match="interval, frequency and monitor of _Counts have no effect"),
    ):
        fx.Trainer(max_epochs=1, **quiet).fit(module, tiny_loader())
    assert module.counts.metrics == []


class _PlateauBySteps(TinyModule):
    """A plateau scheduler by steps that reads a metric of the validation, which rises from the second on."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        options = {"scheduler": scheduler, "interval": "step", "frequency": 2, "monitor": "level"}
        return {"optimizer": optimizer, "lr_scheduler": options}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("rate", self.trainer.optimizers[0].param_groups[0]["lr"])
        return super().training_step(batch, batch_idx) * 0.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("level", float(max(4, self.global_step)))


def test_a_plateau_by_steps_reads_the_metric_of_the_validation_after_its_update(
    quiet: dict[str, Any], tmp_path: Path
) -> None:
    class Rates(fx.Callback):
        watches_metrics = True

        def __init__(self, saves_at: int = 0) -> None:
            self.rates: list[float] = []
            self.saves_at = saves_at

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:  # between the update and its validation
            self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
            if trainer.global_step == self.saves_at:
                trainer.save_checkpoint(tmp_path / f"{self.saves_at}.ckpt")

    def rates(saves_at: int = 0, path: Path | None = None) -> list[float]:
        watches = Rates(saves_at)
        trainer = fx.Trainer(max_epochs=2, val_check_interval=2, callbacks=[watches], **quiet)
        trainer.fit(_PlateauBySteps(), tiny_loader(16, 4), tiny_loader(4, 4), ckpt_path=path)
        return [*watches.rates, trainer.optimizers[0].param_groups[0]["lr"]]

    whole = [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.125]  # levels 4, 4, 6, 8 after updates 2, 4, 6, 8
    for saved in (1, 4, 5, 6):
        assert rates(saved) == whole
        assert rates(path=tmp_path / f"{saved}.ckpt") == whole[saved:]
