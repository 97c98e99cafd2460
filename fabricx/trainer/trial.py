"""Two samples of the training data, and the step on them, for strategies that divide the module by a trial run."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from fabricx.core.rng import random_kept
from fabricx.core.steps import wrap_steps
from fabricx.core.trial import Trial, Validation
from fabricx.data.combined import CombinedLoader

if TYPE_CHECKING:
    from fabricx.session.session import Session


def trial_of(session: Session) -> Trial:
    """Return the training step on two samples.

    Args:
        session: session of a fit, after its data was loaded.

    Raises:
        ValueError: reading samples would change the loader's state.
    """
    with random_kept():
        batch = session.to_device(two_samples(session.data.train_dataloader), 0)
    step = wrap_steps(session.module, session.precision, several_loaders=False)["training"]
    samples, rows = _sizes(session.data.train_dataloader)
    undisturbed = functools.partial(_undisturbed, session)
    validation = functools.partial(_validation_of, session)
    return Trial(step, batch, undisturbed, samples, rows, session.weigh, validation)


def _validation_of(session: Session) -> Validation | None:
    """Return the validation step on two samples, if it can be called before a validation begins.

    It belongs to a copy of the module, since validation steps add to lists and metrics of the module.
    """
    loaders = session.data.val_dataloaders
    loader = loaders[0] if isinstance(loaders, (list, tuple)) and session.data.several_loaders else loaders
    if not session.data.val_feeds:
        return None
    several = session.data.several_loaders
    try:
        with random_kept():
            copied = copy.deepcopy(session.module, {id(p): p for p in session.module.parameters()}).eval()
            batch = session.to_device(two_samples(loader), 0)
        computes = wrap_steps(copied, session.precision, several_loaders=several)["validation"]

        def step(*args: Any) -> Any:
            vars(copied).update({name: vars(session.module)[name] for name in ("_trainer", "_log_to")})
            return computes(*args)

        validation = Validation(copied, step, (batch, 0, 0) if several else (batch, 0))
        with torch.no_grad(), _undisturbed(session):
            validation.step(*validation.args)
    except Exception:  # such as a step that needs a hook of the validation: errors appear in the validation itself
        return None
    return validation


def _sizes(loader: Any) -> tuple[int | None, int]:
    """Return the number of samples of `two_samples`, None if unknown, and of a batch of the loader."""
    known = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    rows = known if isinstance(known, int) else 2
    mapped = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    return (2 if mapped and known else None), rows


@contextlib.contextmanager
def _undisturbed(session: Session) -> Iterator[None]:
    """Context of a trial: discards logged values, and restores buffers and random numbers."""
    buffers = [(buffer, buffer.clone()) for buffer in session.module.buffers()]
    logbook, before = session.metrics.training, vars(session.module).get("_log_to")
    session.metrics.collect(logbook)
    try:
        with random_kept(), logbook.muted():
            yield
    finally:
        session.metrics.collect(before)
        for buffer, value in buffers:
            buffer.data.copy_(value)  # not counted as a change: a backward that follows may need the buffer


def two_samples(loader: Any) -> Any:
    """Return a batch of two samples, or the first batch of data that are batches already; no state changes.

    Args:
        loader: loader of the training data.

    Raises:
        ValueError: reading would change the loader's state.
    """
    if isinstance(loader, CombinedLoader):
        raise ValueError(
            "model parallelism runs the training step on two samples before training, and can't take these from "
            "several loaders: combine the data sets in one DataLoader"
        )
    if isinstance(loader, DataLoader):
        return _of_dataset(loader)
    if isinstance(loader, Sequence):
        return loader[0]
    return next(iter(_copied(loader)))


def _of_dataset(loader: DataLoader[Any]) -> Any:
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        items = list(itertools.islice(iter(_copied(dataset)), 2))
        if not items:
            raise ValueError(f"{type(dataset).__name__} has no sample to train on")
    else:
        items = [dataset[index] for index in _first_keys(loader)]
    return loader.collate_fn(items) if loader.batch_size is not None or loader.batch_sampler else items[0]


def _first_keys(loader: DataLoader[Any]) -> list[Any]:
    """Return the keys of two samples: 0 and 1, or the first keys of the loader's own sampler."""
    dataset: Any = loader.dataset
    if isinstance(dataset, Mapping) or not hasattr(dataset, "__len__"):
        return list(itertools.islice(iter(_copied(loader.sampler)), 2))
    return [0, min(1, len(dataset) - 1)]


def _copied(source: Any) -> Any:
    """Return a copy of a stream; the position of the original does not change."""
    try:
        return copy.deepcopy(source)
    except Exception as error:
        raise ValueError(
            "model parallelism runs the training step on two samples before training, and can't take these from "
            f"{type(source).__name__} without a change of its position, because it can't be copied: {error}. Pass a "
            "DataLoader of a map-style data set"
        ) from error
