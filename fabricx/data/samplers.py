"""Samplers that order samples by a criterion; a run with them resumes as exactly as with a plain shuffle.

The order is drawn under the epoch's seed, the same on every rank, and is cut into global batches: neighbours in the
order are trained together. For sample weights use torch's `WeightedRandomSampler`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import final

import torch
from torch.utils.data import Sampler


@final
class BucketSampler(Sampler[int]):
    """Groups samples of similar length, so that batches need little padding, in a random order.

    The samples are shuffled, each pool of them is sorted by length and cut into buckets, and the buckets are shuffled.

    Args:
        lengths: length of each sample, shape [samples].
        bucket: samples of a bucket; use the global batch (batch size x ranks x accumulation), or a multiple.
        pool: samples that are sorted together; more means less padding and less randomness. Default: 100 buckets.

    Raises:
        ValueError: a bucket or the pool holds no sample.
    >>> sampler = BucketSampler([5, 1, 4, 2, 3, 6], bucket=2)
    >>> sorted(sorted(pair) for pair in zip(*[iter(sampler)] * 2))
    [[0, 5], [1, 3], [2, 4]]
    """

    def __init__(self, lengths: Sequence[float], bucket: int, pool: int | None = None) -> None:
        if bucket < 1 or (pool is not None and pool < 1):
            raise ValueError(f"bucket={bucket}, pool={pool}: both must be at least 1 sample")
        self._lengths = torch.as_tensor(lengths, dtype=torch.float64)
        self._bucket = bucket
        self._pool = pool or 100 * bucket

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self))
        pools = [pool[self._lengths[pool].argsort(stable=True)] for pool in order.split(self._pool)]
        buckets = list(torch.cat(pools).split(self._bucket)) if len(self) else []
        # An incomplete last bucket stays at the end: elsewhere it would shift all later buckets.
        full = buckets[:-1] if buckets and len(buckets[-1]) < self._bucket else buckets
        chosen = [full[number] for number in torch.randperm(len(full)).tolist()] + buckets[len(full) :]
        yield from torch.cat(chosen).tolist() if chosen else []


@final
class GroupSampler(Sampler[int]):
    """Keeps the samples of a group together and in order, such as the frames of a video; groups are shuffled.

    Args:
        groups: group of each sample, shape [samples].

    >>> list(GroupSampler(["a", "b", "a", "b"])) in ([0, 2, 1, 3], [1, 3, 0, 2])
    True
    """

    def __init__(self, groups: Sequence[Hashable]) -> None:
        self._members: dict[Hashable, list[int]] = {}
        for index, group in enumerate(groups):
            self._members.setdefault(group, []).append(index)
        self._count = len(groups)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        members = list(self._members.values())
        for number in torch.randperm(len(members)).tolist():
            yield from members[number]
