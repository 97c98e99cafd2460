"""The loop of a fit: the order of hooks, the end, and the continuation bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fabricx as fx
from fabricx.core.callback import Callback
from fabricx.testing import TinyModule, tiny_loader


class Recorder(Callback):
    def __init__(self) -> None:
        self.calls: list[str] = []


def _record(name: str) -> Any:
    def hook(self: Recorder, *args: Any) -> None:
        self.calls.append(name)

    return hook


for _name in [n for n in vars(Callback) if n.startswith("on_")] + ["setup", "teardown"]:
    setattr(Recorder, _name, _record(_name))


def test_hooks_run_in_the_documented_order(quiet: dict[str, Any]) -> None:
    recorder = Recorder()
    trainer = fx.Trainer(max_epochs=1, limit_val_batches=1, callbacks=[recorder], **quiet)
    trainer.fit(TinyModule(), tiny_loader(8, 4), tiny_loader(4, 4))
    validation = [
        "on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end",
        "on_validation_epoch_end", "on_validation_end",
    ]  # fmt: skip
    batch = [
        "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
        "on_before_optimizer_step", "on_train_batch_end",
    ]  # fmt: skip
    assert recorder.calls == [
        "setup", "on_fit_start", "on_sanity_check_start", *validation, "on_sanity_check_end", "on_train_start",
        "on_train_epoch_start", *batch, *batch, *validation, "on_train_epoch_end", "on_train_end", "on_fit_end",
        "teardown",
    ]  # fmt: skip


def test_a_generator_that_is_used_up_is_an_error_and_no_endless_run(quiet: dict[str, Any]) -> None:
    trainer = fx.Trainer(max_steps=10, **quiet)
    with pytest.raises(ValueError, match=r"generator yielded no batch in epoch 1.* can be iterated only once"):
        trainer.fit(TinyModule(), (batch for batch in tiny_loader(8, 4)))
    assert trainer.global_step == 2


def test_a_second_fit_does_nothing_at_the_limit_and_goes_on_when_it_is_raised(quiet: dict[str, Any]) -> None:
    trainer = fx.Trainer(max_epochs=1, **quiet)
    module = TinyModule()
    trainer.fit(module, tiny_loader())
    trainer.fit(module, tiny_loader())
    assert trainer.global_step == 4
    trainer.max_epochs = 2
    trainer.fit(module, tiny_loader())
    assert (trainer.global_step, trainer.current_epoch) == (8, 2)


class _Dropout(TinyModule):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(nn.functional.dropout(inputs, 0.5))
        return output


def test_a_stopped_run_goes_on_bit_for_bit(quiet: dict[str, Any], tmp_path: Path) -> None:
    def run(steps: int, path: Path | None) -> tuple[fx.Trainer, _Dropout]:
        torch.manual_seed(1)
        module = _Dropout()
        trainer = fx.Trainer(max_epochs=3, max_steps=steps, accumulate_grad_batches=2, **quiet)
        trainer.fit(module, tiny_loader(30, 4, shuffle=True), ckpt_path=path)
        return trainer, module

    _, whole = run(-1, None)
    for steps in (3, 4, 5):
        stopped, _ = run(steps, None)
        path = stopped.save_checkpoint(tmp_path / f"at-{steps}")
        torch.manual_seed(77)
        _, resumed = run(-1, path)
        assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
