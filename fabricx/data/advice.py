"""Warnings about data loaders that a run ignores or shuffles; none of them is an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from torch.utils.data import RandomSampler

from fabricx.core.options.trainer_options import DEFAULT_EPOCHS
from fabricx.errors import PossibleUserWarning


def _warn(text: str) -> None:
    warnings.warn(text, PossibleUserWarning, stacklevel=5)


def advise_on_validation(defined: bool, loaders: Any, limit: int | float) -> None:
    """Warn about a validation that a fit doesn't run.

    Args:
        defined: whether the module has a `validation_step`.
        loaders: validation loaders; None without.
        limit: `limit_val_batches`.
    """
    if limit == 0:
        return
    if defined and loaders is None:
        _warn("the module has a validation_step, and there is no val_dataloader: no validation runs")
    elif not defined and loaders is not None:
        _warn("there is a val_dataloader, and the module has no validation_step: no validation runs")


def advise_on_batches(word: str, loaders: Iterable[Any], batches: Iterable[int | float]) -> None:
    """Warn about evaluation loaders without a batch.

    Args:
        word: "val", "test" or "predict".
        loaders: loaders of the evaluation.
        batches: number of batches of each.
    """
    counted = enumerate(zip(loaders, batches, strict=True))
    if empty := [f"{number} ({type(loader).__name__})" for number, (loader, count) in counted if not count]:
        _warn(
            f"loaders of {word}_dataloader without a batch: {', '.join(empty)}. The data set is empty, or smaller than "
            "a batch with drop_last=True. If no loader has a batch, no hook of the evaluation is called"
        )


def advise_on_shuffling(word: str, loaders: Iterable[Any]) -> None:
    """Warn about evaluation loaders that shuffle.

    Args:
        word: "val", "test" or "predict".
        loaders: loaders of the evaluation.
    """
    if any(isinstance(getattr(loader, "sampler", None), RandomSampler) for loader in loaders):
        _warn(
            f"the {word}_dataloader shuffles: its batches differ in each evaluation. Set shuffle=False in loaders of "
            "validation, test and predict"
        )


def advise_on_overfitting(loaders: Iterable[Any]) -> None:
    """Warn about loaders that would shuffle, which `overfit_batches` reads without shuffling.

    Args:
        loaders: loaders of a fit.
    """
    if any(isinstance(getattr(loader, "sampler", None), RandomSampler) for loader in loaders):
        _warn("overfit_batches: a loader with shuffle=True is not shuffled, so that each epoch has the same batches")


def advise_on_length(limited: bool, epochs: int | None) -> None:
    """Warn about a fit without a limit of epochs, steps or time.

    Args:
        limited: whether the Trainer was given a limit of epochs, steps or time.
        epochs: `max_epochs`; other than the default if it was assigned later.
    """
    if not limited and epochs == DEFAULT_EPOCHS:
        _warn(f"max_epochs is not set: training ends after {epochs} epochs. Set max_epochs, or -1 for no limit")


def advise_on_logging(batches: int | float, every: int, loggers: Sequence[Any]) -> None:
    """Warn about a logging interval that is longer than an epoch.

    Args:
        batches: batches of an epoch on this rank.
        every: `log_every_n_steps`.
        loggers: the run's loggers.
    """
    if loggers and 0 < batches < every:
        _warn(
            f"the number of training batches ({batches}) is smaller than log_every_n_steps={every}, so loggers "
            "receive values of epochs only. Set a smaller log_every_n_steps for values of single steps"
        )
