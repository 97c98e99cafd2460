"""Functions of `lightning.fabric.utilities` that loggers and data of projects use."""

from __future__ import annotations

import inspect
import os
import random
from argparse import Namespace
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import asdict, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fabricx.checkpoint.hyperparameters import builtin


def convert_params(params: Mapping[str, Any] | Namespace | None) -> Any:
    """Return hyperparameters as a dict.

    Args:
        params: a mapping, a namespace, or None.
    """
    return vars(params) if isinstance(params, Namespace) else {} if params is None else params


def flatten_dict(params: Mapping[Any, Any], delimiter: str = "/", parent_key: str = "") -> dict[str, Any]:
    """Return nested mappings as one dict, with joined keys.

    >>> flatten_dict({"net": {"sizes": [1, 2]}, "parts": [{"a": 1}]})
    {'net/sizes': [1, 2], 'parts/0/a': 1}

    Args:
        params: nested mappings.
        delimiter: between the keys.
        parent_key: first part of all keys.
    """
    flat: dict[str, Any] = {}
    for name, given in params.items():
        key = f"{parent_key}{delimiter}{name}" if parent_key else str(name)
        value = asdict(given) if is_dataclass(given) and not isinstance(given, type) else given
        value = vars(value) if isinstance(value, Namespace) else value
        if isinstance(value, MutableMapping):
            flat |= flatten_dict(value, delimiter, key)
        elif isinstance(value, list) and all(isinstance(item, MutableMapping) for item in value):
            for index, item in enumerate(value):
                flat |= flatten_dict(item, delimiter, f"{key}/{index}")
        else:
            flat[key] = value
    return flat


def sized_len(dataloader: Any) -> int | None:
    """Return the number of batches of a loader; None for a loader without a length.

    >>> sized_len([1, 2]), sized_len(iter([1]))
    (2, None)

    Args:
        dataloader: a loader or another iterable.
    """
    try:
        return len(dataloader)
    except (TypeError, NotImplementedError):
        return None


def sanitize_callable_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters with the names of classes, and the results or names of functions.

    Args:
        params: by name.
    """

    def named(value: Any) -> Any:
        if inspect.isclass(value):
            return value.__name__
        if not callable(value):
            return value
        try:
            result = value()
        except Exception:  # a function that needs arguments
            return getattr(value, "__name__", None)
        return value.__name__ if callable(result) else result

    return {name: named(value) for name, value in params.items()}


def sanitize_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters with the text of all that is not a number, text or tensor.

    >>> sanitize_params({"lr": 0.1, "sizes": [1, 2]})
    {'lr': 0.1, 'sizes': '[1, 2]'}

    Args:
        params: by name.
    """
    plain = {name: value if isinstance(value, Tensor) else builtin(value) for name, value in params.items()}
    known = (bool, int, float, str, Tensor)
    return {name: value if type(value) in known else str(value) for name, value in plain.items()}


def add_prefix(metrics: Mapping[str, Any], prefix: str, separator: str) -> Mapping[str, Any]:
    """Return metrics with a prefix before each name.

    Args:
        metrics: by name.
        prefix: "" for none.
        separator: between prefix and name.
    """
    return {f"{prefix}{separator}{name}": value for name, value in metrics.items()} if prefix else metrics


def load_file(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """Return the content of a file of torch.

    Args:
        path_or_url: path, URL of fsspec, or open file.
        map_location: device of the tensors.
        weights_only: False reads objects of any class, which runs code that the file names.
    """
    from fabricx.lightning.functions import get_filesystem

    safely = weights_only is not False
    if not isinstance(path_or_url, (str, os.PathLike)):
        return torch.load(path_or_url, map_location=map_location, weights_only=safely)
    with get_filesystem(path_or_url).open(str(path_or_url), "rb") as file:
        return torch.load(file, map_location=map_location, weights_only=safely)


def convert_tensors_to_scalars(data: Any) -> Any:
    """Return nested data with numbers in the place of tensors of one element.

    Args:
        data: nested dicts, lists and tuples.

    Raises:
        ValueError: a tensor has several elements.
    """

    def number(value: Tensor) -> Any:
        if value.numel() != 1:
            raise ValueError(f"the metric {value} has {value.numel()} elements: log a single number")
        return value.item()

    return _mapped(data, number)


def _mapped(data: Any, convert: Callable[[Tensor], Any]) -> Any:
    if isinstance(data, Tensor):
        return convert(data)
    if isinstance(data, Mapping):
        return {name: _mapped(value, convert) for name, value in data.items()}
    return type(data)(_mapped(value, convert) for value in data) if type(data) in (list, tuple) else data


def suggested_max_num_workers(local_world_size: int) -> int:
    """Return a number of loader processes for each rank: the processors of this machine, divided by its ranks.

    Args:
        local_world_size: ranks on this machine.

    Raises:
        ValueError: there is no rank.
    """
    if local_world_size < 1:
        raise ValueError(f"local_world_size={local_world_size}: set 1 or more")
    return max(1, len(os.sched_getaffinity(0)) // local_world_size - 1)


def worker_init_function(worker_id: int, rank: int | None = None) -> None:
    """Seed Python's and numpy's generators in a loader process, for a DataLoader outside of a Trainer.

    Args:
        worker_id: number of the process.
        rank: rank to which the process belongs.
    """
    seed = torch.initial_seed()  # torch adds the number of the process
    drawn = np.random.SeedSequence([seed % 2**63, worker_id, rank or 0]).generate_state(5)
    np.random.seed(drawn[:4])
    random.seed(int(drawn[4]))


def is_initialized() -> bool:
    """Return whether the default process group of torch exists."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
