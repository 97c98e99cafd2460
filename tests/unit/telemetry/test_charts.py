"""Curves as pictures of bounded size."""

from __future__ import annotations

from fabricx.telemetry.charts import POINTS, chart, thinned


def test_a_curve_of_many_points_keeps_its_shape_and_its_end() -> None:
    points = [(float(n), float(n % 2)) for n in range(10_000)]
    reduced = thinned(points)
    assert len(reduced) <= POINTS
    assert reduced[-1] == points[-1]
    assert all(abs(y - 0.5) < 0.1 for _, y in reduced[:-1])
    assert thinned([(0.0, float("nan")), (1.0, 2.0)]) == [(1.0, 2.0)]


def test_curves_that_have_nothing_to_show_are_no_picture() -> None:
    assert chart("a", {"a": [(1.0, float("nan"))], "b": []}) is None
    drawn = chart("a", {"a": [(1.0, 3.0)]})
    assert drawn is not None
    assert "circle" in drawn.svg
