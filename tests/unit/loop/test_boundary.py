"""The end of a batch, and the last batch of an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fabricx as fx
from fabricx.testing import TinyModule, tiny_loader


@pytest.mark.parametrize(
    ("skips_at", "options", "expected"),
    [
        (None, {}, [False, False, False, True, "end True"]),
        (None, {"limit_train_batches": 2}, [False, True, "end True"]),
        (2, {}, [False, False, "end True"]),
        (0, {}, ["end True"]),
    ],
    ids=str,
)
def test_the_last_batch_of_an_epoch_is_detected_also_after_a_skip(
    skips_at: int | None, options: dict[str, Any], expected: list[Any], quiet: dict[str, Any]
) -> None:
    seen: list[Any] = []

    class Records(TinyModule):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == skips_at else None

        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(self.trainer.is_last_batch)

        def on_train_epoch_end(self) -> None:
            seen.append(f"end {self.trainer.is_last_batch}")

    fx.Trainer(max_epochs=1, **options, **quiet).fit(Records(), tiny_loader(16, 4))
    assert seen == expected


def test_a_validation_does_not_change_whether_the_training_batch_is_the_last(quiet: dict[str, Any]) -> None:
    seen: list[bool] = []

    class Records(TinyModule):
        def on_train_start(self) -> None:  # after the sanity check
            seen.append(self.trainer.is_last_batch)

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            if self.trainer.training:  # for the second batch, after a validation
                seen.append(self.trainer.is_last_batch)
            return batch

    trainer = fx.Trainer(max_epochs=1, val_check_interval=1, limit_train_batches=2, num_sanity_val_steps=1, **quiet)
    trainer.fit(Records(), tiny_loader(16, 4), tiny_loader(4, 4))
    assert seen == [False, False, False]


def test_a_step_has_no_values_of_earlier_skipped_batches(quiet: dict[str, Any]) -> None:
    seen: list[float] = []

    class Skips(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("value", float("nan") if batch_idx == 1 else float(batch_idx))
            return None if batch_idx == 1 else loss

        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(float(self.trainer.callback_metrics["value"]))

    with pytest.warns(UserWarning, match="returned no loss"):
        fx.Trainer(max_epochs=1, **quiet).fit(Skips(), tiny_loader(16, 4))
    assert seen == pytest.approx([0.0, float("nan"), 2.0, 3.0], nan_ok=True)


def test_a_run_that_resumes_after_a_skipped_batch_drops_its_values(quiet: dict[str, Any], tmp_path: Path) -> None:
    seen: list[float] = []

    class Skips(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("value", float(batch_idx))
            return None if batch_idx == 1 else loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(float(self.trainer.callback_metrics["value"]))
            if batch_idx == 1:
                self.trainer.save_checkpoint(tmp_path / "a")

    with pytest.warns(UserWarning, match="returned no loss"):
        fx.Trainer(max_epochs=1, **quiet).fit(Skips(), tiny_loader(16, 4))
    fx.Trainer(max_epochs=1, **quiet).fit(Skips(), tiny_loader(16, 4), ckpt_path=tmp_path / "a")
    assert seen == [0.0, 1.0, 2.0, 3.0, 2.0, 3.0]
