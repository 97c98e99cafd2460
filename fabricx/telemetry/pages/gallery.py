"""Sections of charts: how many charts and points a page has room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fabricx.telemetry.pages.charts import Chart, Points, chart, draw

MAX_CHARTS: Final = 40  # charts of a section
_MAX_POINTS: Final = 18_000  # points of all curves
_MOST_POINTS, _LEAST_POINTS = 500, 16  # points of a curve


@dataclass
class Section:
    """Charts with a common headline.

    Attributes:
        title: the headline.
        help: sentence about the charts.
        charts: charts for the template.
        more: number of charts that were left out.
    """

    title: str
    help: str
    charts: list[dict[str, Any]] = field(default_factory=list)
    more: int = 0


@dataclass(frozen=True)
class Curves:
    """Curves of a chart before they are thinned.

    Attributes:
        title: title of the chart.
        points: points by name of the curve.
        x: quantity of the x axis: "step" or "time".
        help: sentence about the quantity.
        best: name of the curve to be drawn thicker.
    """

    title: str
    points: Mapping[str, Points]
    x: str = "step"
    help: str = ""
    best: str = ""


def sections_of(
    kinds: Sequence[tuple[str, str, Sequence[Curves]]], marks: Sequence[Mapping[str, Any]], seconds: float, scale: float
) -> tuple[list[Section], dict[str, Any]]:  # fmt: skip
    """Return sections of charts, and the data of the charts for the script.

    Args:
        kinds: headline, sentence and curves of each section.
        marks: events.
        seconds: duration of the run.
        scale: factor of the number of points.
    """
    kept = [(title, text, curves[:MAX_CHARTS], curves[MAX_CHARTS:]) for title, text, curves in kinds]
    count = sum(len(curves.points) for _, _, shown, _ in kept for curves in shown)
    most = int(scale * min(_MOST_POINTS, max(_LEAST_POINTS, _MAX_POINTS // max(1, count)))) or 2
    charts: list[Chart] = []
    sections = []
    for title, text, shown, more in kept:
        drawn = [chart(c.title, c.points, most, x=c.x, help=c.help, best=c.best) for c in shown]
        section = Section(title, text, [], len(more))
        section.charts = [{"chart": figure} for figure in drawn if figure is not None]
        charts += [figure for figure in drawn if figure is not None]
        sections.append(section)
    ends = {"step": _ends(charts), "time": (0.0, seconds)}
    lines = {key: [mark[key] for mark in marks if key in mark and mark["kind"] == "failure"] for key in ends}
    number = 0
    for section in sections:
        for entry in section.charts:
            figure = entry.pop("chart")
            entry |= {
                "number": number, "title": figure.title, "help": figure.help, "note": figure.note,
                "curves": figure.curves, "x": figure.x, "drawing": draw(figure, *ends[figure.x], lines[figure.x]),
            }  # fmt: skip
            number += 1
    return sections, {"charts": [figure.data() for figure in charts], "ends": ends}


def _ends(charts: Sequence[Chart]) -> tuple[float, float]:
    xs = [x for chart in charts if chart.x == "step" for curve in chart.curves for x in (curve.xs[0], curve.xs[-1])]
    return min(xs, default=0.0), max(xs, default=1.0)


def moving(curves: Sequence[Curves]) -> list[Curves]:
    """Return the charts with more than a single point.

    Args:
        curves: curves of each chart.
    """
    return [lines for lines in curves if any(len(points) > 1 for points in lines.points.values())]
