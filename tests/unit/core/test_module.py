"""A module without a trainer, and the state that is sent to a worker with it."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fabricx as fx
from fabricx.core.module import batch_weight
from fabricx.testing import TinyModule, tiny_loader


def test_outside_of_a_run_the_trainer_is_an_error_and_the_counters_are_zero() -> None:
    module = TinyModule()
    assert (module.current_epoch, module.global_step, module.global_rank, module.local_rank) == (0, 0, 0, 0)
    with pytest.raises(RuntimeError, match="TinyModule is not attached to a trainer"):
        module.trainer  # noqa: B018
    with pytest.warns(UserWarning, match=r"self\.log\('loss', \.\.\.\) was called outside of a trainer"):
        module.log("loss", 1.0)
    module.trainer = SimpleNamespace(module=module)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="where metrics can't be logged, such as in predict_step"):
        module.log_dict({"loss": 1.0})


@pytest.mark.parametrize("carry", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_of_a_module_has_its_weights_and_hyperparameters_and_no_trainer(carry: Any) -> None:
    module = TinyModule(lr=0.5)
    module.trainer = SimpleNamespace(lock=open)  # type: ignore[assignment]
    carried = carry(module)
    assert carried.hparams == {"lr": 0.5}
    assert torch.equal(carried.layer.weight, module.layer.weight)
    with pytest.raises(RuntimeError, match="is not attached"):
        carried.trainer  # noqa: B018
    assert module.trainer is not None


def test_device_and_dtype_are_those_of_the_weights() -> None:
    module = fx.Module()
    assert (module.device, module.dtype) == (torch.device("cpu"), torch.float32)
    module.register_buffer("count", torch.zeros(1, dtype=torch.int64, device="meta"))
    module.half = nn.Linear(1, 1, dtype=torch.float16, device="meta")
    assert (module.device, module.dtype) == (torch.device("meta"), torch.float16)


def test_private_names_of_device_and_dtype_are_lightnings_unless_the_module_defines_them() -> None:
    module = fx.LightningModule()
    module.layer = torch.nn.Linear(1, 1, dtype=torch.float64)
    assert (module._device, module._dtype) == (torch.device("cpu"), torch.float64)
    module._device = "mine"  # type: ignore[assignment]
    assert (module._device, module.device) == ("mine", torch.device("cpu"))


def test_a_toggled_optimizer_is_the_only_one_that_trains_and_frozen_weights_stay_frozen() -> None:
    module = TinyModule()
    module.other = nn.Linear(1, 1)
    module.other.bias.requires_grad_(False)
    first, second = (torch.optim.SGD(part.parameters(), 0.1) for part in (module.layer, module.other))
    module.trainer = SimpleNamespace(optimizers=[first, second])  # type: ignore[assignment]

    def trained() -> list[str]:
        return [name for name, parameter in module.named_parameters() if parameter.requires_grad]

    before = trained()
    module.toggle_optimizer(second)
    assert trained() == ["other.weight"]
    module.toggle_optimizer(first)  # without an end of the other
    assert trained() == ["layer.weight", "layer.bias"]
    module.untoggle_optimizer(first)
    assert trained() == before == ["layer.weight", "layer.bias", "other.weight"]


def test_optimizers_and_schedules_are_a_list_if_there_are_several() -> None:
    module, schedule = TinyModule(), SimpleNamespace(scheduler="steps")
    for handles, optimizers, schedules in ((["a"], "a", None), (["a", "b"], ["a", "b"], ["steps", "steps"])):
        trainer = SimpleNamespace(optimizer_handles=handles, optimizers=["plain"] * len(handles))
        trainer.lr_schedulers = [schedule] * (0 if schedules is None else 2)
        module.trainer = trainer  # type: ignore[assignment]
        assert module.optimizers() == optimizers
        assert module.lr_schedulers() == schedules
    assert module.optimizers(use_pl_optimizer=False) == ["plain", "plain"]
    assert TinyModule.automatic_optimization
    with pytest.raises(ValueError, match=r"needs self\.automatic_optimization = False"):
        module.manual_backward(torch.zeros(()))


@pytest.mark.parametrize("weight", [-1.0, math.inf, math.nan])
def test_an_invalid_batch_weight_is_an_error(weight: float) -> None:
    class Weighs(TinyModule):
        def batch_weight(self, batch: Any) -> float:
            return batch

    assert batch_weight(Weighs(), torch.tensor(0)) == 0.0
    with pytest.raises(ValueError, match=r"Weighs\.batch_weight returned .*; return a finite number"):
        batch_weight(Weighs(), weight)


def test_names_of_a_lightning_module_exist(quiet: dict[str, Any]) -> None:
    seen: dict[str, Any] = {}

    class Net(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.other = nn.Linear(1, 1)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.layer, self.other)]

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            first, second = self.optimizers()
            with self.toggled_optimizer(first):
                seen["toggled"] = [self.layer.weight.requires_grad, self.other.weight.requires_grad]
                loss = self.layer(batch[0]).square().mean()
                first.zero_grad()
                self.manual_backward(loss, retain_graph=True)
                self.manual_backward(loss)
                first.step()
            with second.toggle_model(sync_grad=False):
                seen["second"] = [self.layer.weight.requires_grad, self.other.weight.requires_grad]
            seen["after"] = [self.layer.weight.requires_grad, self.other.weight.requires_grad]
            self.log("loss", loss, True, False, True, False, "avg")
            self.log_dict({"a": loss, "b": loss}, False, True, reduce_fx=torch.max, metric_attribute="x")
            self.log("c", loss, enable_graph=True, sync_dist=True, rank_zero_only=False, add_dataloader_idx=True)

    module = Net()
    assert (module.logger, module.loggers, module.on_gpu, module.strict_loading) == (None, [], False, True)
    trainer = fx.Trainer(max_epochs=1, **quiet)
    trainer.fit(module, tiny_loader())
    assert seen == {"toggled": [True, False], "second": [False, True], "after": [True, True]}
    assert set(trainer.progress_bar_metrics) == {"loss"}
    assert {"a", "b", "c"} <= set(trainer.callback_metrics)
    assert "loss" not in trainer.logged_metrics
    assert not module.freeze().training
    assert module.unfreeze().layer.weight.requires_grad


def test_a_group_for_a_logged_value_is_refused(quiet: dict[str, Any]) -> None:
    class Net(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", 1.0, sync_dist_group=object())  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="values are always reduced over all ranks that train"):
        fx.Trainer(max_epochs=1, **quiet).fit(Net(), tiny_loader())


def test_a_checkpoint_is_not_loaded_by_a_call_on_an_object() -> None:
    for owner in (TinyModule(), fx.DataModule()):
        with pytest.raises(TypeError, match=rf"write new = {type(owner).__name__}\.load_from_checkpoint\(\.\.\.\)"):
            owner.load_from_checkpoint("a.ckpt")


def test_gathering_on_a_subset_of_the_ranks_is_refused(quiet: dict[str, Any]) -> None:
    class Gathers(TinyModule):
        def on_train_start(self) -> None:
            self.gathered = self.all_gather(torch.ones(2), group=None)
            with pytest.raises(ValueError, match=r"call torch\.distributed\.all_gather"):
                self.all_gather(torch.ones(2), group="some")

    module = Gathers()
    fx.Trainer(max_steps=1, **quiet).fit(module, tiny_loader())
    assert module.gathered.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({"gradient_clip_val": 0.5}, (0.1,), r"Trainer\(gradient_clip_val=0.5\) and have passed .*=0.1\)"),
        ({}, (0.1, "l2"), r"gradient_clip_algorithm='l2'\): pass 'norm' or 'value'"),
        ({"gradient_clip_val": 0.5}, (0.5, "NORM"), None), ({"gradient_clip_val": 0.5}, (None, "value"), None),
    ],
)  # fmt: skip
def test_two_limits_of_gradients_and_unknown_ways_to_clip_are_refused(
    options: dict[str, Any], arguments: tuple[Any, ...], message: str | None, quiet: dict[str, Any]
) -> None:
    class Clips(TinyModule):
        def configure_gradient_clipping(self, optimizer: Any, *limits: Any) -> None:
            self.clip_gradients(optimizer, *arguments)

    trainer = fx.Trainer(max_steps=1, **quiet, **options)
    with contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message):
        trainer.fit(Clips(), tiny_loader())


def test_values_that_are_no_dict_are_refused_by_log_dict() -> None:
    with pytest.raises(TypeError, match="log_dict got list: pass a dict"):
        TinyModule().log_dict([("a", 1.0)])  # type: ignore[arg-type]
