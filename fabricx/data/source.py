"""What a user gave as data, and how it is read."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from fabricx.comm.world import World
from fabricx.data.feed import Feed
from fabricx.data.listed import ListFeed
from fabricx.data.order import Balance
from fabricx.data.ordered import OrderedFeed


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
) -> Feed:
    """Return the feed for what a user gave: a map-style DataLoader is read along the global order, all else as it is.

    Args:
        source: a DataLoader or any iterable of batches.
        world: the ranks.
        seed: of the data order.
        limit: batches an epoch at most (int), or the part of them (float).
        began_with: ranks that the global batch was fixed for; 0 if those that there are.
        shard: cut a DataLoader's data over ranks; False takes it as it is.
        company: give a rank without a sample of a global batch one of the others'.
        parts: cut each global batch into so many parts, whoever gets them; 0 for the loader's batches.
        dealt: ranks will go at their own pace; batches are counted as if those were there that the run began with.
        balance: of the ranks' shares; equal ones if not given.

    Raises:
        ValueError: what is no map-style DataLoader can't be cut into parts.
    """
    ordered = (
        isinstance(source, DataLoader)
        and not isinstance(source.dataset, IterableDataset)
        and type(source).__iter__ is DataLoader.__iter__
        and not isinstance(source.sampler, DistributedSampler)
        and not hasattr(source, "state_dict")
        and hasattr(source.sampler, "__len__")
    )
    if ordered and (shard or world.size == 1):
        return OrderedFeed(
            source, world, seed, limit, began_with, company=company, parts=parts, dealt=dealt, balance=balance
        )
    if parts:
        raise ValueError(
            f"deterministic='elastic' cuts the order of the data itself: it needs a map-style DataLoader, without a "
            f"DistributedSampler and with use_distributed_sampler=True, not {type(source).__name__}"
        )
    if ordered:
        return OrderedFeed(source, World(device=world.device), seed + world.rank, limit)
    return ListFeed(source, world, limit)
