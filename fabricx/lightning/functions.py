"""Functions and small classes of Lightning's utilities that projects call."""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fabricx.core.module_state.rng import random_kept
from fabricx.errors import PossibleUserWarning


def grad_norm(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, Tensor]:
    """Return the norm of each parameter's gradient, and of all gradients together.

    Args:
        module: module with gradients, such as in `on_before_optimizer_step`.
        norm_type: 2 or another positive number; "inf" for the maximum.
        group_separator: between the kind of the norm and the name of the parameter.

    Raises:
        ValueError: the norm is not positive.

    >>> layer = nn.Linear(1, 1); layer(torch.ones(1)).backward()
    >>> sorted(grad_norm(layer, 2))
    ['grad_2.0_norm/bias', 'grad_2.0_norm/weight', 'grad_2.0_norm_total']
    """
    kind = float(norm_type)
    if kind <= 0:
        raise ValueError(f"grad_norm(norm_type={norm_type!r}): set a positive number, or 'inf'")
    norms = {
        f"grad_{kind}_norm{group_separator}{name}": parameter.grad.detach().norm(kind)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    if norms:
        norms[f"grad_{kind}_norm_total"] = torch.stack([*norms.values()]).norm(kind)
    return norms


def summary(module: nn.Module, max_depth: int = 1) -> Any:
    """Return the layers of a module with their sizes, as a table of text.

    Args:
        module: any module.
        max_depth: depth of the layers; -1 for all.
    """
    return importlib.import_module("fabricx.callbacks.model_summary").summarize(module, max_depth)


@contextlib.contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """Context that restores all random number generators at its end.

    Args:
        include_cuda: without an effect: the generator of this process's device is restored as well.
    """
    with random_kept():
        yield


def is_overridden(method_name: str, instance: object | None = None, parent: type | None = None) -> bool:
    """Return whether an object's class overrides a method of a contract.

    Args:
        method_name: name of the method.
        instance: module, data module or callback; None is False.
        parent: the contract; by default the first class of fabricx among the classes of the object.

    Raises:
        ValueError: no class of the object is one of fabricx, and there is no `parent`.
    """
    if instance is None:
        return False
    contract = parent or next((c for c in type(instance).__mro__ if c.__module__.startswith("fabricx.core")), None)
    if contract is None:
        raise ValueError(
            f"is_overridden({method_name!r}): {type(instance).__name__} is not a module, data module or callback. "
            "Expected a parent: pass the class with the method"
        )
    method = inspect.getattr_static(instance, method_name, None)
    return method is not None and method is not inspect.getattr_static(contract, method_name, None)


def garbage_collection_cuda() -> None:
    """Collect garbage, and return unused memory of CUDA to the system."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def is_oom_error(exception: BaseException) -> bool:
    """Return whether an error means that a device or the machine has no memory left.

    Args:
        exception: any error.
    """
    text = str(exception)
    return isinstance(exception, (torch.cuda.OutOfMemoryError, MemoryError)) or "out of memory" in text.lower()


def recursive_detach(in_dict: Any, to_cpu: bool = False) -> Any:
    """Return nested mappings with detached tensors.

    Args:
        in_dict: a mapping; other values are returned as they are.
        to_cpu: move the tensors to main memory.
    """
    if isinstance(in_dict, Mapping):
        return {name: recursive_detach(value, to_cpu) for name, value in in_dict.items()}
    if isinstance(in_dict, Tensor):
        return in_dict.detach().cpu() if to_cpu else in_dict.detach()
    return in_dict


def disable_possible_user_warnings(module: str = "") -> None:
    """Ignore warnings about settings and data that are valid, and rarely intended.

    Args:
        module: beginning of the names of modules whose warnings are ignored; "" for all.
    """
    warnings.filterwarnings("ignore", category=PossibleUserWarning, module=module)


class _NameOfAccelerator(type):
    """Class of Lightning's names of accelerators: `isinstance(trainer.accelerator, CPUAccelerator)` compares names."""

    kinds: tuple[str, ...] = ()

    def __instancecheck__(cls, accelerator: Any) -> bool:
        return accelerator in cls.kinds if isinstance(accelerator, str) else cls in type(accelerator).__mro__


class Accelerator(metaclass=_NameOfAccelerator):
    """Type of Lightning's accelerators, for annotations and `isinstance`; `trainer.accelerator` is a name."""

    kinds: tuple[str, ...] = ("cpu", "cuda", "mps")


class CPUAccelerator(Accelerator):
    """`Trainer(accelerator=CPUAccelerator())`, as accelerator="cpu"."""

    kinds = ("cpu",)


class CUDAAccelerator(Accelerator):
    """`Trainer(accelerator=CUDAAccelerator())`, as accelerator="cuda"."""

    kinds = ("cuda",)


class MPSAccelerator(Accelerator):
    """`Trainer(accelerator=MPSAccelerator())`, as accelerator="mps"."""

    kinds = ("mps",)


class SimpleProfiler:
    """`Trainer(profiler=SimpleProfiler())`, as profiler="simple".

    Args:
        dirpath, filename: must be None: the table is printed.
        extended: without an effect; times are in the telemetry of the run.

    Raises:
        ValueError: a file was set.
    """

    def __init__(self, dirpath: Any = None, filename: str | None = None, extended: bool = True) -> None:
        if dirpath is not None or filename is not None:
            raise ValueError(
                f"{type(self).__name__}(dirpath={dirpath!r}, filename={filename!r}): the table is printed, not written "
                'to a file. Remove the arguments; `fabricx report` shows the times, and Trainer(profiler="trace") '
                "writes trace.json in the folder of the run"
            )
        self.recorded_durations: dict[str, list[float]] = {}
        self._begun: dict[str, float] = {}

    @contextlib.contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        """Return a context that measures an action of the program.

        Args:
            action_name: of the action.
        """
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)

    def start(self, action_name: str) -> None:
        """Begin an action.

        Args:
            action_name: of the action.

        Raises:
            ValueError: the action has begun and not ended.
        """
        if action_name in self._begun:
            raise ValueError(f"{type(self).__name__}.start({action_name!r}): the action has begun already; call stop")
        self._begun[action_name] = time.monotonic()

    def stop(self, action_name: str) -> None:
        """End an action.

        Args:
            action_name: of the action.

        Raises:
            ValueError: the action has not begun.
        """
        if action_name not in self._begun:
            raise ValueError(f"{type(self).__name__}.stop({action_name!r}): the action has not begun; call start")
        self.recorded_durations.setdefault(action_name, []).append(time.monotonic() - self._begun.pop(action_name))

    def summary(self) -> str:
        """Return a line with the calls and the seconds of each action that the program has measured."""
        return "\n".join(
            f"{name}: {len(times)} calls, {sum(times):.4g} s" for name, times in self.recorded_durations.items()
        )

    def describe(self) -> None:
        """Print the summary."""
        print(self.summary())


