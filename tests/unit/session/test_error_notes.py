"""Notes on errors of a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fabricx as fx
from fabricx.testing import QUIET, TinyModule, tiny_loader


def notes_of(step: Any) -> list[str]:
    class Wrong(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return step(self, batch)

    with pytest.raises((ValueError, RuntimeError)) as error:
        fx.Trainer(max_epochs=1, **QUIET).fit(Wrong(), tiny_loader())
    return list(getattr(error.value, "__notes__", []))


def backward_twice(module: Any, batch: Any) -> Tensor:
    loss = module(batch[0]).square().mean()
    loss.backward()
    return loss


def test_an_error_of_the_step_has_the_shapes_and_types_of_the_batch() -> None:
    def unpacks(module: Any, batch: Any) -> Tensor:
        first, _second, _third = batch
        return first

    assert notes_of(unpacks) == ["the batch was [float32 (4, 4), float32 (4, 1)]"]
    assert notes_of(lambda module, batch: module(batch[0].double())) == [
        "the batch was [float32 (4, 4), float32 (4, 1)]"
    ]


def test_errors_of_fabricx_have_no_note() -> None:
    assert notes_of(lambda module, batch: module(batch[0])) == []  # not a scalar
    assert notes_of(lambda module, batch: module.log("a", "text")) == []


def test_a_second_backward_names_the_first() -> None:
    [note] = notes_of(backward_twice)
    assert "remove loss.backward() from training_step" in note


def test_an_error_between_batches_has_no_note() -> None:
    class Ends(TinyModule):
        def on_train_epoch_end(self) -> None:
            raise RuntimeError("end")

    with pytest.raises(RuntimeError, match="end") as error:
        fx.Trainer(max_epochs=1, **QUIET).fit(Ends(), [(torch.ones(2, 4), torch.ones(2, 1))])
    assert not hasattr(error.value, "__notes__")
