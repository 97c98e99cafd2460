"""Samplers that order samples by a criterion; resume is as exact as with a plain shuffle.

fabricx draws an order under the seed of the epoch, the same on every rank, and cuts it into global batches: what lies
together in the order is trained together. Sample weights are torch's own `WeightedRandomSampler`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import final

import torch
from torch.utils.data import Sampler


@final
class BucketSampler(Sampler[int]):
    """Puts samples of similar length beside each other, so that batches need little padding, in a random order.

    The samples are shuffled, each pool of them is sorted by length and cut into buckets, and the buckets are shuffled.

    Args:
        lengths: of each sample, shape [samples].
        bucket: samples of a bucket; take the global batch (batch size x ranks x accumulation), or a multiple.
        pool: samples that are sorted together; more means less padding and less chance. 100 buckets if not given.

    Raises:
        ValueError: a bucket or the pool holds no sample.

    >>> sampler = BucketSampler([5, 1, 4, 2, 3, 6], bucket=2)
    >>> sorted(sorted(pair) for pair in zip(*[iter(sampler)] * 2))
    [[0, 5], [1, 3], [2, 4]]
    """

    def __init__(self, lengths: Sequence[float], bucket: int, pool: int | None = None) -> None:
        if bucket < 1 or (pool is not None and pool < 1):
            raise ValueError(f"bucket={bucket}, pool={pool}: both hold at least 1 sample")
        self._lengths = torch.as_tensor(lengths, dtype=torch.float64)
        self._bucket = bucket
        self._pool = pool or 100 * bucket

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self))
        pools = [pool[self._lengths[pool].argsort(stable=True)] for pool in order.split(self._pool)]
        buckets = list(torch.cat(pools).split(self._bucket)) if len(self) else []
        # A last bucket that isn't full stays at the end: it would shift all that come behind it.
        full = buckets[:-1] if buckets and len(buckets[-1]) < self._bucket else buckets
        chosen = [full[place] for place in torch.randperm(len(full)).tolist()] + buckets[len(full) :]
        yield from torch.cat(chosen).tolist() if chosen else []


@final
class GroupSampler(Sampler[int]):
    """Keeps the samples of a group together, such as the frames of a video, in the order that they have.

    Args:
        groups: which group each sample belongs to, shape [samples].

    >>> list(GroupSampler(["a", "b", "a", "b"])) in ([0, 2, 1, 3], [1, 3, 0, 2])
    True
    """

    def __init__(self, groups: Sequence[Hashable]) -> None:
        self._members: dict[Hashable, list[int]] = {}
        for place, group in enumerate(groups):
            self._members.setdefault(group, []).append(place)
        self._count = len(groups)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        members = list(self._members.values())
        for number in torch.randperm(len(members)).tolist():
            yield from members[number]
