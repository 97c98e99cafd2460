"""Set-up of the user's loaders: finds the loaders of a stage and builds their feeds."""

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


def load_data(trainer: Trainer, job: Job) -> None:
    """Build the feeds of a stage; loaders of the call precede the data module's and the module's.

    Args:
        trainer: receives loaders, feeds and numbers of batches.
        job: stage and loaders of the call.
    """
    stage = job.stage
    if stage == "fit":
        trainer.train_dataloader = job.train if job.train is not None else _loader(trainer, "train_dataloader")
        _make_train_feed(trainer)
        trainer.overridden.__dict__["given_train"] = job.train
    words = {"fit": "val", "validate": "val", "test": "test", "predict": "predict"}
    source = job.evaluate if job.evaluate is not None else _loader(trainer, f"{words[stage]}_dataloader")
    if trainer.overfit_batches and stage == "fit" and source is not None:
        source = trainer.train_dataloader
    limit = getattr(trainer, f"limit_{words[stage]}_batches")
    has_step = stage != "fit" or callable(getattr(trainer.module, "validation_step", None))
    loaders = _several(source) if has_step and limit != 0 else []
    trainer.val_dataloaders = source
    trainer.several_loaders = len(loaders) > 1
    trainer.val_feeds = [_evaluation_feed(trainer, loader, limit, fixed=stage == "predict") for loader in loaders]
    trainer.num_val_batches = [feed.batches() for feed in trainer.val_feeds]
    for loader, batches in zip(loaders, trainer.num_val_batches, strict=True):
        _check_part(f"limit_{words[stage]}_batches", limit, loader, batches)
    if stage == "fit":
        trainer.val_every = validation_interval(trainer)


def reload_loaders(trainer: Trainer) -> None:
    """Build the training feed from a new loader of the data module or the module.

    Args:
        trainer: with a training feed; unchanged if the loader was an argument of `fit`.
    """
    if trainer.overridden.__dict__.get("given_train") is None:
        trainer.train_dataloader = _loader(trainer, "train_dataloader")
        _make_train_feed(trainer)
        trainer.val_every = validation_interval(trainer)


def rebuild_feeds(trainer: Trainer) -> None:
    """Build all feeds again, after a checkpoint has restored the seed of the data order.

    Args:
        trainer: with feeds.
    """
    _make_train_feed(trainer)
    trainer.val_feeds = (
        [_evaluation_feed(trainer, loader, trainer.limit_val_batches) for loader in _several(trainer.val_dataloaders)]
        if trainer.val_feeds
        else []
    )
    trainer.val_every = validation_interval(trainer)


def sanity_feeds(trainer: Trainer) -> list[Feed]:
    """Return the validation feeds, limited to the batches of the sanity check.

    Args:
        trainer: with validation loaders.
    """
    few = float("inf") if trainer.num_sanity_val_steps == -1 else trainer.num_sanity_val_steps
    limit = min(few, trainer.limit_val_batches) if isinstance(trainer.limit_val_batches, int) else few
    return [_evaluation_feed(trainer, loader, limit) for loader in _several(trainer.val_dataloaders)]


def _loader(trainer: Trainer, name: str) -> Any:
    for owner in (trainer.datamodule, trainer.module):
        loader = getattr(owner, name)() if owner is not None else None
        if loader is not None:
            return loader
    return None


def _make_train_feed(trainer: Trainer) -> None:
    """Build the training feed and count its batches.

    Raises:
        ValueError: there is no batch to train on.
    """
    manual, limit = not trainer.module.automatic_optimization, trainer.limit_train_batches
    trainer.train_feed = _feed(
        trainer, trainer.train_dataloader, limit, trainer.state.ranks, trainer.strategy.parts, trainer.balance,
        manual=manual,
    )  # fmt: skip
    trainer.own_generators = find_generators(trainer.module, "module") | trainer.train_feed.generators()
    if trainer.strategy.parts and (
        names := [*trainer.own_generators, *trainer.train_feed.lost_generators(within=True)]
    ):
        raise ValueError(
            f"deterministic='elastic' gives the same result on any number of ranks, but {', '.join(names)} would "
            "advance on each rank separately: draw from the global generator of torch, numpy or "
            "python, which is seeded for each part of a global batch"
        )
    count_batches(trainer)
    batches = trainer.num_training_batches
    _check_part(
        "overfit_batches" if trainer.overfit_batches else "limit_train_batches",
        limit,
        trainer.train_dataloader,
        batches,
    )
    if not batches and limit:
        raise ValueError(
            f"there is no batch to train on: {type(trainer.train_dataloader).__name__} is empty, or drop_last=True "
            "drops all of it (then use a smaller batch_size, or fewer ranks)"
        )


