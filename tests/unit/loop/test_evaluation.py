"""Validation, test and prediction leave no trace in the training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fabricx as fx
from fabricx.testing import TinyModule, tiny_data, tiny_loader
from tests.unit.trainer.counting import fitted


def test_the_sanity_check_leaves_no_trace(quiet: dict[str, Any]) -> None:
    def trained(checks: int) -> tuple[list[float], dict[str, Any]]:
        torch.manual_seed(0)
        module = _Dropout()
        trainer = fx.Trainer(max_epochs=1, num_sanity_val_steps=checks, check_val_every_n_epoch=5, **quiet)
        trainer.fit(module, tiny_loader(shuffle=True), tiny_loader())
        return [float(p.detach().sum()) for p in module.parameters()], trainer.callback_metrics

    first, metrics = trained(2)
    assert (first, set(metrics)) == (trained(0)[0], {"loss"})


class _Dropout(TinyModule):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(nn.functional.dropout(inputs, 0.5))
        return output


def test_each_submodule_gets_its_own_mode_back_after_validation(quiet: dict[str, Any]) -> None:
    class Mine(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.BatchNorm1d(4).eval()

        def on_train_start(self) -> None:
            self.frozen.eval()

        def on_train_epoch_end(self) -> None:
            assert self.layer.training
            assert not self.frozen.training

        def validation_step(self, batch: Any) -> None:
            assert not self.layer.training

    fx.Trainer(max_epochs=1, **quiet).fit(Mine(), tiny_loader(), tiny_loader())


def test_predictions_come_in_the_order_of_the_data(quiet: dict[str, Any]) -> None:
    class Echo(TinyModule):
        def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return batch[0]

    outputs = fx.Trainer(**quiet).predict(Echo(), tiny_loader(10, 4))
    assert torch.equal(torch.cat(outputs), tiny_data(10).tensors[0])


def test_several_validation_loaders_have_their_own_names(quiet: dict[str, Any]) -> None:
    class Mine(TinyModule):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            self.log("which", float(dataloader_idx))
            self.log("all", float(dataloader_idx), add_dataloader_idx=False)

    results = fx.Trainer(**quiet).validate(Mine(), [tiny_loader(), tiny_loader()], verbose=False)
    assert results[0]["which/dataloader_idx_0"] == 0.0
    assert results[1]["which/dataloader_idx_1"] == 1.0
    assert results[0]["all"] == 0.5


@pytest.mark.parametrize("wanted", [True, False])
def test_inference_mode_is_a_choice(wanted: bool) -> None:
    assert set(fitted(inference_mode=wanted)[0].grad_modes) == {wanted}
