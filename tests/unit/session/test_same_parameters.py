"""A hook that creates layers anew when a checkpoint is loaded: the optimizers train the parameters of the module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fabricx as fx
from fabricx.fault_tolerance.hook_entries import hook_entries, load_hook_entries
from fabricx.session.same_parameters import same_parameters
from fabricx.testing import QUIET, TinyModule, tiny_loader


class Builds(TinyModule):
    """Builds the head for the number of classes, in `setup` and again when a checkpoint is loaded."""

    classes = 2

    def build(self) -> None:
        self.head = nn.Sequential(nn.Linear(4, self.classes), nn.BatchNorm1d(self.classes))

    def setup(self, stage: str) -> None:
        torch.manual_seed(1)
        self.build()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["classes"] = self.classes

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.classes = checkpoint["classes"]
        self.build()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + self.head(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def fit(epochs: int, ckpt_path: Path | None = None, *callbacks: fx.Callback) -> tuple[Builds, fx.Trainer]:
    module, trainer = Builds(), fx.Trainer(max_epochs=epochs, callbacks=list(callbacks), **QUIET)
    trainer.fit(module, tiny_loader(), ckpt_path=ckpt_path)
    return module, trainer


def assert_same(module: Builds, whole: Builds) -> None:
    expected = whole.state_dict()
    assert module.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())


def test_a_resumed_run_trains_a_layer_that_the_hook_builds(tmp_path: Path) -> None:
    whole, _ = fit(3)
    _, trainer = fit(1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    resumed, trainer = fit(3, tmp_path / "a.ckpt")
    assert_same(resumed, whole)
    trained = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert trained == {id(parameter) for parameter in resumed.parameters()}


class Returns(fx.Callback):
    """Calls the hook as a rollback to in-memory checkpoints does."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        load_hook_entries(trainer.session, {}, hook_entries(trainer.session))


def test_a_rollback_keeps_the_weights_and_buffers_of_a_layer_that_the_hook_builds() -> None:
    whole, _ = fit(3)
    returned, _ = fit(3, None, Returns())
    assert_same(returned, whole)


def test_values_that_a_hook_sets_are_kept() -> None:
    module = Builds()
    module.setup("fit")
    former, head = module.layer.weight, module.head[0].weight
    for keep_layers in (True, False):
        with same_parameters(module, keep_layers=keep_layers):
            module.layer.weight = nn.Parameter(torch.full_like(former, 7.0))
        assert module.layer.weight is former
        assert former.unique().tolist() == [7.0]
        former.data.zero_()
    with same_parameters(module, keep_layers=False):  # such as pretrained weights that checkpoints omit
        module.build()
        module.head[0].weight.data.fill_(5.0)
    assert module.head[0].weight is head
    assert head.unique().tolist() == [5.0]


def test_a_trained_parameter_with_another_shape_is_refused() -> None:
    module = Builds()
    module.setup("fit")
    module.classes = 3
    refused = pytest.raises(ValueError, match=r"created head.0.weight anew, with another shape.*configure_model")
    with refused, same_parameters(module, keep_layers=True):
        module.build()
    module.head.requires_grad_(False)
    module.classes = 4
    with same_parameters(module, keep_layers=True):
        module.build()
    assert module.head[0].out_features == 4
