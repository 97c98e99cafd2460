"""Line charts as SVG that fits any width and takes its colours from the page."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

POINTS: Final = 240  # the most of a curve; each stands for as many of the original
_TOGETHER: Final = 600  # the most of a picture
COLOURS: Final = 8
_WIDTH, _HEIGHT = 600.0, 180.0

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """One picture.

    Attributes:
        title: above it.
        svg: the curves; labels are the page's, so that they keep their size.
        low, high, first, last: what the edges stand for.
        legend: names and numbers of colours.
    """

    title: str
    svg: str
    low: str
    high: str
    first: str
    last: str
    legend: tuple[tuple[str, int], ...]


def thinned(points: Points, most: int = POINTS) -> list[tuple[float, float]]:
    """Return a curve of fewer points: each is the mean of its neighbours, and the last one stays as it is.

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
    """Return a picture of one or several curves; None if there is nothing to see."""
    most = max(8, min(POINTS, _TOGETHER // max(1, len(curves))))
    drawn = {name: found for name, points in curves.items() if (found := thinned(points, most))}
    if not drawn:
        return None
    xs = [x for points in drawn.values() for x, _ in points]
    ys = [y for points in drawn.values() for _, y in points]
    left, right, low, high = min(xs), max(xs), min(ys), max(ys)
    width, height = (right - left) or 1.0, (high - low) or 1.0

    def place(x: float, y: float) -> str:
        return f"{(x - left) / width * _WIDTH:.1f},{_HEIGHT - (y - low) / height * _HEIGHT:.1f}"

    lines = []
    for number, (name, points) in enumerate(drawn.items()):
        told = f"<title>{html.escape(name)}: {number_text(points[-1][1])} at the end</title>"
        style = f'class="line c{number % COLOURS}"'
        if len(points) == 1:
            x, y = place(*points[0]).split(",")
            lines.append(f'<circle {style} cx="{x}" cy="{y}" r="4">{told}</circle>')
        else:
            way = " ".join(place(*point) for point in points)
            lines.append(f'<polyline {style} points="{way}">{told}</polyline>')
    svg = (
        f'<svg viewBox="-4 -6 {_WIDTH + 8:.0f} {_HEIGHT + 12:.0f}" preserveAspectRatio="none" role="img" '
        f'aria-label="{html.escape(title)}">{"".join(lines)}</svg>'
    )
    legend = tuple((name, number % COLOURS) for number, name in enumerate(drawn))
    return Chart(title, svg, number_text(low), number_text(high), number_text(left), number_text(right), legend)


def number_text(value: float) -> str:
    """Return a number as people read it.

    >>> number_text(1200.0), number_text(0.0123456), number_text(3e-09)
    ('1200', '0.01235', '3e-09')
    """
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e7 else f"{value:.4g}"
