"""Processes that were started together find each other in a store that has what dead ones have left."""

from __future__ import annotations

import random
import threading
import time

import torch.distributed as dist

from fabricx.launch.environment import attempt_of


def together(store: dist.Store, ranks: list[int], size: int, found: dict[int, int]) -> list[threading.Thread]:
    threads = [
        threading.Thread(target=lambda rank=rank: found.update({rank: attempt_of(store, rank, size)}), daemon=True)
        for rank in ranks
    ]
    for thread in threads:
        thread.start()
    return threads


def test_all_of_an_attempt_have_its_number_whoever_comes_first() -> None:
    store, size = dist.HashStore(), 3
    for attempt in range(1, 6):
        found: dict[int, int] = {}
        first = random.Random(attempt).sample(range(size), attempt % size)
        threads = together(store, first, size, found)
        time.sleep(0.1)  # those that have come see what the attempt before has left
        threads += together(store, [rank for rank in range(size) if rank not in first], size, found)
        for thread in threads:
            thread.join(20)
        assert found == dict.fromkeys(range(size), attempt)


def test_who_came_to_an_attempt_that_failed_goes_to_the_next() -> None:
    store, found = dist.HashStore(), dict[int, int]()
    store.set("fabricx/attempt", str(store.add("fabricx/attempts", 1)))  # by a first rank that has died since
    threads = together(store, [1, 2], 3, found)
    time.sleep(0.1)
    assert all(thread.is_alive() for thread in threads)
    for thread in [*threads, *together(store, [0], 3, found)]:
        thread.join(20)
    assert found == {0: 2, 1: 2, 2: 2}


def test_one_process_waits_for_nobody() -> None:
    assert attempt_of(dist.HashStore(), 0, 1) == 1
