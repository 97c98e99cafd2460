"""Timelines of ranks as lanes of shares."""

from __future__ import annotations

import pytest

from fabricx.telemetry.events import Span
from fabricx.telemetry.pages.lanes import ACTIVITIES, lane_svg, lanes
from fabricx.telemetry.timeline import AFTER, OUTSIDE, START, Timeline

NAMES = [activity.name for activity in ACTIVITIES]


def a_timeline(seconds: float) -> Timeline:
    timeline = Timeline(0.0)
    timeline.change(0.5, fresh=True)
    timeline.spend(0.75 * seconds, {"forward": 0.25 * seconds, "wait": 0.25 * seconds})
    timeline.close(seconds, AFTER)
    return timeline


def test_each_kind_of_time_belongs_to_an_activity_with_a_distinct_colour() -> None:
    sources = [source for activity in ACTIVITIES for source in activity.sources]
    assert sorted(sources) == sorted([*Span, *OUTSIDE])
    assert len({activity.colour for activity in ACTIVITIES}) == len(ACTIVITIES)


def test_lanes_have_equal_bins_few_cells_and_whole_sums() -> None:
    drawn = lanes({0: a_timeline(40.0), 3: a_timeline(100.0)}, most=128)
    assert [lane.rank for lane in drawn] == [0, 3]
    assert len({lane.width_s for lane in drawn}) == 1
    assert all(len(lane.bins) <= 64 for lane in drawn)
    assert [sum(lane.seconds.values()) for lane in drawn] == [pytest.approx(40.0), pytest.approx(100.0)]
    assert all(sum(shares.values()) == pytest.approx(1.0) for lane in drawn for shares in lane.bins)
    assert drawn[1].seconds[NAMES.index("compute")] == pytest.approx(25.0)
    assert lanes({}) == []


def test_equal_bins_are_stored_once() -> None:
    [lane] = lanes({0: a_timeline(100.0)})
    cells = lane.data()["cells"]
    assert sum(count for count, *_ in cells) == len(lane.bins)
    assert len(cells) < 10
    assert cells[0][1:] == [NAMES.index("start-up"), 100]


def test_a_lane_is_drawn_with_an_area_for_each_activity() -> None:
    [lane] = lanes({0: a_timeline(100.0)})
    svg = lane_svg(lane, 100.0)
    assert svg.count("<path") == len(lane.seconds) == 4
    assert START not in svg
    assert len(svg) < 2_000
