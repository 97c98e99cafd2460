"""Ranks are threads that share a store; each has its connections and memory."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fabricx.distributed.ddp import shared_buckets
from fabricx.distributed.ddp.shared_buckets import SharedMemoryAverager
from fabricx.distributed.world import World
from fabricx.errors import PeerLost


class Bucket:
    """The attributes of a bucket of torch's DDP that a communication hook reads."""

    def __init__(self, buffer: Tensor, *, last: bool) -> None:
        self._buffer, self._last = buffer, last

    def buffer(self) -> Tensor:
        return self._buffer

    def is_last(self) -> bool:
        return self._last


def on_ranks(size: int, work: Callable[[int, SharedMemoryAverager], Any], room: int = 1000) -> list[Any]:
    """Run a function as each of several ranks, and return the results, or errors, by rank."""
    store = dist.HashStore()
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        averager = SharedMemoryAverager(World(rank=rank, size=size, store=store, secret=b"key"), room)
        try:
            results[rank] = work(rank, averager)
        except Exception as error:
            results[rank] = error
        finally:
            averager.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def gradients(rank: int, step: int, number: int, elements: int, dtype: torch.dtype) -> Tensor:
    seed = torch.Generator().manual_seed(1000 * rank + 10 * step + number)
    return torch.randn(elements, generator=seed).to(dtype)


@pytest.mark.parametrize("room", [100, 1000])  # less than a bucket, and more
@pytest.mark.parametrize("size", [2, 3, 6])
def test_buckets_are_averaged_in_rank_order_for_any_timing(size: int, room: int) -> None:
    kinds = [(7, torch.float32), (100, torch.float32), (33, torch.float64), (5, torch.bfloat16), (1, torch.float32)]

    def train(rank: int, averager: SharedMemoryAverager) -> list[Tensor]:
        pace, means = random.Random(rank), []
        for step in range(8):
            futures = []
            for number, (elements, dtype) in enumerate(kinds):
                if pace.random() < 0.3:
                    time.sleep(pace.random() * 0.004)
                buffer = gradients(rank, step, number, elements, dtype)
                bucket: Any = Bucket(buffer, last=number == len(kinds) - 1)
                futures.append((averager.average(bucket), buffer))
            for future, buffer in futures:
                assert future.done()
                assert future.value() is buffer
                means.append(buffer)
        return means

    results = on_ranks(size, train, room)
    wanted = []
    for step in range(8):
        for number, (elements, dtype) in enumerate(kinds):
            shares = [gradients(rank, step, number, elements, dtype) * (1.0 / size) for rank in range(size)]
            total = shares[0] + shares[1]
            for share in shares[2:]:
                total += share
            wanted.append(total)
    for means in results:
        assert all(torch.equal(mean, total) for mean, total in zip(means, wanted, strict=True))


def test_sums_of_whole_buckets_and_of_parts_are_bitwise_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    def average(rank: int, averager: SharedMemoryAverager) -> Tensor:
        bucket: Any = Bucket(buffer := gradients(rank, 0, 0, 101, torch.float32), last=True)
        averager.average(bucket)
        return buffer

    whole = on_ranks(4, average)
    monkeypatch.setattr(shared_buckets, "DIRECT", 1)
    for mean in on_ranks(4, average):
        assert torch.equal(mean, whole[0])


def test_a_rank_waits_for_a_bucket_only_when_the_next_bucket_is_ready() -> None:
    posted = threading.Event()

    def train(rank: int, averager: SharedMemoryAverager) -> bool:
        first, last = (Bucket(torch.ones(3), last=last) for last in (False, True))
        if rank:
            assert posted.wait(10)
        future = averager.average(first)  # type: ignore[arg-type]
        done = future.done()
        posted.set()
        averager.average(last)  # type: ignore[arg-type]
        return done

    assert on_ranks(2, train) == [False, False]


def test_a_rank_that_waits_for_a_lost_rank_raises_an_error() -> None:
    def train(rank: int, averager: SharedMemoryAverager) -> None:
        if rank == 2:
            return  # closes its connections
        bucket: Any = Bucket(torch.ones(3), last=True)
        averager.average(bucket)
        averager.average(bucket)

    results = on_ranks(3, train)
    assert results[2] is None
    assert all(
        isinstance(error, PeerLost) and "connection to another rank was lost" in str(error) for error in results[:2]
    )
