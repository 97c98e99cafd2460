"""Set-up of a module before the loop: compilation, transfer of batches, parameters on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fabricx as fx
from fabricx.testing import QUIET, TinyModule, tiny_loader
from fabricx.trainer.module_set_up import _place


class Transfers(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append("before")
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append("after")
        return batch


def test_transfer_hooks_run_in_order_for_each_batch() -> None:
    module = Transfers()
    fx.Trainer(max_steps=2, **QUIET).fit(module, tiny_loader())
    assert module.calls == ["before", "after"] * 2


def test_batches_need_no_transfer_on_a_cpu_without_hooks() -> None:
    trainer = fx.Trainer(max_steps=1, **QUIET)
    trainer.fit(TinyModule(), tiny_loader())
    assert trainer.session.transfer is None


def test_a_batch_with_a_custom_to_method_is_moved_on_a_cpu() -> None:
    class CustomBatch:
        def __init__(self, numbers: Any) -> None:
            self.numbers = numbers

        def to(self, device: torch.device) -> CustomBatch:
            return CustomBatch(torch.tensor(self.numbers, device=device))

    class Reads(TinyModule):
        def training_step(self, batch: CustomBatch, batch_idx: int) -> torch.Tensor:
            return self.layer.weight.sum() * batch.numbers.sum()

        def validation_step(self, batch: CustomBatch, batch_idx: int) -> None:
            self.log("sum", batch.numbers.sum())

    trainer = fx.Trainer(max_epochs=1, **QUIET)
    trainer.fit(Reads(), [CustomBatch([1.0]), CustomBatch([2.0])], [CustomBatch([3.0])])
    assert float(trainer.callback_metrics["sum"]) == 3.0


def test_parameters_on_the_meta_device_stay_there() -> None:
    module = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2))
    _place(module, torch.device("cpu"))
    assert [part.weight.is_meta for part in module] == [True, False]


@pytest.mark.parametrize("compiles", [False, True, "before"])
def test_compilation_keeps_the_names_of_the_state(compiles: bool | str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda part, **options: compiled.append(part))
    module = TinyModule()
    names = list(module.state_dict())
    if compiles == "before":
        fx.Trainer(max_steps=1, **QUIET).fit(torch.compile(module), tiny_loader())  # type: ignore[arg-type]
    else:
        fx.Trainer(max_steps=1, compile=bool(compiles), **QUIET).fit(module, tiny_loader())
    assert bool(compiled) is bool(compiles)
    assert list(module.state_dict()) == names
