"""Factory of feeds: selects the implementation that reads a user's data."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from fabricx.data.combined import CombinedLoader
from fabricx.data.feed import Feed
from fabricx.data.iterable import ListFeed
from fabricx.data.joined_loaders import joined
from fabricx.data.loader_classes import reads_otherwise
from fabricx.data.loader_order import distributed_sampler, is_ordered, order_of
from fabricx.data.loader_ranks import give_rank
from fabricx.data.map_style import OrderedFeed
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
    example: bool = False,
    parts: int = 0,
    dealt: bool = False,
    balance: Balance | None = None,
    undivided: bool = False,
    fixed: bool = False,
    weighted: bool = False,
    keeps_last: bool = False,
) -> Feed:
    """Build the feed for a user's data: a map-style DataLoader is read in the global order, any other source as it is.

    Args:
        source: a DataLoader, a CombinedLoader, or any iterable of batches.
        world: the ranks.
        seed: seed of the data order.
        limit: maximum batches per epoch (int), or fraction of the batches (float).
        shard: divide the data of a DataLoader over ranks; if False, each rank reads all of it.
        began_with: number of ranks that determines the global batch size; 0 for the present number.
        example: provide a rank without a sample of a global batch with a sample of the global batch, or with the
            newest batch of the rank's stream.
        parts: divide each global batch into this number of parts, independent of the number of ranks; 0 to divide it
            into the loader's batches.
        dealt: ranks will work at their own pace; batches are counted for the number of ranks at the start of the run.
        balance: shares of the ranks; None for equal shares.
        undivided: a rank's whole share of a global batch is one batch.
        fixed: use the same order in every epoch, without shuffling by the DataLoader.
        weighted: the module defines the weight of a batch.
        keeps_last: read an incomplete last batch also with `drop_last=True`.

    Raises:
        ValueError: `parts` for a source other than a map-style DataLoader, a DistributedSampler of another rank, or a
            map-style DataLoader whose samples can't be divided over the ranks.
    """
    for part in source.flattened if isinstance(source, CombinedLoader) else [source]:
        if (divided := distributed_sampler(part)) is not None and not world.newcomer:
            _check_division(divided, world)
        if not is_ordered(part):
            if shard and world.size > 1:
                _check_divided(part, world)
            give_rank(part)
    if isinstance(source, CombinedLoader):
        source = joined(source, world.size if shard else 1)
    ordered = is_ordered(source)
    if ordered and (shard or world.size == 1):
        return OrderedFeed(
            source, world, seed, limit, began_with, example=example, parts=parts, dealt=dealt, balance=balance,
            undivided=undivided, fixed=fixed, weighted=weighted, keeps_last=keeps_last,
        )  # fmt: skip
    if parts:
        raise ValueError(
            f"deterministic='elastic' divides the order of the data itself: it needs a map-style DataLoader, without a "
            f"DistributedSampler and with use_distributed_sampler=True, not {type(source).__name__}"
        )
    if ordered:
        alone = World(device=world.device)
        return OrderedFeed(
            source, alone, seed + world.rank, limit, fixed=fixed, beside=world.size, weighted=weighted,
            keeps_last=keeps_last,
        )  # fmt: skip
    return ListFeed(source, world, limit, fixed=fixed, example=example, compares=shard)


def _check_division(sampler: DistributedSampler[Any], world: World) -> None:
    """Refuse a sampler that was made for a different rank or number of ranks.

    Raises:
        ValueError: the sampler does not fit this rank.
    """
    if (sampler.rank, sampler.num_replicas) != (world.rank, world.size):
        raise ValueError(
            f"DistributedSampler(num_replicas={sampler.num_replicas}, rank={sampler.rank}) is not that of rank "
            f"{world.rank} of {world.size}: remove the sampler (fabricx divides the data), or create it in "
            "train_dataloader() with self.trainer.world_size and self.global_rank"
        )


def _check_divided(source: Any, world: World) -> None:
    """Refuse a map-style DataLoader that isn't read in the global order, so that each rank would read all its samples.

    Raises:
        ValueError: the samples can't be divided.
    """
    if not isinstance(source, DataLoader) or isinstance(source.dataset, IterableDataset):
        return
    if distributed_sampler(source) is not None or hasattr(source, "state_dict"):  # divided by the user
        return
    if reads_otherwise(source):
        reason = f"{type(source).__name__} changes how a DataLoader is read"
        remedy = "use torch's DataLoader, and change batches in its collate_fn or in on_after_batch_transfer"
    else:
        reason = f"{type(order_of(source)[0]).__name__} has no length"
        remedy = "define __len__ of the sampler"
    raise ValueError(
        f"{reason}, so the samples of the DataLoader can't be divided over the {world.size} ranks, and each rank would "
        f"read all of them: {remedy}; or set use_distributed_sampler=False, and yield those of a rank only "
        "(self.trainer.distributed_sampler_kwargs)"
    )
