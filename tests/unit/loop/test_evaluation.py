"""Validation, test and prediction do not affect the training."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.callbacks import LambdaCallback
from fabricx.errors import PossibleUserWarning
from fabricx.testing import QUIET, TinyModule, tiny_data, tiny_loader
from tests.unit.trainer.counting import Counts


def test_the_sanity_check_changes_no_state(quiet: dict[str, Any]) -> None:
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


class _Frozen(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.modes = nn.BatchNorm1d(4), []
        self.norm.eval()

    def _note(self) -> None:
        self.modes.append((self.training, self.layer.training, self.norm.training))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._note()
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self._note()

    def validation_step(self, batch: Any) -> None:
        assert {part.training for part in self.modules()} == {False}


def test_each_submodule_keeps_its_mode_in_training_and_after_evaluations(quiet: dict[str, Any]) -> None:
    module, trainer = _Frozen(), fx.Trainer(max_epochs=2, **quiet)
    with pytest.warns(UserWarning, match=r"training begins with 1 module\(s\) in evaluation mode.*: norm\."):
        trainer.fit(module, tiny_loader(), tiny_loader())
    trainer.validate(module, tiny_loader(), verbose=False)
    module._note()
    assert set(module.modes) == {(True, True, False)}
    assert len(module.modes) == 2 * (4 + 1) + 1


@pytest.mark.parametrize("hook", ["setup", "on_fit_start", "on_train_start", "on_train_epoch_start"])
def test_a_mode_set_by_a_hook_is_kept(hook: str, quiet: dict[str, Any]) -> None:
    class Sets(_Frozen):
        def __init__(self) -> None:
            super().__init__()
            self.norm.train()

    setattr(Sets, hook, lambda self, *_: self.norm.eval())
    module = Sets()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        fx.Trainer(max_epochs=2, **quiet).fit(module, tiny_loader(), tiny_loader())
    assert set(module.modes) == {(True, True, False)}


def test_a_module_in_evaluation_mode_stays_in_it(quiet: dict[str, Any]) -> None:
    module = _Frozen()
    module.eval()
    with pytest.warns(
        PossibleUserWarning, match=r"3 module\(s\) in evaluation mode, which is kept: _Frozen, layer, norm"
    ):
        fx.Trainer(max_epochs=1, **quiet).fit(module, tiny_loader(8, 4))
    assert set(module.modes) == {(False, False, False)}


_EVALUATED = ["model_eval", "start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end", "model_train"]


@pytest.mark.parametrize("inference", [True, False], ids=["inference", "no_grad"])
def test_all_hooks_of_an_evaluation_run_without_gradients(inference: bool, quiet: dict[str, Any]) -> None:
    seen: dict[str, tuple[bool, bool]] = {}

    class Records(TinyModule):
        pass

    def note(name: str) -> Any:
        def hook(self: Any, *_: Any) -> None:
            seen[name] = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        return hook

    validated, tested, predicted = (
        [f"on_{word}_{moment}" for moment in _EVALUATED] for word in ("validation", "test", "predict")
    )
    trained = ["on_train_start", "on_train_epoch_end", "on_train_end"]
    for name in (*validated, *tested, *predicted, *trained):
        setattr(Records, name, note(name))
    module, trainer = Records(), fx.Trainer(max_epochs=1, inference_mode=inference, **quiet)
    trainer.fit(module, tiny_loader(8, 4), tiny_loader(4, 4))
    assert seen == dict.fromkeys(validated, (False, False)) | dict.fromkeys(trained, (True, False))
    seen.clear()
    trainer.validate(module, tiny_loader(4, 4), verbose=False)
    trainer.test(module, tiny_loader(4, 4), verbose=False)
    trainer.predict(module, tiny_loader(4, 4))
    assert seen == dict.fromkeys((*validated, *tested, *predicted), (False, inference))


@pytest.mark.parametrize("hook", ["model_eval", "start", "epoch_start", "batch_start"])
def test_a_hook_enables_gradients_for_the_steps_of_an_evaluation(hook: str, quiet: dict[str, Any]) -> None:
    class Forces(TinyModule):
        """Differentiates by the inputs in each evaluation, as models of energies and forces do."""

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self(batch[0].requires_grad_()).sum().backward()
            self.log("force", batch[0].grad.norm())

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.validation_step(batch, batch_idx)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch[0]).requires_grad

    for word in ("validation", "test", "predict"):
        setattr(Forces, f"on_{word}_{hook}", lambda self, *_: torch.set_grad_enabled(True) and None)
    module, trainer = Forces(), fx.Trainer(max_epochs=1, inference_mode=False, **quiet)
    trainer.fit(module, tiny_loader(8, 4), tiny_loader(4, 4))
    assert trainer.global_step == 2
    assert trainer.callback_metrics["force"] > 0
    trainer.test(module, tiny_loader(4, 4), verbose=False)
    assert trainer.predict(module, tiny_loader(4, 4)) == [True]
    assert torch.is_grad_enabled()


class _Caches(TinyModule):
    """Compute a table in the first forward, in the sanity check, and centres in a validation."""

    table: torch.Tensor | None = None
    centre: torch.Tensor | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.ones(4) * 2
        output: torch.Tensor = self.layer(inputs * self.table)
        return output if self.centre is None else output * self.centre

    def on_validation_epoch_end(self) -> None:
        self.centre = torch.ones(1)


def test_training_uses_tensors_that_a_validation_of_the_run_has_made(quiet: dict[str, Any]) -> None:
    trainer = fx.Trainer(max_epochs=2, **quiet)
    trainer.fit(_Caches(), tiny_loader(8, 4), tiny_loader(4, 4))
    assert trainer.global_step == 4


class Echo(TinyModule):
    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        output: torch.Tensor = batch[0]
        return output


def test_predictions_have_the_order_of_the_data(quiet: dict[str, Any]) -> None:
    outputs = fx.Trainer(**quiet).predict(Echo(), tiny_loader(10, 4))
    assert torch.equal(torch.cat(outputs), tiny_data(10).tensors[0])


def test_several_validation_loaders_have_their_own_names(quiet: dict[str, Any]) -> None:
    class Net(TinyModule):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            self.log("which", float(dataloader_idx))
            self.log("all", float(dataloader_idx), add_dataloader_idx=False)

    results = fx.Trainer(**quiet).validate(Net(), [tiny_loader(), tiny_loader()], verbose=False)
    assert results[0]["which/dataloader_idx_0"] == 0.0
    assert results[1]["which/dataloader_idx_1"] == 1.0
    assert results[0]["all"] == 0.5


@pytest.mark.parametrize("wanted", [True, False])
def test_inference_mode_can_be_disabled(wanted: bool) -> None:
    module = Counts()
    fx.Trainer(inference_mode=wanted, **QUIET).validate(module, tiny_loader(), verbose=False)
    assert set(module.grad_modes) == {wanted}


def test_an_evaluation_without_a_batch_has_no_results_and_calls_no_hooks(quiet: dict[str, Any]) -> None:
    called: list[str] = []
    hooks = LambdaCallback(
        on_test_start=lambda *args: called.append("test"), on_validation_start=lambda *args: called.append("validate"),
        on_predict_start=lambda *args: called.append("predict"),
    )  # fmt: skip
    none = fx.Trainer(limit_predict_batches=0, limit_test_batches=0, limit_val_batches=0, callbacks=[hooks], **quiet)
    assert [stage(TinyModule(), tiny_loader()) for stage in (none.validate, none.test, none.predict)] == [[], [], []]
    every = fx.Trainer(callbacks=[hooks], **quiet)
    stages = every.validate, every.test, every.predict
    assert [stage(TinyModule(), []) for stage in stages] == [[], [], []]
    for stage in stages:
        with pytest.warns(PossibleUserWarning, match=r"without a batch: 0 \(DataLoader\)"):
            assert stage(TinyModule(), DataLoader([])) == []  # type: ignore[var-annotated]
    assert called == []


def test_a_fit_whose_validation_loaders_have_no_batch_does_not_validate(quiet: dict[str, Any]) -> None:
    called: list[str] = []
    hooks = LambdaCallback(
        on_sanity_check_start=lambda *args: called.append("sanity"),
        on_validation_start=lambda *args: called.append("start"),
    )
    options: dict[str, Any] = {**quiet, "max_epochs": 1, "callbacks": [hooks]}
    with pytest.warns(PossibleUserWarning, match=r"val_dataloader without a batch: 0 \(DataLoader\), 1 \(DataLoader\)"):
        fx.Trainer(**options).fit(
            TinyModule(), tiny_loader(), [DataLoader([]), DataLoader(tiny_data(3), 4, drop_last=True)]
        )  # type: ignore[var-annotated]
    assert called == []
    with pytest.warns(PossibleUserWarning, match=r"val_dataloader without a batch: 1 \(DataLoader\). The data"):
        fx.Trainer(**options).fit(TinyModule(), tiny_loader(), [tiny_loader(), DataLoader([])])  # type: ignore[var-annotated]
    assert called == ["sanity", "start", "start"]


def test_predict_keeps_the_samples_that_drop_last_would_drop(quiet: dict[str, Any]) -> None:
    loader = DataLoader(tiny_data(10), 4, drop_last=True)
    assert [len(output) for output in fx.Trainer(**quiet).predict(Echo(), loader)] == [4, 4, 2]
    assert [len(output) for output in fx.Trainer(limit_predict_batches=2, **quiet).predict(Echo(), loader)] == [4, 4]


class _Mean(TinyModule):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.log("trained", batch.mean(), on_step=False, on_epoch=True)
        return 0.0 * self.layer.weight.sum()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val", batch.mean())


def test_batches_that_the_data_set_makes_are_weighted_by_their_samples(quiet: dict[str, Any]) -> None:
    """Likewise for a stream without a length: the number of rows is the weight, not the number of items."""
    batches: Any = [torch.zeros(3), torch.ones(1)]
    loader = DataLoader(batches, batch_size=None)
    trainer = fx.Trainer(max_epochs=1, **quiet)
    trainer.fit(_Mean(), loader, loader)
    assert trainer.callback_metrics["val"] == trainer.callback_metrics["trained"] == 0.25
    assert trainer.validate(_Mean(), loader, verbose=False) == [{"val": 0.25}]


def test_predictions_that_are_none_are_a_warning(quiet: dict[str, Any]) -> None:
    class Silent(TinyModule):
        def predict_step(self, batch: Any, batch_idx: int) -> None:
            self(batch[0])

    with pytest.warns(UserWarning, match=r"Silent\.predict_step returned None for 2 of 2 batches"):
        assert fx.Trainer(**quiet).predict(Silent(), tiny_loader(8, 4)) == [None, None]
    fx.Trainer(**quiet).predict(Silent(), tiny_loader(8, 4), return_predictions=False)  # a warning would be an error
