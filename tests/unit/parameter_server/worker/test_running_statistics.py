"""Statistics of batch normalisation on independent workers are equal to those of a process with all batches."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fabricx.distributed.world import World
from fabricx.parameter_server.worker.running_statistics import RunningStatistics, Seen, shares


@pytest.mark.parametrize("momentum", [0.1, 0.5, None])
@pytest.mark.parametrize("batches", [[1, 9], [3, 3, 3], [0, 4], [7, 0, 1], [0, 0]])
def test_uneven_workers_have_the_statistics_of_a_single_process(momentum: float | None, batches: list[int]) -> None:
    torch.manual_seed(0)
    start = nn.BatchNorm1d(4, momentum=momentum)
    start(torch.randn(8, 4))  # common batches of all workers
    same = torch.randn(5, 4) * 3 + 2  # equal batches, so that the order has no effect
    wanted = copy.deepcopy(start)
    layers = [copy.deepcopy(start) for _ in batches]
    for layer, count in zip(layers, batches, strict=True):
        for number in range(count):
            # The mean over all batches is exact for any batches; a moving average weights the newest batches most.
            batch = same if momentum is not None else same * (1 + number)
            layer(batch)
            wanted(batch)
    seen = [Seen(1, count) for count in batches]
    holder, of_start, factors = shares(seen, momentum)
    assert holder == 0
    for name in ("running_mean", "running_var"):
        expected = getattr(start, name) * of_start
        for layer, factor in zip(layers, factors, strict=True):
            expected = expected + getattr(layer, name) * factor
        assert torch.allclose(expected, getattr(wanted, name), rtol=1e-5)  # float32, different order


def test_a_joining_worker_adopts_the_statistics_of_other_workers() -> None:
    holder, of_start, factors = shares([Seen(0, 0), Seen(90, 0)], 0.1)
    assert (holder, of_start, factors) == (1, 1.0, [0.0, 0.0])


@dataclass(frozen=True)
class _Pair(World):
    """Rank 0 of two; the second rank has trained a number of batches."""

    size: int = 2
    batches: int = 0  # of the other rank
    sources: list[tuple[Tensor, int]] = field(default_factory=list)

    def gather_objects(self, obj: Any) -> list[Any]:
        return [obj, (self.batches, obj[1])]

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        self.sources.append((tensor, src))
        return tensor

    def all_reduce(self, tensor: Tensor, op: Any = "sum") -> Tensor:
        return tensor


@pytest.mark.parametrize(("batches", "source"), [(1, 0), (2, 0), (3, 1)])
def test_other_buffers_are_taken_from_the_worker_with_the_most_batches(batches: int, source: int) -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    module[0].register_buffer("codes", torch.zeros(3))
    module.register_buffer("count", torch.zeros(()))
    statistics, world = RunningStatistics(module), _Pair(batches=batches)
    for _ in range(2):
        statistics.computed()
    statistics.pool(world)
    assert {id(buffer): rank for buffer, rank in world.sources} == dict.fromkeys(
        (id(module.count), id(module[0].codes)), source
    )
