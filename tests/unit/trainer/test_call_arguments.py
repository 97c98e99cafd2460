from __future__ import annotations

from typing import Any

import pytest

import fabricx as fx
from fabricx.testing import QUIET, TinyModule


@pytest.mark.parametrize(
    ("call", "wrong", "right"),
    [
        ("fit", "train_dataloader", "pass train_dataloaders=..."),  # of Lightning 1
        ("fit", "train_loader", "pass train_dataloaders=..."),
        ("fit", "dataloaders", "pass train_dataloaders=..."),
        ("fit", "valid_loader", "pass val_dataloaders=..."),
        ("fit", "test_dataloaders", "known: model, train_dataloaders"),
        ("fit", "data_module", "pass datamodule=..."),
        ("fit", "resume_from_checkpoint", "pass ckpt_path=..."),
        ("fit", "max_epochs", r"pass it to the constructor, Trainer\(max_epochs=...\)"),
        ("validate", "val_dataloaders", "pass dataloaders=..."),
        ("test", "test_dataloaders", "pass dataloaders=..."),
        ("predict", "pl_module", "pass model=..."),
        ("predict", "return_prediction", "pass return_predictions=..."),
    ],
)
def test_a_wrong_keyword_names_the_right_keyword(call: str, wrong: str, right: str) -> None:
    method: Any = getattr(fx.Trainer(**QUIET), call)
    for error in (TypeError, ValueError):
        with pytest.raises(error, match=f"trainer.{call} has no argument '{wrong}': {right}"):
            method(TinyModule(), **{wrong: None})
