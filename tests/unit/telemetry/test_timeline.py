"""Time of a rank: a bounded number of bins that sum to the wall clock, for any events."""

from __future__ import annotations

import operator

import pytest

from fabricx.telemetry import timeline as timelines
from fabricx.telemetry.run import Run
from fabricx.telemetry.timeline import AFTER, DOWN, RECOVERY, START, UNMEASURED, History, TimeBins, Timeline
from tests.unit.telemetry.test_run import record, steps_of

BEGAN = 1000.0


def test_the_number_of_bins_of_a_long_run_is_bounded_and_their_sum_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines, "MAX_BINS", 16)
    bins = TimeBins(BEGAN, operator.add)
    for second in range(1000):
        bins.spread(BEGAN + second, BEGAN + second + 1, "a" if second % 2 else "b")
    assert len(bins.bins) <= 16
    assert sum(values["a"] for values in bins.bins) == pytest.approx(500.0)
    assert all(sum(values.values()) == pytest.approx(bins.width) for values in bins.bins[:-1])
    peaks = TimeBins(BEGAN, max)
    for second in range(1000):
        peaks.put(BEGAN + second, "mib", 99.0 if second == 500 else 1.0)
    assert max(values["mib"] for values in peaks.bins) == 99.0


def test_all_time_of_a_rank_that_dies_and_returns_belongs_to_an_activity() -> None:
    timeline = Timeline(BEGAN)
    timeline.change(BEGAN + 1, fresh=True)
    timeline.spend(BEGAN + 5.0, {"forward": 1.0, "validation": 0.5})  # 3.5 s after the launch
    timeline.spend(BEGAN + 6.0, {"forward": 1.0})
    timeline.change(BEGAN + 8.0, fresh=True)  # the first process died
    timeline.spend(BEGAN + 10.0, {"forward": 1.0})
    timeline.change(BEGAN + 11.0, fresh=False)  # another rank died: the group changed
    timeline.spend(BEGAN + 13.0, {"forward": 1.5})
    timeline.spend(BEGAN + 15.0, {"forward": 1.0})  # a gap of unknown cause
    timeline.close(BEGAN + 16.0, AFTER)
    assert timeline.totals() == pytest.approx({
        START: 3.5, "forward": 5.5, "validation": 0.5, DOWN: 2.0, RECOVERY: 1.0 + 1.5, UNMEASURED: 1.0, AFTER: 1.0,
    })  # fmt: skip
    assert sum(timeline.totals().values()) == pytest.approx(16.0)


def test_a_validation_is_drawn_before_the_step_of_its_row() -> None:
    timeline = Timeline(BEGAN)
    timeline.spend(BEGAN + 4.0, {"forward": 2.0, "validation": 2.0})
    bins = timeline.activity
    activities = [next(iter(values)) for values in bins.bins if values]
    assert activities.index("forward") > activities.index("validation")
    assert activities[0] == "validation"


def test_clock_adjustments_change_no_sum() -> None:
    timeline = Timeline(BEGAN)
    timeline.spend(BEGAN + 2.0, {"forward": 5.0})  # more than the available time
    timeline.spend(BEGAN + 1.0, {"forward": 1.0})  # in the past
    timeline.spend(BEGAN + 3.0, {"forward": 1.0})
    assert timeline.totals() == pytest.approx({"forward": 3.0})


def test_a_run_accounts_for_all_time_of_each_rank() -> None:
    history = History()
    run = Run(history)
    run.feed([
        record("launched", None, 100.0),
        record("start", 0, 101.0, size=2), record("start", 1, 101.0, size=2),
        steps_of(0, 1, 101, 110.0, forward=8_000, validation=2_000), steps_of(1, 1, 101, 110.0, forward=10_000),
        record("now", 0, 110.5, memory_mib=300.0, cpu_cores=0.9),
        record("rest", 0, 111.5, since=111.5 - 1000.0, us={"validation": 500_000}),
        record("end", 0, 112.0, ending="success"),
        record("closed", None, 140.0, ending="success"),
    ])  # fmt: skip
    history.close(run.ended, {0: 112.0, 1: 110.0}, {1}, silent_s=10.0)
    totals = {rank: timeline.totals() for rank, timeline in history.timelines.items()}
    assert [sum(total.values()) for total in totals.values()] == [pytest.approx(40.0)] * 2
    assert totals[0][START] == pytest.approx(9.99)
    assert totals[0]["validation"] == pytest.approx(0.702)
    assert totals[0][AFTER] == pytest.approx(28.5)
    assert totals[1][DOWN] == pytest.approx(29.0)  # it was killed
    assert len(history.validations) == 102
    assert history.resources[0].bins[-1] == {"memory_mib": 300.0, "cpu_cores": 0.9}
    assert Run().feed([record("start", 0, 1.0), steps_of(0, 1, 3, 2.0, forward=1)]) is None  # training keeps no history


def test_a_run_that_ends_before_its_first_batch_has_only_started() -> None:
    history = History()
    run = Run(history)
    run.feed([
        record("launched", None, 100.0), record("start", 0, 101.0, size=1), record("end", 0, 112.0, ending="stopped"),
        record("closed", None, 113.0, ending="stopped"),
    ])  # fmt: skip
    history.close(run.ended, {0: 112.0}, set(), silent_s=10.0)
    assert history.timelines[0].totals() == pytest.approx({START: 12.0, AFTER: 1.0})


def test_validations_of_a_long_run_are_thinned() -> None:
    history = History()
    for step in range(10_000):
        history.spend(0, step, 0.0, {"validation": 1.0})
    assert 90 <= len(history.validations) <= 200
    assert history.validations == sorted(history.validations)
