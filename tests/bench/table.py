"""Ratios of times that were measured side by side, and their limits."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A measurement.

    Attributes:
        name: of the row.
        values: per round.
        unit: of the values.
        most: limit of the ratio to the first row; None without a limit.
    """

    name: str
    values: Sequence[float]
    unit: str
    most: float | None = None


def interleaved(measures: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Measure all rows in turn, in alternating order per round, so that a change in the machine's load affects all rows
    equally."""
    values: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(rounds):
        for name in list(measures) if number % 2 == 0 else list(measures)[::-1]:
            values[name].append(measures[name]())
    return values


def show(title: str, rows: Sequence[Row]) -> None:
    """Print the medians, and the medians of the ratios within a round."""
    print(f"\n{title}")
    width = max(len(row.name) for row in rows)
    for row in rows:
        ratios = [value / first for value, first in zip(row.values, rows[0].values, strict=True)]
        ratio = statistics.median(ratios)
        spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
        wanted = "" if row.most is None else f"  at most {row.most:.2f}: {'met' if ratio <= row.most else 'MISSED'}"
        print(f"  {row.name:<{width}}  {statistics.median(row.values):9.3f} {row.unit}  {ratio:5.2f} {spread}{wanted}")
