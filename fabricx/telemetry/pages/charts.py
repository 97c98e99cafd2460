"""Line charts: data for the page's script, and an SVG for print and for readers without scripts."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

COLOURS: Final = 8  # colours of the page's style; further curves repeat them, dashed
BANDED: Final = 3  # most curves of a chart with a band between the lowest and the highest value of each group
_SVG_POINTS: Final = 120  # most points of a curve in the SVG
_MAX_BAD: Final = 50  # most markers of values that are not finite
_WIDTH, _HEIGHT = 600.0, 180.0
_FLATTENED: Final = 4.0  # values are cut off if they would shrink the others to a quarter of the chart or less

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Curve:
    """A curve of groups of points.

    Attributes:
        name: name in the legend.
        colour: number of the colour.
        dash: number of the pattern of dashes; 0 for a solid line.
        xs: x of each group: of its last point.
        ys: median of each group, which an outlier does not change.
        lows: lowest value of each group.
        highs: highest value of each group.
        bad: x of values that are not finite.
        best: draw the curve thicker.
    """

    name: str
    colour: int
    dash: int
    xs: list[float]
    ys: list[float]
    lows: list[float]
    highs: list[float]
    bad: list[float]
    best: bool = False


@dataclass(frozen=True)
class Tick:
    """A labelled line of the grid.

    Attributes:
        at: distance from the upper or left edge, percent.
        text: label.
    """

    at: float
    text: str


@dataclass(frozen=True)
class Chart:
    """A chart.

    Attributes:
        title: title above the chart.
        x: quantity of the x axis: "step" or "time".
        curves: the curves.
        low: lower end of the y axis, without outliers.
        high: upper end of the y axis, without outliers.
        bad: number of values that are not finite, and the x of the first.
        outside: number of values beyond `low` and `high`.
        lowest: lowest value.
        highest: highest value.
        help: sentence about the quantity.
    """

    title: str
    x: str
    curves: tuple[Curve, ...]
    low: float
    high: float
    bad: tuple[int, float]
    outside: int
    lowest: float
    highest: float
    help: str = ""

    @property
    def note(self) -> str:
        """Return a sentence about values that the chart does not show."""
        notes = []
        if self.bad[0]:
            notes.append(
                f"{self.bad[0]} not finite (NaN or infinite), the first at {self.x} {number_text(self.bad[1])}"
            )
        if self.outside:
            ends = f"{number_text(self.lowest)} to {number_text(self.highest)}"
            notes.append(f"{self.outside} outside of the axis (all: {ends})")
        return "values: " + "; ".join(notes) if notes else ""

    def data(self) -> dict[str, Any]:
        """Return the chart as plain data for the script of the page."""
        series, before = [], None
        banded = len(self.curves) <= BANDED
        for curve in self.curves:
            fields: dict[str, Any] = {"n": curve.name, "c": curve.colour, "y": [_short(y) for y in curve.ys]}
            if curve.xs != before:  # curves with the xs of the previous curve leave them out
                fields["x"] = [_short(x) for x in curve.xs]
            before = curve.xs
            if banded and curve.lows != curve.highs:
                fields |= {"l": [_short(y) for y in curve.lows], "h": [_short(y) for y in curve.highs]}
            fields |= {"d": curve.dash} if curve.dash else {}
            fields |= {"best": 1} if curve.best else {}
            fields |= {"bad": [_short(x) for x in curve.bad]} if curve.bad else {}
            series.append(fields)
        return {"x": self.x, "series": series, "range": [_short(self.low), _short(self.high)], "outside": self.outside}


def thinned(points: Points, most: int) -> Curve:
    """Reduce a curve to groups of equal size.

    Args:
        points: (x, y) pairs in the order of x.
        most: most groups.

    >>> curve = thinned([(1, 1.0), (2, 3.0), (3, 5.0), (4, 6.0), (5, 700.0), (6, 7.0)], 2)
    >>> curve.xs, curve.ys, curve.lows, curve.highs
    ([3, 6], [3.0, 7.0], [1.0, 6.0], [5.0, 700.0])
    """
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    bad = [x for x, y in points if not math.isfinite(y)]
    every = max(1, -(-len(finite) // most))
    groups = [finite[begin : begin + every] for begin in range(0, len(finite), every)]
    ys = [sorted(y for _, y in group) for group in groups]
    return Curve(
        "", 0, 0, [group[-1][0] for group in groups], [values[len(values) // 2] for values in ys],
        [values[0] for values in ys], [values[-1] for values in ys], bad[:: max(1, -(-len(bad) // _MAX_BAD))],
    )  # fmt: skip


def robust_range(values: Sequence[float]) -> tuple[float, float]:
    """Return a range that outliers don't widen, unless they leave the other values a quarter of the chart.

    The script of the page has the same function for the values of a zoomed chart.

    Args:
        values: finite values, at least 1.

    >>> robust_range([1.0] * 15 + [2.0] * 15 + [900.0]), robust_range([1.0, 2.0, 900.0])
    ((1.0, 2.0), (1.0, 900.0))
    """
    ordered = sorted(values)
    last = len(ordered) - 1
    if last < 19:
        return ordered[0], ordered[last]
    low, high = ordered[int(0.02 * last)], ordered[math.ceil(0.98 * last)]
    if last < 50:  # 2 % would be no value
        low, high = ordered[1], ordered[last - 1]
    spread = (high - low) or 0.1 * abs(high)
    kept = [value for value in ordered if low - 0.5 * spread <= value <= high + 0.5 * spread]
    # Equal values, and differences of less than a quarter of the values themselves, need no room.
    if kept[0] == kept[-1] or ordered[last] - ordered[0] < _FLATTENED * max(
        kept[-1] - kept[0], 0.25 * max(abs(low), abs(high))
    ):
        return ordered[0], ordered[last]
    return kept[0], kept[-1]


def chart(
    title: str, curves: Mapping[str, Points], most: int, *, x: str = "step", help: str = "", best: str = ""
) -> Chart | None:
    """Prepare a chart.

    Args:
        title: title of the chart.
        curves: points by name of the curve.
        most: most groups of points of a curve.
        x: quantity of the x axis: "step" or "time".
        help: sentence about the quantity.
        best: name of the curve to be drawn thicker.

    Returns:
        the chart, or None if no curve has a finite point.
    """
    drawn = []
    for number, (name, points) in enumerate(curves.items()):
        curve = thinned(points, most)
        if curve.xs:
            colour, dash = number % COLOURS, number // COLOURS % 4
            drawn.append(replace(curve, name=name, colour=colour, dash=dash, best=name == best))
    if not drawn:
        return None
    values = [y for points in curves.values() for _, y in points]
    finite = [y for y in values if math.isfinite(y)]
    low, high = robust_range(finite)
    bad_xs = [x for points in curves.values() for x, y in points if not math.isfinite(y)]
    return Chart(
        title, x, tuple(drawn), low, high, (len(bad_xs), min(bad_xs, default=0.0)),
        sum(not low <= y <= high for y in finite), min(finite), max(finite), help,
    )  # fmt: skip


@dataclass(frozen=True)
class Drawing:
    """A chart as SVG, and its labels, which are HTML so that scaling does not change their size.

    Attributes:
        svg: the curves.
        x_ticks: labels of the x axis.
        y_ticks: labels of the y axis.
    """

    svg: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]


def draw(chart: Chart, left: float, right: float, marks: Sequence[float] = ()) -> Drawing:
    """Draw a chart.

    Args:
        chart: the chart.
        left: left end of the x axis.
        right: right end of the x axis.
        marks: x of vertical lines.
    """
    margin = 0.04 * (chart.high - chart.low) or 0.05 * abs(chart.high) or 1.0
    low, high = chart.low - margin, chart.high + margin
    width, height = (right - left) or 1.0, high - low

    def to_svg(x: float, y: float) -> tuple[float, float]:
        return (x - left) / width * _WIDTH, _HEIGHT - (min(max(y, low), high) - low) / height * _HEIGHT

    ticks = nice_ticks(low, high, 4)
    lines = [f'<path class="gridline" d="M0 {to_svg(left, y)[1]:.1f}h{_WIDTH:.0f}"/>' for y in ticks]
    lines += [f'<path class="mark" d="M{to_svg(x, low)[0]:.1f} 0v{_HEIGHT:.0f}"/>' for x in marks if left <= x <= right]
    for curve in chart.curves:
        every = -(-len(curve.xs) // _SVG_POINTS)
        points = list(zip(curve.xs, curve.ys, strict=True))
        points = [*points[:-1:every], points[-1]]
        tooltip = f"<title>{html.escape(curve.name)}: {number_text(curve.ys[-1])} at the end</title>"
        style = f'class="line c{curve.colour} d{curve.dash}{" best" if curve.best else ""}"'
        path = " ".join("{:.1f},{:.1f}".format(*to_svg(*point)) for point in points)
        if len(points) == 1:
            cx, cy = path.split(",")
            lines.append(f'<circle {style} cx="{cx}" cy="{cy}" r="4">{tooltip}</circle>')
        else:
            lines.append(f'<polyline {style} points="{path}">{tooltip}</polyline>')
    svg = (
        f'<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" preserveAspectRatio="none" role="img" '
        f'aria-label="{html.escape(chart.title)}">{"".join(lines)}</svg>'
    )
    label = duration_text if chart.x == "time" else number_text
    x_ticks = nice_ticks(left, right, 5, time=chart.x == "time")
    return Drawing(
        svg, [Tick(100 * (x - left) / width, label(x)) for x in x_ticks],
        [Tick(100 * to_svg(left, y)[1] / _HEIGHT, number_text(y)) for y in ticks],
    )  # fmt: skip


def nice_ticks(low: float, high: float, most: int, *, time: bool = False) -> list[float]:
    """Return round numbers within a range.

    Args:
        low: lower end.
        high: upper end.
        most: most numbers.
        time: the numbers are seconds, which are round in minutes and hours.

    >>> nice_ticks(0.0, 9.3, 5), nice_ticks(0, 200, 5, time=True)
    ([0.0, 2.0, 4.0, 6.0, 8.0], [0.0, 60.0, 120.0, 180.0])
    """
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= rough * 0.999)
    if time and rough > 10.0:
        nice = (15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 900.0, 1800.0, 3600.0, 7200.0, 14400.0, 21600.0, 43200.0)
        days = 86400.0 * -(-rough // 86400.0)
        step = next((seconds for seconds in nice if seconds >= rough), days)
    first = math.ceil(low / step - 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, math.floor(high / step + 1e-9) + 1)]


def number_text(value: float) -> str:
    """Format a number: integers below ten million without decimals, other numbers with four significant digits.

    Args:
        value: the number.

    >>> number_text(1200.0), number_text(0.0123456), number_text(3e-09)
    ('1200', '0.01235', '3e-09')
    """
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e7 else f"{value:.4g}"


def duration_text(seconds: float) -> str:
    """Format a time since the start of a run for an axis.

    Args:
        seconds: the time.

    >>> duration_text(0.5), duration_text(90.0), duration_text(5400.0)
    ('0.5 s', '1:30 min', '1:30 h')
    """
    if seconds < 60:
        return f"{seconds:.4g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d} h"


def _short(value: float) -> float:
    """Return a number with five significant digits; integers stay whole."""
    return int(value) if value == round(value) and abs(value) < 1e15 else float(f"{value:.5g}")
