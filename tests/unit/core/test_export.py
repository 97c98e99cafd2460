"""Export of a module with TorchScript; ONNX needs packages that tests do not install."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fabricx as fx


class Net(fx.Module):
    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Sequential(nn.Linear(3, size), nn.Dropout(0.9))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", ["script", "trace"])
def test_a_script_module_computes_what_the_module_computes_in_evaluation(method: str, tmp_path: Path) -> None:
    module, inputs = Net(), torch.randn(4, 3)
    module.trainer = trainer = SimpleNamespace(module=module, logger=None)  # type: ignore[assignment]
    module.example_input_array = inputs
    script = module.to_torchscript(tmp_path / "net.pt", method=method)
    assert module.training
    assert module.trainer is trainer
    loaded = torch.jit.load(str(tmp_path / "net.pt"))
    module.eval()
    assert torch.equal(loaded(inputs), module(inputs))
    assert torch.equal(script(inputs), module(inputs))


def test_missing_parts_of_an_export_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"pass example_inputs=\.\.\., or set self.example_input_array"):
        Net().to_torchscript(method="trace")
    with pytest.raises(ValueError, match=r"method='compile'\): set 'script' or 'trace'"):
        Net().to_torchscript(method="compile")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"onnx and onnxscript: pip install 'fabricx\[onnx\]'"):
        Net().to_onnx("net.onnx", torch.ones(1, 3))
    with pytest.raises(ModuleNotFoundError, match="to_onnx needs onnx: pip"):
        Net().to_onnx("net.onnx", torch.ones(1, 3), dynamo=False)


@pytest.mark.parametrize(
    ("sample", "passed"),
    [(torch.ones(1, 3), ((1, 3),)), ((torch.ones(2, 3),), ((2, 3),)), ({"inputs": torch.ones(3, 3)}, ())],
)
def test_onnx_is_torchs_export_of_the_module_in_evaluation(
    sample: Any, passed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def export(module: Any, args: Any, target: Any, **options: Any) -> str:
        calls.append((module.training, tuple(tuple(tensor.shape) for tensor in args), target, sorted(options)))
        return "program"

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.onnx, "export", export)
    module = Net()
    module.example_input_array = sample
    assert module.to_onnx(Path("net.onnx"), dynamo=False) == "program"
    named = ["dynamo", "kwargs"] if isinstance(sample, dict) else ["dynamo"]
    assert calls == [(False, passed, "net.onnx", named)]
    assert module.training
