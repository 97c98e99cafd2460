"""Chooses how the user's data is read."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from fabricx.data.feed import Feed
from fabricx.data.iterable import ListFeed
from fabricx.data.map_style import OrderedFeed, order_of
from fabricx.data.order import Balance
from fabricx.distributed.world import World


def make_feed(
    source: Any,
    world: World,
    *,
    seed: int,
    limit: int | float = float("inf"),
    shard: bool = True,
    began_with: int = 0,
    company: bool = False,
    parts: int = 0,
    dealt: bool = False,
    balance: Balance | None = None,
    undivided: bool = False,
    fixed: bool = False,
) -> Feed:
    """Return the feed for what a user gave: a map-style DataLoader is read along the global order, all else as it is.

    Args:
        source: a DataLoader or any iterable of batches.
        world: the ranks.
        seed: of the data order.
        limit: batches an epoch at most (int), or the part of them (float).
        began_with: ranks that the global batch was fixed for; 0 if those that there are.
        shard: cut a DataLoader's data over ranks; False takes it as it is.
        company: give a rank without a sample of a global batch one of the others', or the newest of its own stream.
        parts: cut each global batch into so many parts, whoever gets them; 0 for the loader's batches.
        dealt: ranks will go at their own pace; batches are counted as if those were there that the run began with.
        balance: of the ranks' shares; equal ones if not given.
        undivided: one batch for a rank's whole part of a global batch.
        fixed: give each epoch the same order; that of the data set, where a DataLoader shuffles.

    Raises:
        ValueError: what is no map-style DataLoader can't be cut into parts; or a DistributedSampler is of another rank.
    """
    divided = _distributed_sampler(source)
    if divided is not None and not world.newcomer:
        _check_division(divided, world)
    ordered = (
        isinstance(source, DataLoader)
        and not isinstance(source.dataset, IterableDataset)
        and type(source).__iter__ is DataLoader.__iter__
        and divided is None
        and not hasattr(source, "state_dict")
        and hasattr(order_of(source)[0], "__len__")
    )
    if ordered and (shard or world.size == 1):
        return OrderedFeed(
            source, world, seed, limit, began_with, company=company, parts=parts, dealt=dealt, balance=balance,
            undivided=undivided, fixed=fixed,
        )  # fmt: skip
    if parts:
        raise ValueError(
            f"deterministic='elastic' cuts the order of the data itself: it needs a map-style DataLoader, without a "
            f"DistributedSampler and with use_distributed_sampler=True, not {type(source).__name__}"
        )
    if ordered:
        return OrderedFeed(source, World(device=world.device), seed + world.rank, limit, fixed=fixed, beside=world.size)
    return ListFeed(source, world, limit, fixed=fixed, company=company)


def _distributed_sampler(source: Any) -> DistributedSampler[Any] | None:
    """Return torch's `DistributedSampler`, where a loader's order or its batches are of one."""
    if not isinstance(source, DataLoader):
        return None
    for sampler in (source.sampler, source.batch_sampler, getattr(source.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            return sampler
    return None


def _check_division(sampler: DistributedSampler[Any], world: World) -> None:
    """Refuse a sampler that was made for another rank, or for another number of them.

    Raises:
        ValueError: it was.
    """
    if (sampler.rank, sampler.num_replicas) != (world.rank, world.size):
        raise ValueError(
            f"DistributedSampler(num_replicas={sampler.num_replicas}, rank={sampler.rank}) is not that of rank "
            f"{world.rank} of {world.size}: leave the sampler out (fabricx divides the data), or make it in "
            "train_dataloader() with self.trainer.world_size and self.global_rank"
        )
