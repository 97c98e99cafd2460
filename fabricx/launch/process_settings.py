"""Settings of the user's process that its workers copy, because they do not execute the script."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from fabricx import by_value

_CUDNN: Final = ("enabled", "benchmark", "deterministic", "allow_tf32")
# Paths of backends with `fp32_precision`; a backend precedes its parts, which take its value.
_PRECISIONS: Final = (
    "", "cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn", "mkldnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn"
)  # fmt: skip
_KERNELS: Final = ("flash", "mem_efficient", "math", "cudnn")  # of F.scaled_dot_product_attention
_MATMUL: Final = (
    "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction", "allow_fp16_accumulation"
)  # fmt: skip


@dataclass(frozen=True)
class ProcessSettings:
    """Environment, warning filters and global settings of Python, numpy and torch, as they were when a run started.

    Attributes:
        environment: environment variables.
        ignored: the filters of `warnings` that ignore a warning.
        dtype: default dtype of floating-point tensors.
        matmul: precision of float32 matrix products by torch's older setting; None if the program uses the newer.
        precisions: `fp32_precision` of the backends, by the path in `torch.backends`.
        kernels: kernels that attention may use, by name.
        products: flags of `torch.backends.cuda.matmul`, by name.
        deterministic: "", "warn" or "error": whether operations without a deterministic algorithm are refused.
        anomalies: whether backward detects anomalies.
        sharing: how torch shares tensors of processes.
        cudnn: flags of `torch.backends.cudnn`, by name.
        recursion: greatest depth of Python's stack.
        numerics: what numpy does in case of an error of floating-point numbers (`np.seterr`); a warning in place of a
            call of a function of the script (`np.seterrcall`).
    """

    environment: dict[str, str] = field(repr=False)
    ignored: tuple[Any, ...]
    dtype: torch.dtype
    matmul: str | None
    precisions: dict[str, str]
    kernels: dict[str, bool]
    products: dict[str, bool]
    deterministic: str
    anomalies: bool
    sharing: str
    cudnn: dict[str, bool]
    recursion: int
    numerics: dict[str, Any]

    @classmethod
    def of_this_process(cls) -> ProcessSettings:
        """Return the settings of this process."""
        return cls(
            dict(os.environ),
            tuple(rule for rule in warnings.filters if rule[0] == "ignore" and by_value.is_importable(rule[2])),
            torch.get_default_dtype(),
            _matmul(),
            _precisions(),
            _kernels(),
            {name: getattr(torch.backends.cuda.matmul, name) for name in _MATMUL},
            _determinism(),
            torch.is_anomaly_enabled(),
            torch.multiprocessing.get_sharing_strategy(),
            _cudnn(),
            sys.getrecursionlimit(),
            {kind: "warn" if how in ("call", "log") else how for kind, how in np.geterr().items()},
        )

    def apply(self) -> None:
        """Apply the settings that differ in this process."""
        if dict(os.environ) != self.environment:
            os.environ.clear()
            os.environ.update(self.environment)
        for rule in reversed(self.ignored):
            if rule not in warnings.filters:
                warnings.filters.insert(0, rule)  # type: ignore[attr-defined]
        torch.set_default_dtype(self.dtype)
        if self.matmul is not None and _matmul() != self.matmul:
            torch.set_float32_matmul_precision(self.matmul)
        for path, precision in self.precisions.items():
            if _backend(path).fp32_precision != precision:
                _backend(path).fp32_precision = precision
        for name, flag in self.kernels.items():
            if _kernels()[name] != flag:
                getattr(torch.backends.cuda, f"enable_{name}_sdp")(flag)
        for name, flag in self.products.items():
            if getattr(torch.backends.cuda.matmul, name) != flag:
                setattr(torch.backends.cuda.matmul, name, flag)
        if _determinism() != self.deterministic:  # the call imports torch's compiler, in about a second
            torch.use_deterministic_algorithms(bool(self.deterministic), warn_only=self.deterministic == "warn")
        torch.autograd.set_detect_anomaly(self.anomalies)
        torch.multiprocessing.set_sharing_strategy(self.sharing)
        for name, flag in self.cudnn.items():
            if _cudnn().get(name) != flag:
                setattr(torch.backends.cudnn, name, flag)
        sys.setrecursionlimit(self.recursion)
        np.seterr(**self.numerics)


def _determinism() -> str:
    if not torch.are_deterministic_algorithms_enabled():
        return ""
    return "warn" if torch.is_deterministic_algorithms_warn_only_enabled() else "error"


def _matmul() -> str | None:
    with contextlib.suppress(RuntimeError):  # the program uses torch's newer settings, which exclude the older
        return torch.get_float32_matmul_precision()
    return None


def _precisions() -> dict[str, str]:
    return {path: _backend(path).fp32_precision for path in _PRECISIONS}


def _backend(path: str) -> Any:
    return functools.reduce(getattr, path.split(".") if path else [], torch.backends)


def _kernels() -> dict[str, bool]:
    return {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in _KERNELS}


def _cudnn() -> dict[str, bool]:
    flags = {}
    for name in _CUDNN:
        with contextlib.suppress(RuntimeError):
            flags[name] = getattr(torch.backends.cudnn, name)
    return flags
