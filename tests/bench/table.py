"""Ratios of times that were measured side by side, and what they should be."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One thing that was measured.

    Attributes:
        name: what it is.
        values: one for each round.
        unit: of the values.
        most: the largest ratio to the first row that is wanted; None for a row that only informs.
    """

    name: str
    values: Sequence[float]
    unit: str
    most: float | None = None


def interleaved(measures: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Measure all in turn, round after round and each round in the other direction: a machine that gets slower or
    busier meets all of them."""
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
