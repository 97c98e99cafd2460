"""A module divided into stages trains as in one process: losses, gradient norms and weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fabricx.model_parallel.traffic import boundary_elements
from fabricx.testing import run_ranks
from tests.process.stages import LENGTH, STEPS, WIDTH, WORDS, Block, Language, alone, batches, compare, make, staged
from tests.soak import params

pytestmark = pytest.mark.usefixtures("warm_ranks")

CASES: list[tuple[dict[str, Any], dict[str, Any], int]] = [  # module, pipeline, rows
    ({}, {}, 8),
    ({}, {"schedule": "gpipe"}, 8),
    ({}, {"schedule": "zero_bubble"}, 8),
    ({"tied": True}, {"by_time": True}, 8),
    ({"layers": 5}, {"microbatches": 3}, 7),
    ({"layers": 8, "tied": True}, {"virtual": 2}, 8),
    ({"layers": 8}, {"virtual": 2, "channels": True}, 8),
    ({}, {"microbatches": 8}, 3),
]


def cases_of(ranks: int) -> list[tuple[dict[str, Any], dict[str, Any], int]]:
    return CASES if ranks == 2 else CASES[::2]


def train_all(ranks: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return [staged(make(Language, **model), batches(rows), **options) for model, options, rows in cases_of(ranks)]


@pytest.mark.parametrize("ranks", params([2], [4]))
def test_stages_train_what_one_process_trains(ranks: int) -> None:
    by_rank = run_ranks(train_all, ranks, ranks)
    for number, (model, options, rows) in enumerate(cases_of(ranks)):
        found = [rank[number] for rank in by_rank]
        compare(found, alone(make(Language, **model), batches(rows)))
        # Traffic: an activation and a gradient for each boundary, and the tied weights.
        chunks = ranks * options.get("virtual", 1)
        theory = boundary_elements(chunks, rows * LENGTH * WIDTH) * 8
        theory += 2 * WORDS * WIDTH * 8 if model.get("tied") else 0
        assert theory <= found[0]["sent"] / STEPS <= 1.02 * theory + 2000 * chunks / STEPS
        # A stage stores its own weights, and has optimizer states for these only.
        whole = sum(value.numel() * 8 for value in found[0]["weights"].values())
        tied = WORDS * WIDTH * 8 if model.get("tied") else 0
        placeholders = 8 * 100
        assert sum(rank["stored"] for rank in found) <= whole + tied + ranks * placeholders
        assert sum(rank["states"] for rank in found) == sum(rank["copies"] for rank in found)
        assert found[-1]["shapes"] == [(rows, LENGTH, WORDS)] * STEPS
        assert found[0]["shapes"] == [None] * STEPS


class Sourced(Block):
    def forward(self, x: Tensor, mask: Tensor, source: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + 0.5 * source, mask)


class Skips(Language):
    """Each block also takes the embedded words."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sourced() for _ in range(4))

    def body(self, x: Tensor, mask: Tensor) -> Tensor:
        source = x
        for block in self.blocks:
            x = block(x, mask, source)
        return x


def train_skips() -> dict[str, Any]:
    torch.set_num_threads(1)
    return staged(make(Skips), batches(6))


def test_a_tensor_that_all_blocks_take_passes_through_all_stages() -> None:
    """The stage in the middle of three passes on what it has received."""
    compare(run_ranks(train_skips, 3), alone(make(Skips), batches(6)))
