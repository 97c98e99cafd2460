from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import fabricx as fx
from fabricx.callbacks import ModelCheckpoint
from fabricx.callbacks.checkpoint_name import CheckpointNames, format_name
from fabricx.testing import TinyModule, tiny_loader

METRICS = {"epoch": 3, "step": 40, "val_loss": 0.12345, "val/acc": 0.5}


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{epoch}-{step}", "epoch=3-step=40"),
        ("{epoch}-{step}-{val_loss:.2f}", "epoch=3-step=40-val_loss=0.12"),
        ("net-{epoch:02d}", "net-epoch=03"),
        ("{val_loss}", "val_loss=0.12345"),
        ("{val/acc:.1f}", "val_acc=0.5"),
        ("{missing:.2f}", "missing=nan"),
        ("plain", "plain"),
    ],
)
def test_fields_of_a_template_are_replaced(template: str, name: str) -> None:
    assert format_name(template, METRICS) == name


def test_metric_names_can_be_omitted() -> None:
    assert format_name("e{epoch}-acc{val/acc:.2f}", METRICS, auto_insert=False) == "e3-acc0.50"


def test_a_metric_can_be_formatted_as_an_integer() -> None:
    assert format_name("{count:03d}", {"count": 7.0}) == "count=007"
    assert format_name("{count:03d}", {"count": math.nan}) == "count=nan"


def test_a_wrong_format_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"\{epoch:zz\}"):
        format_name("{epoch:zz}", METRICS)


def test_a_name_has_the_reason_of_the_save_unless_the_user_sets_a_template() -> None:
    assert CheckpointNames(None).unranked("exception", METRICS) == "exception-epoch=3-step=40"
    assert CheckpointNames("net").unranked("exception", METRICS) == "net"
    assert CheckpointNames(None, join="_", equals="-", insert=True).ranked(METRICS) == "epoch-3_step-40"
    assert CheckpointNames(None, last="{epoch}-last", insert=False).link(METRICS) == "3-last"


class _Logs(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train_loss", 1.0)
        return super().training_step(batch, batch_idx)


def test_a_misspelt_metric_in_a_name_is_a_warning(quiet: dict[str, Any], tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{epoch}-{train_los:.1f}")
    trainer = fx.Trainer(max_epochs=1, **{**quiet, "enable_checkpointing": True, "callbacks": [saver]})
    with pytest.warns(UserWarning, match=r"no metric 'train_los' yet.* Did you mean 'train_loss'\?"):
        trainer.fit(_Logs(), tiny_loader(8, 4))
    assert Path(saver.best_model_path).name == "epoch=0-train_los=nan.ckpt"