def count_batches(trainer: Trainer) -> None:
    """Count the batches per epoch of the rank with the most batches; the number may depend on the accumulation.

    Args:
        trainer: with a training feed; receives `num_training_batches`.
    """
    feed = trainer.train_feed
    batches = feed.batches(trainer.accumulate_grad_batches)
    if not feed.exact_position and trainer.world.size > 1 and not trainer.world.newcomer:
        counted = torch.tensor(float(batches), dtype=torch.float64, device=trainer.world.device)
        most = float(trainer.world.all_reduce(counted, "max"))
        batches = most if most == float("inf") else int(most)
    trainer.num_training_batches = batches


def _check_part(name: str, limit: int | float, loader: Any, batches: int | float) -> None:
    """Refuse a fraction of the batches that is less than one batch.

    Raises:
        ValueError: the fraction is too small.
    """
    if isinstance(limit, float) and 0 < limit < 1 and not batches and len(loader):
        raise ValueError(f"{name}={limit} of {len(loader)} batches is less than one: set a number of batches (1)")


def _evaluation_feed(trainer: Trainer, source: Any, limit: int | float, *, fixed: bool = False) -> Feed:
    """Build the feed of an evaluation loader.

    With `overfit_batches`, validation reads the training batches, sized for the initial number of ranks.
    """
    return _feed(trainer, source, limit, trainer.state.ranks if source is trainer.train_dataloader else 0, fixed=fixed)


def _feed(
    trainer: Trainer, source: Any, limit: int | float, began_with: int = 0, parts: int = 0,
    balance: Balance | None = None,
    *, manual: bool = False, fixed: bool = False,
) -> Feed:  # fmt: skip
    if isinstance(limit, float) and limit != float("inf") and not hasattr(source, "__len__"):
        raise ValueError(
            f"a fraction of the batches ({limit}) needs a loader with a length, but {type(source).__name__} has none: "
            "set a number of batches"
        )
    if isinstance(source, (list, tuple)) and source and all(isinstance(item, DataLoader) for item in source):
        raise ValueError("there are several training loaders: join them into a single loader that yields all batches")
    if not hasattr(source, "__iter__"):
        raise ValueError(f"{type(source).__name__} is not iterable: pass a DataLoader or an iterable of batches")
    world = trainer.world
    if world.newcomer:  # the ranks that it will join: same number of batches as on the other ranks
        world = replace(world, rank=0, size=world.local_size)
    return make_feed(
        source, world, seed=trainer.state.seed, limit=limit, shard=trainer.use_distributed_sampler,
        began_with=began_with,
        company=trainer.strategy.traits.sharded or manual, parts=parts, dealt=trainer.strategy.dealer is not None,
        balance=balance, undivided=manual,
        fixed=fixed or (bool(trainer.overfit_batches) and source is trainer.train_dataloader),
    )  # fmt: skip


def _several(source: Any) -> list[Any]:
    """Return a list of loaders; a list of batches counts as a single loader."""
    if source is None:
        return []
    if isinstance(source, Mapping):
        return list(source.values())
    if isinstance(source, (list, tuple)) and source and all(_is_loader(item) for item in source):
        return list(source)
    return [source]


def _is_loader(value: Any) -> bool:
    batch = isinstance(value, (torch.Tensor, Mapping, list, tuple, str))
    return hasattr(value, "__iter__") and not batch
