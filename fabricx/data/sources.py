"""Loaders in the data that a user passes: a single loader, or several side by side or in sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from fabricx.data.combined import CombinedLoader, flat


def training_source(source: Any) -> Any:
    """Return the training data of a run: several loaders become a `CombinedLoader`, a single loader is unchanged.

    Args:
        source: data, as the user has passed them.

    Raises:
        TypeError: a dict or list has loaders and other objects.
        ValueError: a CombinedLoader has limits, or is sequential.
    """
    source = _checked(source)
    if isinstance(source, CombinedLoader) and source.mode == "sequential":
        raise ValueError(
            'CombinedLoader(mode="sequential") is for evaluations: for training choose "min_size", "max_size_cycle" or '
            '"max_size"; or join the data sets by torch.utils.data.ConcatDataset'
        )
    if not isinstance(source, (Mapping, list, tuple)) or not source:
        return source
    if isinstance(source, Mapping) or _has_loaders(source):
        _check_loaders(source)
        return CombinedLoader(source, "max_size_cycle")
    return source


def evaluation_sources(source: Any) -> list[Any]:
    """Return the loaders of an evaluation, in their order; a list of batches is a single loader.

    Args:
        source: data, as the user has passed them; None for none.

    Raises:
        TypeError: a dict or list has loaders and other objects.
        ValueError: a CombinedLoader has limits.
    """
    source = _checked(source)
    if source is None or (isinstance(source, (Mapping, list, tuple)) and not source):
        return []
    if isinstance(source, CombinedLoader):
        return source.flattened if source.mode == "sequential" else [source]
    if isinstance(source, Mapping) and not any(map(is_loader, flat(source))):
        lists = list(source.values())
        if all(isinstance(value, (list, tuple)) for value in lists):  # of batches
            return lists
    if isinstance(source, Mapping) or (isinstance(source, (list, tuple)) and _has_loaders(source)):
        _check_loaders(source)
        return flat(source)
    return [source]


def as_passed(source: Any) -> Any:
    """Return loaders in the user's dicts and lists, also the loaders of a `CombinedLoader`.

    Args:
        source: loader of a run.
    """
    return source.iterables if isinstance(source, CombinedLoader) else source


def is_loader(value: Any) -> bool:
    """Return whether a value can be a loader rather than a batch.

    Args:
        value: value, as the user has passed it.
    """
    batch = isinstance(value, (torch.Tensor, Mapping, list, tuple, str, bytes))
    return hasattr(value, "__iter__") and not batch and not hasattr(value, "shape") and not hasattr(value, "to")


def _has_loaders(source: Any) -> bool:
    """Return whether a list has loaders; a list without loaders is itself a loader, and its items are the batches."""
    known = (DataLoader, IterableDataset, CombinedLoader)
    return all(map(is_loader, source)) or any(isinstance(part, known) for part in flat(source))


def _check_loaders(source: Any) -> None:
    """Refuse objects beside loaders that are no loaders.

    Raises:
        TypeError: an object is no loader.
    """
    for part in flat(source):
        if not is_loader(part) and not isinstance(part, (list, tuple)):
            raise TypeError(
                f"An invalid dataloader was passed in a {type(source).__name__}: found {type(part).__name__} where a "
                "loader is expected. Pass DataLoaders, or other iterables of batches, in dicts and lists"
            )


def _checked(source: Any) -> Any:
    """Return data without limits; a `CombinedLoader` of Lightning becomes a `CombinedLoader` of fabricx.

    Raises:
        ValueError: a CombinedLoader has limits.
    """
    lightning = type(source).__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
    if lightning and type(source).__name__ == "CombinedLoader":
        return CombinedLoader(source.iterables, source._mode)
    if isinstance(source, CombinedLoader) and source.limits is not None:
        raise ValueError(
            f"CombinedLoader.limits = {source.limits} has no effect in a run: set it to None, and "
            "Trainer(limit_train_batches=...), limit_val_batches, limit_test_batches or limit_predict_batches"
        )
    return source
