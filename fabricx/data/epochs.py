"""Passes the number of an epoch to samplers, data sets and loaders of the user."""

from __future__ import annotations

from typing import Any


def set_epoch(epoch: int, *parts: Any) -> None:
    """Pass the number of an epoch to the objects that have `set_epoch`, and before that to the `sampler` in each.

    Args:
        epoch: epoch that begins.
        *parts: samplers, data sets and loaders.
    """
    for outer in parts:
        for part in (getattr(outer, "sampler", None), outer):
            if callable(method := getattr(part, "set_epoch", None)):
                method(epoch)


def set_epoch_of_loader(epoch: int, loader: Any) -> None:
    """Pass the number of an epoch to a loader, its data set and its samplers.

    Args:
        epoch: epoch that begins.
        loader: a DataLoader, or any iterable.
    """
    set_epoch(epoch, getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None), loader)
