"""Which feed reads a user's data."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from fabricx.data import make_feed
from fabricx.distributed.world import World

DATA: Any = range(20)


class Batches(BatchSampler):
    """A class of the user's own."""


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_distributed_sampler_is_that_of_its_rank(wrapped: bool) -> None:
    sampler: Any = DistributedSampler(DATA, num_replicas=2, rank=1, shuffle=False)
    kind = {"batch_sampler": Batches(sampler, 5, False)} if wrapped else {"batch_size": 5, "sampler": sampler}
    loader = DataLoader(DATA, **kind)  # type: ignore[arg-type]
    make_feed(loader, World(rank=1, size=2), seed=5)
    for world in (World(rank=0, size=2), World(rank=1, size=3), World()):
        with pytest.raises(ValueError, match=f"not that of rank {world.rank} of {world.size}: remove the sampler"):
            make_feed(loader, world, seed=5)
