"""Signatures of user hooks: fewer parameters than a hook has arguments, and unknown parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

import fabricx as fx
from fabricx.core.callback import Callback
from fabricx.core.hook_calls.hooks import check_hooks
from fabricx.core.hook_calls.signatures import fitting, unknown_parameters
from fabricx.testing import TinyModule, tiny_loader

NAMES = ("outputs", "batch", "batch_idx", "dataloader_idx")


@pytest.mark.parametrize(
    ("method", "received"),
    [
        (lambda outputs, batch, batch_idx, dataloader_idx=0: (outputs, batch, batch_idx, dataloader_idx), (1, 2, 3, 4)),
        (lambda outputs, batch, batch_idx: (outputs, batch, batch_idx), (1, 2, 3)),
        (lambda outputs: outputs, 1),
        (lambda: None, None),
        (lambda *args: args, (1, 2, 3, 4)),
        (lambda outputs, *args: (outputs, args), (1, (2, 3, 4))),
        (lambda outputs, **options: (outputs, options), (1, {})),
        (lambda outputs, *, batch_idx, other=None: (outputs, batch_idx, other), (1, 3, None)),
        (lambda *args, dataloader_idx=7: (args, dataloader_idx), ((1, 2, 3, 4), 7)),
    ],
)
def test_a_hook_receives_only_its_declared_arguments(method: Callable[..., Any], received: Any) -> None:
    assert fitting(method, NAMES)(1, 2, 3, 4) == received


def test_functions_without_a_signature_get_all_arguments() -> None:
    mock = Mock()
    fitting(mock, NAMES)(1, 2, 3, 4)
    mock.assert_called_once_with(1, 2, 3, 4)
    assert fitting(max, ["a", "b"])(1, 2) == 2
    assert unknown_parameters(max, []) == []


class Shorter(TinyModule):
    """Overrides hooks with fewer parameters, and calls the contract's methods as Lightning's users do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def setup(self) -> None:  # type: ignore[override]
        super().setup("fit")

    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        return super().training_step(batch, 0)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:  # type: ignore[override]
        self.seen.add(f"validation of {dataloader_idx}")

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        super().on_validation_batch_start(batch, batch_idx)
        self.seen.add("start")

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, **rest: Any) -> None:
        super().on_validation_batch_end(outputs, batch, batch_idx, **rest)
        self.seen.add("end")

    def on_train_batch_start(self, batch: Any, batch_idx: int, unused: int = 0) -> Any:
        return super().on_train_batch_start(batch, batch_idx)

    def on_train_batch_end(self) -> None:  # type: ignore[override]
        self.seen.add("train end")

    def on_validation_model_eval(self) -> None:
        super().on_validation_model_eval()
        self.seen.add(f"training: {self.layer.training}")

    def on_validation_model_train(self) -> None:
        super().on_validation_model_train()
        self.seen.add(f"afterwards: {self.layer.training}")

    def on_validation_model_zero_grad(self) -> None:
        super().on_validation_model_zero_grad()
        self.seen.add(f"gradient: {self.layer.weight.grad}")

    def transfer_batch_to_device(self, batch: Any, device: Any) -> Any:  # type: ignore[override]
        return super().transfer_batch_to_device(batch, device, 0)

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
        self.clip_gradients(optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm="norm")
        self.seen.add(f"norm {float(self.layer.weight.grad.norm()) <= 0.0100001}")  # type: ignore[union-attr]

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:  # type: ignore[override]
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure=optimizer_closure)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        super().lr_scheduler_step(scheduler, metric)

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["mine"] = 1


class Data(fx.DataModule):
    def setup(self) -> None:  # type: ignore[override]
        super().setup("fit")
        self.transferred = 0

    def train_dataloader(self) -> Any:
        return tiny_loader()

    def val_dataloader(self) -> Any:
        return tiny_loader()

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.transferred += 1
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any) -> Any:  # type: ignore[override]
        return super().on_after_batch_transfer(batch, 0)

    def teardown(self) -> None:  # type: ignore[override]
        super().teardown("fit")
        self.over = True


class Watches(Callback):
    def setup(self, trainer: Any, module: Any) -> None:  # type: ignore[override]
        super().setup(trainer, module, "fit")
        self.ends = 0

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any) -> None:  # type: ignore[override]
        self.ends += 1


def test_hooks_with_fewer_parameters_run_in_module_data_module_and_callback(quiet: dict[str, Any]) -> None:
    module, data, callback = Shorter(), Data(), Watches()
    fx.Trainer(max_epochs=1, gradient_clip_val=0.01, callbacks=callback, **quiet).fit(module, datamodule=data)
    assert module.seen == {
        "validation of 0", "start", "end", "train end", "training: False", "afterwards: True", "gradient: None",
        "norm True",
    }  # fmt: skip
    assert data.transferred > 0
    assert data.over
    assert callback.ends > 0


def _module_with(name: str, method: Callable[..., Any]) -> Any:
    return type("Mine", (TinyModule,), {name: method})()


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        (
            "training_step",
            lambda self, batch, batch_idx, optimizer_idx: None,
            "'optimizer_idx'.*automatic_optimization",
        ),
        ("training_step", lambda self, batch, batch_idx, hiddens: None, "'hiddens', which fabricx doesn't pass"),
        ("optimizer_step", lambda self, epoch, batch_idx, optimizer, optimizer_idx, closure: None, "'optimizer_idx'"),
        ("validation_step", lambda self, dataloader_iter: None, "'dataloader_iter'.*passes batches"),
        ("on_train_epoch_end", lambda self, outputs: None, "'outputs'.*append what it needs to a list"),
        ("on_train_batch_start", lambda self, batch, batch_idx, dataloader_idx: None, "parameter 'dataloader_idx'"),
        ("on_fit_start", lambda self, *, stage: None, r"has the required parameter 'stage', but is called with \(\)"),
    ],
)
def test_a_parameter_that_no_hook_has_is_refused(name: str, method: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"Mine.{name}.*{message}"):
        check_hooks(_module_with(name, method))
