"""Line charts as SVG that scales to any width and inherits the colours of the page."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

POINTS: Final = 240  # most points of a curve; groups of equal size are averaged
_MAX_POINTS: Final = 600  # most points of a chart
COLOURS: Final = 8  # colours of the page's style
_WIDTH, _HEIGHT = 600.0, 180.0

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """A chart.

    Attributes:
        title: title above the chart.
        svg: the curves, without labels; labels are HTML, so that scaling does not change their size.
        low: label of the bottom edge.
        high: label of the top edge.
        first: label of the left edge.
        last: label of the right edge.
        legend: name and colour number of each curve.
    """

    title: str
    svg: str
    low: str
    high: str
    first: str
    last: str
    legend: tuple[tuple[str, int], ...]


def thinned(points: Points, most: int = POINTS) -> list[tuple[float, float]]:
    """Reduce the points of a curve by averaging groups; the last point is kept unchanged.

    Args:
        points: (x, y) pairs; pairs with an infinite or NaN y are dropped.
        most: most points to return.

    >>> thinned([(1, 1.0), (2, 3.0), (3, 5.0), (4, 7.0)], 2)
    [(2, 2.0), (4, 7.0)]
    """
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    every = -(-len(finite) // most)
    if every <= 1:
        return finite
    groups = [finite[begin : begin + every] for begin in range(0, len(finite), every)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups[:-1]] + [finite[-1]]


def chart(title: str, curves: Mapping[str, Points]) -> Chart | None:
    """Draw curves.

    Args:
        title: title of the chart.
        curves: points by name of the curve.

    Returns:
        the chart, or None if no curve has a finite point.
    """
    most = max(8, min(POINTS, _MAX_POINTS // max(1, len(curves))))
    drawn = {name: kept for name, points in curves.items() if (kept := thinned(points, most))}
    if not drawn:
        return None
    xs = [x for points in drawn.values() for x, _ in points]
    ys = [y for points in drawn.values() for _, y in points]
    left, right, low, high = min(xs), max(xs), min(ys), max(ys)
    width, height = (right - left) or 1.0, (high - low) or 1.0

    def to_svg(x: float, y: float) -> str:
        return f"{(x - left) / width * _WIDTH:.1f},{_HEIGHT - (y - low) / height * _HEIGHT:.1f}"

    lines = []
    for number, (name, points) in enumerate(drawn.items()):
        tooltip = f"<title>{html.escape(name)}: {number_text(points[-1][1])} at the end</title>"
        style = f'class="line c{number % COLOURS}"'
        if len(points) == 1:
            x, y = to_svg(*points[0]).split(",")
            lines.append(f'<circle {style} cx="{x}" cy="{y}" r="4">{tooltip}</circle>')
        else:
            path = " ".join(to_svg(*point) for point in points)
            lines.append(f'<polyline {style} points="{path}">{tooltip}</polyline>')
    svg = (
        f'<svg viewBox="-4 -6 {_WIDTH + 8:.0f} {_HEIGHT + 12:.0f}" preserveAspectRatio="none" role="img" '
        f'aria-label="{html.escape(title)}">{"".join(lines)}</svg>'
    )
    legend = tuple((name, number % COLOURS) for number, name in enumerate(drawn))
    return Chart(title, svg, number_text(low), number_text(high), number_text(left), number_text(right), legend)


def number_text(value: float) -> str:
    """Format a number: integers below ten million without decimals, other numbers with four significant digits.

    Args:
        value: the number.

    >>> number_text(1200.0), number_text(0.0123456), number_text(3e-09)
    ('1200', '0.01235', '3e-09')
    """
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e7 else f"{value:.4g}"
