"""A module as a file of ONNX or TorchScript."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fabricx.core.module_hooks import RUN_ATTRIBUTES
from fabricx.core.module_state.evaluation_mode import evaluation_mode
from fabricx.core.tensors.transfer import to_device


def to_onnx(module: Any, file_path: Any, input_sample: Any, **options: Any) -> Any:
    """Write a module as ONNX; see `Module.to_onnx`.

    Args:
        module: module to export.
        file_path: path or open file.
        input_sample: input of `forward`; None for `example_input_array`.
        options: options of `torch.onnx.export`.

    Raises:
        ModuleNotFoundError: onnx is not installed.
        ValueError: there is no example of the input.
    """
    needed = ["onnx", "onnxscript"] if options.get("dynamo", True) else ["onnx"]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(f"to_onnx needs {' and '.join(missing)}: pip install 'fabricx[onnx]'")
    sample = _example(module, input_sample, "to_onnx", "input_sample")
    if isinstance(sample, dict):
        options, sample = {"kwargs": sample, **options}, ()
    target = str(file_path) if isinstance(file_path, Path) else file_path
    with _evaluating(module), torch.no_grad():
        return torch.onnx.export(module, sample if isinstance(sample, tuple) else (sample,), target, **options)


def to_torchscript(module: Any, file_path: Any, method: str, example_inputs: Any, **options: Any) -> Any:
    """Write a module as TorchScript; see `Module.to_torchscript`.

    Args:
        module: module to export.
        file_path: path of the file; None writes no file.
        method: "script" or "trace".
        example_inputs: inputs of `forward`, for a trace; None for `example_input_array`.
        options: options of `torch.jit.script` or `torch.jit.trace`.

    Raises:
        ValueError: the method is unknown, or there is no example of the input.
    """
    if method not in ("script", "trace"):
        raise ValueError(f"to_torchscript(method={method!r}): set 'script' or 'trace'")
    with _evaluating(module), torch.no_grad():
        if method == "script":
            script: Any = torch.jit.script(module, **options)
        else:
            example = _example(module, example_inputs, "to_torchscript(method='trace')", "example_inputs")
            script = torch.jit.trace(module, example_inputs=example, **options)
    if file_path is not None:
        torch.jit.save(script, str(file_path))
    return script


def _example(module: Any, passed: Any, call: str, argument: str) -> Any:
    example = module.example_input_array if passed is None else passed
    if example is None:
        raise ValueError(f"{call} needs an input of forward: pass {argument}=..., or set self.example_input_array")
    return to_device(example, module.device)


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Context in evaluation mode, and without the trainer: torch reads all attributes, also `module.trainer`."""
    of_run = [
        (vars(part), name, vars(part)[name]) for part in module.modules() for name in RUN_ATTRIBUTES
        if name in vars(part)
    ]  # fmt: skip
    for attributes, name, _ in of_run:
        attributes[name] = _NoRun() if name == "_trainer" else None
    try:
        with evaluation_mode(module):
            yield
    finally:
        for attributes, name, value in of_run:
            attributes[name] = value


class _NoRun:
    """In place of the trainer of a module that is exported."""
