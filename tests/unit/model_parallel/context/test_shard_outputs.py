from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fabricx.model_parallel.context.sequence_shard import SequenceShard
from fabricx.model_parallel.context.shard_outputs import ShardOutputs
from fabricx.model_parallel.trial import Record, first_difference

LENGTH, RANKS = 7, 2


def records(whole: dict[str, list[Tensor]], of_rank: Any) -> tuple[Record, Record]:
    """Return the records of the main rank; `of_rank` returns the outputs of a shard by submodule."""
    before, every, comparisons = Record(), [], []
    for rank in range(RANKS):
        shard = SequenceShard(LENGTH, RANKS, rank)
        comparison = ShardOutputs(SimpleNamespace(rank=rank), lambda shard=shard: shard, lambda output: output)  # type: ignore
        before.outputs = [(name, comparison.of_whole(name, output)) for name in whole for output in whole[name]]
        parts = of_rank(shard)
        outputs = [(name, comparison.of_shard(name, output)) for name in parts for output in parts[name]]
        every.append((comparison._kinds, outputs))
        comparisons.append(comparison)
    comparisons[0]._world.gather_objects = lambda value: every
    after = Record(outputs=every[0][1])
    comparisons[0].combine(before, after)
    return before, after


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_fingerprints_of_shards_are_equal_to_those_of_the_whole_sequence(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    block, head = torch.randn(3, LENGTH, 5, dtype=dtype), torch.randn(2, 7, dtype=dtype)
    whole = {"block": [block, block.square()], "head": [head]}
    before, after = records(
        whole, lambda shard: {"block": [shard.part(output, 1) for output in whole["block"]], "head": [head]}
    )
    assert [name for name, _ in after.outputs] == ["block", "block", "head"]
    assert first_difference(before, after) == ""
    assert all(a == pytest.approx(b) for (_, a), (_, b) in zip(before.outputs, after.outputs, strict=True))


def test_a_wrong_shard_is_a_difference() -> None:
    block = torch.randn(3, LENGTH, 5)
    before, after = records({"block": [block]}, lambda shard: {"block": [shard.part(block, 1) + shard.rank]})
    assert first_difference(before, after) == "block"


def test_outputs_whose_number_or_shape_depends_on_the_shard_are_not_compared() -> None:
    block, rows = torch.randn(1, LENGTH, 5), torch.randn(6, 5)
    whole = {"block": [block], "expert": [rows, rows], "rows": [rows], "late": []}

    def of_rank(shard: SequenceShard) -> dict[str, list[Tensor]]:
        return {
            "block": [shard.part(block, 1)], "expert": [rows] * (1 + shard.rank), "rows": [rows[: 2 + shard.rank]],
            "late": [rows],
        }  # fmt: skip

    before, after = records(whole, of_rank)
    assert [name for name, _ in before.outputs] == [name for name, _ in after.outputs] == ["block"]
    assert first_difference(before, after) == ""
