from __future__ import annotations

import re
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fabricx as fx
from fabricx.lightning import adapt_module
from fabricx.testing import QUIET

# Attributes of LightningModule that fabricx neither has nor hides, and that work without a trainer of Lightning.
HARMLESS = {
    "CHECKPOINT_HYPER_PARAMS_KEY", "CHECKPOINT_HYPER_PARAMS_NAME", "CHECKPOINT_HYPER_PARAMS_TYPE",
    "configure_sharded_model", "device_mesh", "fabric", "on_gpu", "on_validation_model_zero_grad",
    "remove_ignored_hparams", "to_onnx", "to_tensorrt", "to_torchscript", "toggled_optimizer",
}  # fmt: skip


def data() -> DataLoader[Any]:
    inputs = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 4)


class Part(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        self.log("from_the_part", inputs.mean())
        assert self.trainer.global_step == self.global_step
        return self.layer(inputs)


class Net(L.LightningModule):
    def __init__(self, lr: float = 0.1, *, manual: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.part = Part()
        self.automatic_optimization = not manual
        self.example_input_array = torch.zeros(1, 3)
        self.called: list[str] = []

    def on_train_start(self) -> None:
        super().on_train_start()
        self.called.append(f"start {self.device} {self.current_epoch} {self.global_rank} {self.logger is None}")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = nn.functional.mse_loss(self.part(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"twice": 2 * loss}, on_step=False, on_epoch=True)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=10.0)
        optimizer.step()
        self.lr_schedulers().step()
        return None

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}}


@pytest.mark.parametrize("manual", [False, True])
def test_a_lightning_module_trains_with_its_state_and_its_parts(manual):
    module = Net(0.2, manual=manual)
    before = module.part.layer.weight.detach().clone()
    trainer = fx.Trainer(max_epochs=2, **QUIET)
    trainer.fit(module, data())
    assert trainer.global_step == 6
    assert not module.part.layer.weight.equal(before)
    assert module.called == ["start cpu 0 0 True"]
    assert {"loss", "twice", "from_the_part"} <= trainer.callback_metrics.keys()
    assert module.automatic_optimization is not manual
    assert module.example_input_array.shape == (1, 3)
    assert (module.hparams.lr, module.hparams_initial["lr"]) == (0.2, 0.2)
    assert isinstance(module, Net)
    assert isinstance(module.part, fx.Module)
    assert module.on_gpu is False
    assert module.device_mesh is None


class Backbone(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + 1


class Mixed(L.LightningModule, Backbone):
    pass


def test_the_forward_of_another_base_class_is_kept():
    assert adapt_module(Mixed())(torch.zeros(1)).item() == 1
    assert type(adapt_module(L.LightningModule())).forward is nn.Module.forward


def test_steps_that_the_class_does_not_define_are_missing():
    module = adapt_module(Net())
    assert callable(module.training_step)
    assert not hasattr(module, "validation_step")
    with pytest.raises(ValueError, match="Net has no validation_step"):
        fx.Trainer(**QUIET).validate(Net(), data())


class Iterates(L.LightningModule):
    def training_step(self, dataloader_iter: Any) -> None: ...


class Shards(L.LightningModule):
    def configure_sharded_model(self) -> None: ...


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Iterates, "Iterates.training_step(dataloader_iter): fabricx passes batches"),
        (Shards, "Shards.configure_sharded_model is never called: rename it to configure_model"),
    ],
)
def test_unsupported_methods_are_refused_by_name(module, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        fx.Trainer(**QUIET).fit(module(), data())


def test_attributes_of_lightnings_module_are_not_used():
    kept = {"strict_loading", "training_step", "validation_step", "test_step"}
    public = {name for name in dir(L.LightningModule) if not name.startswith("_")}
    reached = {name for name in public if not hasattr(fx.Module, name)} - kept
    assert reached <= HARMLESS


def test_other_objects_are_returned_unchanged():
    layer = nn.Linear(1, 1)
    assert type(adapt_module(layer)) is nn.Linear
    assert adapt_module(None) is None


def test_a_prediction_by_default_has_the_whole_batch():
    for base in (L.LightningModule, fx.LightningModule):
        count: Any = type("Count", (base,), {"forward": lambda self, batch: len(batch)})
        pairs = DataLoader(TensorDataset(torch.ones(4, 3), torch.ones(4)), 4)
        assert fx.Trainer(**QUIET).predict(count(), pairs) == [2]
