from __future__ import annotations

import itertools
import random

import pytest

from fabricx.model_parallel.pipeline.chain import Chain
from fabricx.model_parallel.pipeline.cuts import describe, divide, stages_of


def slowest(costs, cuts):
    times = [sum(costs[begin + 1 : end + 1]) for begin, end in cuts]
    times[0] += costs[0]
    times[-1] += costs[-1]
    return max(times)


def all_cuts(blocks, chunks, joined):
    for inner in itertools.combinations([b for b in range(1, blocks) if b not in joined], chunks - 1):
        yield list(itertools.pairwise([0, *inner, blocks]))


def test_the_slowest_chunk_is_as_fast_as_it_can_be():
    random.seed(0)
    for blocks in range(1, 9):
        for chunks in range(1, blocks + 1):
            costs = [random.random() for _ in range(blocks + 2)]
            joined = {b: "" for b in range(1, blocks) if random.random() < 0.2}
            expected = [slowest(costs, cuts) for cuts in all_cuts(blocks, chunks, joined)]
            if not expected:
                continue
            cuts = divide(costs, chunks, joined)
            assert slowest(costs, cuts) == pytest.approx(min(expected))
            assert cuts[0][0] == 0
            assert cuts[-1][1] == blocks
            assert not {begin for begin, _ in cuts} & joined.keys()


def test_too_few_blocks_are_refused_with_the_reason():
    with pytest.raises(ValueError, match="3 blocks can be divided into at most 3 chunks, and the pipeline needs 4"):
        divide([0, 1, 1, 1, 0], 4)
    with pytest.raises(ValueError, match=r"at most 2 chunks, .* needs 3: a tensor passes by\. Set fewer stages"):
        divide([0, 1, 1, 1, 0], 3, {2: "a tensor passes by"})


def chain(**other) -> Chain:
    names = tuple(f"blocks.{number}" for number in range(4))
    fields = {
        "blocks": names, "uses": {}, "buffers": frozenset(), "entries": (), "outputs": (), "joined": {},
        "changing": False, "costs": (0.0, 1.0, 1.0, 1.0, 1.0, 2.0), "sizes": (100, 10, 10, 10, 10, 50),
        "saved": (0.0, 8.0, 8.0, 8.0, 8.0, 4.0), "notes": ("batch statistics",),
    }  # fmt: skip
    return Chain(**{**fields, **other})


def test_stages_have_the_weights_of_their_blocks_and_hold_microbatches_by_the_schedule():
    cuts = divide(chain().costs, 2)
    assert cuts == [(0, 3), (3, 4)]
    first, last = stages_of(chain(), cuts, 2, "1f1b", 1, 4, 8)
    assert (first.parameters, last.parameters) == (130, 60)
    assert first.memory == 4 * 130 + 24 * 2 * 2  # two microbatches of two rows are held
    assert last.memory == 4 * 60 + 12 * 2
    assert (first.cost, last.cost) == (0.5, 0.5)


def test_the_description_names_blocks_memory_and_notes():
    lines = list(describe(chain(), divide(chain().costs, 2), 2, "1f1b", 1, 4, 8))
    assert lines[0] == "pipeline: 2 stages, 1f1b, 4 microbatches, predicted idle time 20%"
    assert lines[1].startswith("  stage 0: blocks.0 to blocks.2; 50% of the time, weights 0.0 MiB")
    assert lines[2].startswith("  stage 1: blocks.3; 50% of the time")
    assert lines[-1] == "  note: batch statistics"
    assert "note" not in "".join(describe(chain(), divide(chain().costs, 2), 2, "1f1b", 1, 1, 8))
    uneven = chain(costs=(0.0, 1.0, 1.0, 1.0, 1.0, 12.0), joined={3: "a tensor passes by"})
    assert "  note: stage 1 has 88% of the time, because a tensor passes by; if other modules" in "\n".join(
        describe(uneven, divide(uneven.costs, 2, uneven.joined), 2, "1f1b", 1, 1, 8)
    )
