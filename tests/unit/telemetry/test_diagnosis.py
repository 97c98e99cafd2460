"""The bottleneck of a run, from the times of its ranks."""

from __future__ import annotations

import random
import statistics

import pytest

from fabricx.telemetry.diagnosis import diagnose_rows, straggler_scores
from fabricx.telemetry.run import Row

MS = 1e-3


def row(steps: int = 10, samples: int = 80, **ms: float) -> Row:
    return Row(steps, 0.0, steps, samples, {name: steps * value * MS for name, value in ms.items()})


def test_a_rank_that_reads_slowly_is_named_with_its_cost() -> None:
    fast, slow = row(data=0.2, forward=2.0, wait=9.9), row(data=10.1, forward=2.0)
    sentence = diagnose_rows({0: fast, 1: slow}, synchronous=True)
    assert sentence == "rank 1 is slow in data wait: 10.1 ms against 0.2; it costs 82 % of each step"


def test_a_rank_that_computes_slowly_is_compared_with_the_others_median() -> None:
    rows = {n: row(forward=4.0, backward=4.0, wait=12.0) for n in (0, 1, 3)} | {2: row(forward=4.0, backward=16.0)}
    sentence = diagnose_rows(rows, synchronous=True)
    assert sentence == "rank 2 is slow in backward: 16.0 ms against 4.0; it costs 60 % of each step"


def test_a_slow_rank_has_no_waiting_cost_if_ranks_run_at_their_own_pace() -> None:
    sentence = diagnose_rows({0: row(forward=2.0), 1: row(forward=8.0)}, synchronous=False)
    assert sentence == "rank 1 is slow in forward: 8.0 ms against 2.0; the other ranks don't wait for it"


def test_ranks_that_all_wait_for_data_produce_advice() -> None:
    rows = {0: row(data=3.0, forward=7.0), 1: row(data=2.9, forward=7.0)}
    assert diagnose_rows(rows, synchronous=True) == (
        "waiting for data takes 3.0 ms of each step of 10.0 ms, 30 %: use more loader workers (num_workers), prefetch "
        "more (prefetch_factor), or do less work per sample"
    )
    assert "(num_workers=7, or fabricx.data.Preprocess)" in diagnose_rows(rows, synchronous=True, loaders=0, cores=8)
    assert "(num_workers=7 instead of 2)" in diagnose_rows(rows, synchronous=True, loaders=2, cores=8)


def test_communication_longer_than_computation_is_reported() -> None:
    rows = {0: row(forward=5.0, wait=5.0), 1: row(forward=5.0, wait=5.0)}
    assert (
        diagnose_rows(rows, synchronous=True) == "no rank is slow; 50 % of each step of 10.0 ms goes into communication"
    )


def test_a_run_without_a_step_has_no_diagnosis() -> None:
    assert "no step is done" in diagnose_rows({}, synchronous=True)
    assert straggler_scores([]) == []
    assert straggler_scores([row(forward=1.0)]) == [0.0]


def test_scores_are_between_0_and_the_whole_step() -> None:
    assert straggler_scores([row(forward=1.0, wait=9.0), row(forward=10.0)]) == [0.0, pytest.approx(0.9)]
    assert straggler_scores([row(forward=3.0), row(forward=3.0)]) == [0.0, 0.0]


@pytest.mark.parametrize("ranks", [2, 3, 4, 9, 10])
def test_scores_compare_a_rank_with_the_median_of_the_others(ranks: int) -> None:
    values = random.Random(ranks)
    for _ in range(20):
        busy = [values.choice([1.0, 2.0, 2.0, 3.5, 5.0]) for _ in range(ranks)]
        step = max(busy)
        medians = [statistics.median(busy[:index] + busy[index + 1 :]) for index in range(ranks)]
        wanted = [max(0.0, (seconds - median) / step) for seconds, median in zip(busy, medians, strict=True)]
        assert straggler_scores([row(forward=seconds, wait=step - seconds) for seconds in busy]) == pytest.approx(
            wanted
        )