class PassThroughProfiler(SimpleProfiler):
    """`Trainer(profiler=PassThroughProfiler())`, as profiler=None; measures nothing."""

    def start(self, action_name: str) -> None:
        """Do nothing.

        Args:
            action_name: unused.
        """

    def stop(self, action_name: str) -> None:
        """Do nothing.

        Args:
            action_name: unused.
        """


def cli_lightning_logo() -> None:
    """Do nothing; Lightning's examples call it, and it prints their logo."""


def get_filesystem(path: str | os.PathLike[str], **options: Any) -> Any:
    """Return the file system of fsspec of a path or a URL.

    Args:
        path: path or URL.
        options: of the file system, such as credentials.

    >>> get_filesystem("runs/last.ckpt").protocol
    ('file', 'local')
    """
    from upath import UPath

    return UPath(str(path), **options).fs


def get_human_readable_count(number: int) -> str:
    """Format a count as Lightning's function does: with one decimal below 100 of its unit, which is always written.

    Args:
        number: 0 or more.

    >>> get_human_readable_count(123), get_human_readable_count(12_345), get_human_readable_count(123_456)
    ('123  ', '12.3 K', '123 K')
    """
    units = (" ", "K", "M", "B", "T")
    group = min((len(str(number)) - 1) // 3, len(units) - 1)
    amount = number / 1000**group
    return f"{int(amount):,d} {units[group]}" if not group or amount >= 100 else f"{amount:,.1f} {units[group]}"
