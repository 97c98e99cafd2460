"""Statistics of batch normalisation after workers have gone apart: those of one process with all their batches."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fabricx.parameter_server.worker.running_statistics import Seen, shares


@pytest.mark.parametrize("momentum", [0.1, 0.5, None])
@pytest.mark.parametrize("batches", [[1, 9], [3, 3, 3], [0, 4], [7, 0, 1], [0, 0]])
def test_uneven_workers_give_what_one_process_gives(momentum: float | None, batches: list[int]) -> None:
    torch.manual_seed(0)
    start = nn.BatchNorm1d(4, momentum=momentum)
    start(torch.randn(8, 4))  # what all have seen together
    same = torch.randn(5, 4) * 3 + 2  # where all batches are alike, the order of one process is of no matter
    wanted = copy.deepcopy(start)
    layers = [copy.deepcopy(start) for _ in batches]
    for layer, count in zip(layers, batches, strict=True):
        for number in range(count):
            # The mean over all batches is exact whatever they are; a moving one knows the newest ones best.
            batch = same if momentum is not None else same * (1 + number)
            layer(batch)
            wanted(batch)
    seen = [Seen(1, count) for count in batches]
    holder, of_start, factors = shares(seen, momentum)
    assert holder == 0
    for name in ("running_mean", "running_var"):
        found = getattr(start, name) * of_start
        for layer, factor in zip(layers, factors, strict=True):
            found = found + getattr(layer, name) * factor
        assert torch.allclose(found, getattr(wanted, name), rtol=1e-5)  # float32, in another order


def test_a_newcomer_takes_the_others_statistics() -> None:
    holder, of_start, factors = shares([Seen(0, 0), Seen(90, 0)], 0.1)
    assert (holder, of_start, factors) == (1, 1.0, [0.0, 0.0])
