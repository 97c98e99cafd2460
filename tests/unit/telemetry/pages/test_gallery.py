"""Sections of charts within the limits of a page."""

from __future__ import annotations

import json

from fabricx.telemetry.pages.gallery import MAX_CHARTS, Curves, moving, sections_of

LINE = [(n, float(n)) for n in range(5_000)]


def test_many_curves_have_few_points_each_and_few_curves_have_many() -> None:
    def points(curves: int, scale: float = 1.0) -> int:
        kinds = [("a", "help", [Curves("chart", {f"rank {n}": LINE[:600] for n in range(curves)})])]
        [chart] = sections_of(kinds, (), 0.0, scale)[1]["charts"]
        return len(chart["series"][0]["y"])

    assert points(2) == 300  # groups of two
    assert points(100) == 150
    assert points(2_000) == 16
    assert points(2, scale=0.25) == 120


def test_charts_beyond_the_limit_are_counted_and_all_have_the_same_axis() -> None:
    curves = [Curves(f"metric {n}", {"a": LINE[n : n + 100]}) for n in range(MAX_CHARTS + 7)]
    [section], data = sections_of([("metrics", "help", curves)], (), 60.0, 1.0)
    assert (len(section.charts), section.more) == (MAX_CHARTS, 7)
    assert [entry["number"] for entry in section.charts] == list(range(MAX_CHARTS))
    assert data["ends"] == {"step": (0, MAX_CHARTS + 98), "time": (0.0, 60.0)}
    json.dumps(data, allow_nan=False)


def test_failures_are_lines_in_the_charts_of_their_axis() -> None:
    kinds = [("a", "help", [Curves("loss", {"loss": LINE}), Curves("memory", {"rank 0": LINE}, "time")])]
    marks = [{"kind": "failure", "step": 700, "time": 3.0}, {"kind": "checkpoint", "step": 9}]
    [section], _ = sections_of(kinds, marks, 5_000.0, 1.0)
    assert [entry["drawing"].svg.count('class="mark"') for entry in section.charts] == [1, 1]


def test_a_single_point_is_no_curve() -> None:
    assert moving([Curves("test_loss", {"test_loss": [(9, 0.5)]})]) == []
