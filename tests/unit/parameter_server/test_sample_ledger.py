"""The sample ledger counts the samples in the weights, independently of leases and records."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, cast

import pytest
import torch

from fabricx.parameter_server.sample_ledger import SampleLedger
from fabricx.parameter_server.server.server import Server
from fabricx.parameter_server.wire.messages import OpenSection, Push, ReadState, Reply, RequestLease
from tests.unit.parameter_server.server.test_server import begin

EMPTY = torch.empty(0)


@pytest.mark.parametrize("seed", range(8))
def test_each_sample_is_counted_once_per_use_in_the_weights(seed: int) -> None:
    rng, trained = random.Random(seed), Counter[tuple[int, int]]()
    items, begin, end = 40, (1, 12), (3, 20)
    ledger = SampleLedger()
    for epoch in (1, 2, 3):
        ledger.open(epoch, begin[1] if epoch == begin[0] else 0, items)
        for _ in range(20):
            low = rng.randrange(items)
            span = epoch, low, min(items, low + rng.randrange(9))
            ledger.add([span])
            trained.update((epoch, sample) for sample in range(*span[1:]))
    due = {(epoch, sample) for epoch in (1, 2, 3) for sample in range(items) if begin <= (epoch, sample) < end}
    twice = sum(times - (sample in due) for sample, times in trained.items())
    assert ledger.lost_and_repeated(*end) == (len(due - trained.keys()), twice)


def test_a_skipped_epoch_is_lost_and_an_epoch_in_order_is_a_single_range() -> None:
    ledger = SampleLedger()
    for epoch in (0, 2):
        ledger.open(epoch, 0, 12)
        for sample in range(12):
            ledger.add([(epoch, sample, sample + 1)])
    assert ledger.lost_and_repeated(3, 0) == (12, 0)
    assert ledger._ranges == {0: [(0, 12)], 2: [(0, 12)]}


def train(server: Server, section: int, position: int, leases: int) -> None:
    """Train a section of leases of 2 samples each, of an epoch of 12."""
    server.handle(0, OpenSection(section, leases, data=(0, position, 12)), EMPTY, EMPTY)
    for _ in range(leases):
        granted: Any = server.handle(0, RequestLease(section, True), EMPTY, EMPTY)
        low = position + 2 * granted.lease
        server.handle(0, Push(0, 1, (granted.lease,), True, samples=[(0, low, low + 2)]), EMPTY, EMPTY)


@pytest.mark.parametrize(("second", "expected"), [(6, (0, 0)), (4, (0, 2)), (8, (2, 0))])
def test_a_section_at_a_wrong_position_is_detected_only_by_the_sample_ledger(
    second: int, expected: tuple[int, int]
) -> None:
    """A recovered position is before, or after, the samples in the weights: each lease was dealt and used once."""
    begun, _ = begin(workers=1, aggregate=False)
    server = Server(1)
    server.handle(0, begun, EMPTY, EMPTY)
    train(server, 0, 0, 3)
    train(server, 1, second, (12 - second) // 2)
    counts, reply = server.counts, cast(Reply, server.handle(0, ReadState("samples"), EMPTY, EMPTY))
    assert (counts.dealt - counts.used, counts.repeated) == (0, 0)
    assert reply.content.lost_and_repeated(1, 0) == expected
