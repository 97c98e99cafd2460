"""Finds the user's loaders for a stage and wraps them into feeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from fabricx.core.schedule import validation_interval
from fabricx.data import Balance, Feed, make_feed
from fabricx.data.own_state import find_generators

if TYPE_CHECKING:
    from fabricx.trainer.run_request import Job
    from fabricx.trainer.trainer import Trainer


def load_data(t: Trainer, job: Job) -> None:
    """Make the feeds of a stage from what was given, the data module, or the module, in this order."""
    stage = job.stage
    if stage == "fit":
        t.train_dataloader = job.train if job.train is not None else _loader(t, "train_dataloader")
        _make_train_feed(t)
        t.overridden.__dict__["given_train"] = job.train
    words = {"fit": "val", "validate": "val", "test": "test", "predict": "predict"}
    given = job.evaluate if job.evaluate is not None else _loader(t, f"{words[stage]}_dataloader")
    if t.overfit_batches and stage == "fit" and given is not None:
        given = t.train_dataloader
    limit = getattr(t, f"limit_{words[stage]}_batches")
    has_step = stage != "fit" or callable(getattr(t.module, "validation_step", None))
    loaders = _several(given) if has_step and limit != 0 else []
    t.val_dataloaders = given
    t.several_loaders = len(loaders) > 1
    t.val_feeds = [_evaluation_feed(t, loader, limit, fixed=stage == "predict") for loader in loaders]
    t.num_val_batches = [feed.batches() for feed in t.val_feeds]
    for loader, batches in zip(loaders, t.num_val_batches, strict=True):
        _check_part(f"limit_{words[stage]}_batches", limit, loader, batches)
    if stage == "fit":
        t.val_every = validation_interval(t)


def reload_loaders(t: Trainer) -> None:
    """Ask the data module or the module for new training batches."""
    if t.overridden.__dict__.get("given_train") is None:
        t.train_dataloader = _loader(t, "train_dataloader")
        _make_train_feed(t)
        t.val_every = validation_interval(t)


def rebuild_feeds(t: Trainer) -> None:
    """Make the feeds anew, after a checkpoint has brought its own seed of the data order."""
    _make_train_feed(t)
    t.val_feeds = (
        [_evaluation_feed(t, loader, t.limit_val_batches) for loader in _several(t.val_dataloaders)]
        if t.val_feeds
        else []
    )
    t.val_every = validation_interval(t)


def sanity_feeds(t: Trainer) -> list[Feed]:
    """Return the validation feeds, cut to the few batches of the sanity check."""
    few = float("inf") if t.num_sanity_val_steps == -1 else t.num_sanity_val_steps
    limit = min(few, t.limit_val_batches) if isinstance(t.limit_val_batches, int) else few
    return [_evaluation_feed(t, loader, limit) for loader in _several(t.val_dataloaders)]


def _loader(t: Trainer, name: str) -> Any:
    for owner in (t.datamodule, t.module):
        found = getattr(owner, name)() if owner is not None else None
        if found is not None:
            return found
    return None


def _make_train_feed(t: Trainer) -> None:
    """Make the feed of training, and count its batches.

    Raises:
        ValueError: there is nothing to train on.
    """
    manual, limit = not t.module.automatic_optimization, t.limit_train_batches
    t.train_feed = _feed(
        t, t.train_dataloader, limit, t.state.ranks, t.strategy.parts, t.balance, manual=manual
    )  # fmt: skip
    t.own_generators = find_generators(t.module, "module") | t.train_feed.generators()
    if t.strategy.parts and (names := [*t.own_generators, *t.train_feed.lost_generators(within=True)]):
        raise ValueError(
            f"deterministic='elastic' gives the same result on any number of ranks, and {', '.join(names)} would go on "
            "on each rank by itself: draw from the global generator of torch, numpy or python, which is seeded for "
            "each part of a global batch"
        )
    count_batches(t)
    batches = t.num_training_batches
    _check_part("overfit_batches" if t.overfit_batches else "limit_train_batches", limit, t.train_dataloader, batches)
    if not batches and limit:
        raise ValueError(
            f"there is no batch to train on: {type(t.train_dataloader).__name__} is empty, or all of it is left out by "
            "drop_last=True (then take a smaller batch_size, or fewer ranks)"
        )


def count_batches(t: Trainer) -> None:
    """Count the batches of an epoch: those of the rank that has most. Their number may depend on the accumulation."""
    feed = t.train_feed
    batches = feed.batches(t.accumulate_grad_batches)
    if not feed.exact_position and t.world.size > 1 and not t.world.newcomer:
        counted = torch.tensor(float(batches), dtype=torch.float64, device=t.world.device)
        most = float(t.world.all_reduce(counted, "max"))
        batches = most if most == float("inf") else int(most)
    t.num_training_batches = batches


def _check_part(name: str, limit: int | float, loader: Any, batches: int | float) -> None:
    """Refuse a part of the batches that is less than one of them.

    Raises:
        ValueError: it is.
    """
    if isinstance(limit, float) and 0 < limit < 1 and not batches and len(loader):
        raise ValueError(f"{name}={limit} of {len(loader)} batches is less than one: give a number of batches (1)")


def _evaluation_feed(t: Trainer, source: Any, limit: int | float, *, fixed: bool = False) -> Feed:
    """Return the feed of a loader for evaluation.

    With `overfit_batches`, validation reads the training batches: on another number of ranks too, these keep the size
    that they had when the run began.
    """
    return _feed(t, source, limit, t.state.ranks if source is t.train_dataloader else 0, fixed=fixed)


def _feed(
    t: Trainer, source: Any, limit: int | float, began_with: int = 0, parts: int = 0, balance: Balance | None = None,
    *, manual: bool = False, fixed: bool = False,
) -> Feed:  # fmt: skip
    if isinstance(limit, float) and limit != float("inf") and not hasattr(source, "__len__"):
        raise ValueError(
            f"a part of the batches ({limit}) needs a loader with a length; {type(source).__name__} has none"
        )
    if isinstance(source, (list, tuple)) and source and all(isinstance(one, DataLoader) for one in source):
        raise ValueError("train on one loader: several training loaders have to be joined into one that yields both")
    if not hasattr(source, "__iter__"):
        raise ValueError(f"{type(source).__name__} is not something to iterate over: give a DataLoader or batches")
    world = t.world
    if world.newcomer:  # until it is one of the group: as many batches as the others count
        world = replace(world, rank=0, size=world.local_size)
    return make_feed(
        source, world, seed=t.state.seed, limit=limit, shard=t.use_distributed_sampler, began_with=began_with,
        company=t.strategy.traits.sharded or manual, parts=parts, dealt=t.strategy.dealer is not None,
        balance=balance, undivided=manual,
        fixed=fixed or (bool(t.overfit_batches) and source is t.train_dataloader),
    )  # fmt: skip


def _several(given: Any) -> list[Any]:
    """Return the loaders: a list of loaders is several, a list of batches is one."""
    if given is None:
        return []
    if isinstance(given, Mapping):
        return list(given.values())
    if isinstance(given, (list, tuple)) and given and all(_is_loader(one) for one in given):
        return list(given)
    return [given]


def _is_loader(value: Any) -> bool:
    batch = isinstance(value, (torch.Tensor, Mapping, list, tuple, str))
    return hasattr(value, "__iter__") and not batch
