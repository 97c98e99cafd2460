"""Page that compares the runs of a sweep."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fabricx.telemetry.pages import render
from fabricx.telemetry.pages.charts import Tick, nice_ticks, number_text
from fabricx.telemetry.pages.gallery import Curves, moving, sections_of
from fabricx.telemetry.report import LoadedRun
from fabricx.telemetry.sweep import Entry, Sweep, comparison, short_names, sweep_of

_MAX_SCATTERS: Final = 12  # keys with a picture
_MAX_AXES: Final = 8  # axes of the parallel coordinates
_MAX_COLUMNS: Final = 12  # columns of a table; a wider table of few runs has a column for each run
_MAX_NAMES: Final = 12  # labels of an axis
_LOGARITHMIC: Final = 20.0  # values whose largest is this multiple of the smallest are shown on a logarithmic axis
_CLASSES: Final = 5  # colours of scores
_WIDTH, _HEIGHT = 1000.0, 300.0


@dataclass(frozen=True)
class Axis:
    """An axis for values of a configuration or a metric.

    Attributes:
        places: place of each run, 0 to 1; None if it has no value.
        ticks: labels, at percent of the axis.
    """

    places: list[float | None]
    ticks: list[Tick]


def write_comparison(folder: Path, runs: Sequence[LoadedRun]) -> Path:
    """Write the HTML page that compares runs.

    Args:
        folder: folder of the sweep, for the page.
        runs: the runs.

    Returns:
        path of the page.
    """
    sweep = sweep_of(runs)
    header, rows = comparison(runs)
    return render.write_page(
        folder / "report.html", "sweep.html.j2", lambda scale: _facts(folder.resolve().name, sweep, header, rows, scale)
    )


def _facts(
    title: str, sweep: Sweep, header: Sequence[str], rows: Sequence[Sequence[str]], scale: float
) -> dict[str, Any]:  # fmt: skip
    """Return the values for the template."""
    best = sweep.best
    curves = [
        Curves(
            name,
            {
                e.label: sorted(e.loaded.run.metrics[name].items())
                for e in sweep.entries
                if name in e.loaded.run.metrics
            },
            best=best.label if best else "",
        )
        for name in sorted(sweep.metrics, key=lambda name: (name != sweep.monitor, name))
    ]
    text = "Curves are named by the values that differ; the best run is thicker."
    sections, data = sections_of([("Metrics over the steps", text, moving(curves))], (), 0.0, scale)
    upright = len(header) <= _MAX_COLUMNS or len(rows) > _MAX_COLUMNS // 2
    columns = [{"name": name, "number": all(_is_number(row[n]) for row in rows)} for n, name in enumerate(header)]
    return {
        "data": {**data, "lanes": [], "marks": [], "activities": []}, "title": title, "sections": sections,
        "header": [{**column, "number": column["number"] and n > 0} for n, column in enumerate(columns)],
        "rows": [
            {"cells": row, "best": entry.best, "number": number}
            for number, (row, entry) in enumerate(zip(rows, sweep.entries, strict=True))
        ],
        "upright": upright, "columns": [*zip(header, *rows, strict=True)], "entries": sweep.entries,
        "monitor": sweep.monitor, "mode": sweep.mode,
        "best": best and {"label": best.label, "score": number_text(best.score), "run": best.loaded.run_dir.name},
        "scatters": scatters(sweep), "parallel": parallel(sweep),
    }  # fmt: skip


def axis_of(values: Sequence[str | None]) -> Axis:
    """Return an axis for values: linear or logarithmic for numbers, a place per value for other text.

    Args:
        values: values of the runs; None if a run has no value.

    >>> axis_of(["1", "2", "3"]).places, axis_of(["0.001", "0.1"]).places, axis_of(["b", None, "a"]).places
    ([0.0, 0.5, 1.0], [0.0, 1.0], [1.0, None, 0.0])
    """
    known = [value for value in values if value is not None]
    if known and all(_is_number(value) for value in known):
        numbers = [float(value) for value in known]
        low, high = min(numbers), max(numbers)
        logarithmic = low > 0.0 and high >= _LOGARITHMIC * low

        def position_of(number: float) -> float:
            if high == low:
                return 0.5
            if logarithmic:
                return math.log(number / low) / math.log(high / low)
            return (number - low) / (high - low)

        distinct = sorted(set(numbers))
        shown = distinct if len(distinct) <= 5 else [low, high] if logarithmic else nice_ticks(low, high, 5)
        places = [None if value is None else position_of(float(value)) for value in values]
        return Axis(places, _apart([Tick(100 * position_of(number), number_text(number)) for number in shown]))
    names = sorted(set(known))
    step = max(1, len(names) - 1)
    position = {name: number / step if len(names) > 1 else 0.5 for number, name in enumerate(names)}
    every = -(-len(names) // _MAX_NAMES)
    ticks = [Tick(100 * position[name], name[:24]) for name in names[::every]] if every else []
    return Axis([None if value is None else position[value] for value in values], ticks)


def _apart(ticks: Sequence[Tick]) -> list[Tick]:
    """Return the labels that keep a distance of 8 percent."""
    kept: list[Tick] = []
    for tick in ticks:
        if not kept or tick.at - kept[-1].at >= 8.0:
            kept.append(tick)
    return kept


def scatters(sweep: Sweep) -> list[dict[str, Any]]:
    """Return pictures of the monitored metric against each value that differs.

    Args:
        sweep: the runs.
    """
    scored = [entry for entry in sweep.entries if math.isfinite(entry.score)]
    if len(scored) < 2:
        return []
    scores = [entry.score for entry in scored]
    low, high = min(scores), max(scores)
    margin = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
    bottom, height = low - margin, high - low + 2 * margin
    ticks = nice_ticks(bottom, bottom + height, 4)
    plots = []
    for key in sweep.varied[:_MAX_SCATTERS]:
        axis = axis_of([entry.swept.get(key) for entry in scored])
        lines = [f'<path class="gridline" d="M0 {_down(y, bottom, height):.1f}h{_WIDTH:.0f}"/>' for y in ticks]
        for entry, position in zip(scored, axis.places, strict=True):
            if position is not None:
                x, y = _WIDTH * (0.05 + 0.9 * position), _down(entry.score, bottom, height)
                lines.append(_mark(sweep, entry, "point", f"M{x:.1f} {y:.1f}h.01"))
        plots.append({
            "title": f"{sweep.monitor} against {short_names(sweep.varied)[key]}", "x": key, "svg": _svg(key, lines),
            "x_ticks": [Tick(5 + 0.9 * tick.at, tick.text) for tick in axis.ticks],
            "y_ticks": [Tick(100 * _down(y, bottom, height) / _HEIGHT, number_text(y)) for y in ticks],
        })  # fmt: skip
    return plots


def parallel(sweep: Sweep) -> dict[str, Any] | None:
    """Return parallel coordinates: a line per run through its values to its score.

    Args:
        sweep: the runs.
    """
    scored = [entry for entry in sweep.entries if math.isfinite(entry.score)]
    keys = sweep.varied[:_MAX_AXES]
    if len(scored) < 2 or not keys:
        return None
    axes = [axis_of([entry.swept.get(key) for entry in scored]) for key in keys]
    axes.append(axis_of([f"{entry.score:.9g}" for entry in scored]))
    lefts = [_WIDTH * number / (len(axes) - 1) for number in range(len(axes))]
    order = sorted(range(len(scored)), key=lambda n: scored[n].score, reverse=sweep.mode != "max")
    rank = {index: position for position, index in enumerate(order)}
    lines = [f'<path class="axisline" d="M{x:.1f} 0v{_HEIGHT:.0f}"/>' for x in lefts]
    for index in order:  # better runs above worse runs
        places = [axis.places[index] for axis in axes]
        points = [
            (x, _HEIGHT * (1 - position)) for x, position in zip(lefts, places, strict=True) if position is not None
        ]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        colour = f"path q{rank[index] * _CLASSES // len(scored)}"
        lines.append(_mark(sweep, scored[index], colour, f"M{path}"))
    names = [*short_names(keys).values(), sweep.monitor]
    values = [
        {"left": left / _WIDTH * 100, "top": 100 - tick.at, "text": tick.text, "last": axis is axes[-1]}
        for left, axis in zip(lefts, axes, strict=True) for tick in axis.ticks
    ]  # fmt: skip
    heads = [Tick(left / _WIDTH * 100, name) for left, name in zip(lefts, names, strict=True)]
    return {"axes": heads, "labels": values, "svg": _svg("parallel coordinates", lines)}


def _mark(sweep: Sweep, entry: Entry, style: str, path: str) -> str:
    number = sweep.entries.index(entry)
    text = html.escape(f"{entry.loaded.run_dir.name}: {entry.label}; {sweep.monitor} = {number_text(entry.score)}")
    best = " best" if entry.best else ""
    return f'<path class="{style}{best}" data-run="{number}" d="{path}"><title>{text}</title></path>'


def _svg(title: str, lines: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" preserveAspectRatio="none" role="img" '
        f'aria-label="{html.escape(title)}">{"".join(lines)}</svg>'
    )


def _down(value: float, bottom: float, height: float) -> float:
    return _HEIGHT * (1 - (value - bottom) / height)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
