"""The extent of long tests: few cases in `make test`, all cases in `make soak`, a sample with SOAK below 1."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Final, TypeVar

import pytest

T = TypeVar("T")
SOAK: Final = float(os.environ.get("FABRICX_SOAK", "0"))
SEED: Final = int(os.environ.get("FABRICX_SEED", "1"))  # seed of the sample


def rounds(short: int, full: int) -> int:
    """Return the number of cases of a test.

    Args:
        short: cases in `make test`.
        full: cases with FABRICX_SOAK=1; FABRICX_SOAK=n tries n times as many, and never fewer than `short`.
    """
    return max(short, round(full * SOAK))


def params(short: Iterable[Any], more: Iterable[Any]) -> list[Any]:
    """Return the parameters of a test.

    Args:
        short: parameters of `make test`.
        more: additional parameters of `make soak`: variants of code that the short parameters cover.
    """
    added = [case if isinstance(case, Sequence) and not isinstance(case, str) else (case,) for case in more]
    return [*short, *(pytest.param(*case, marks=pytest.mark.soak) for case in added if SOAK)]


def seeds(short: int, full: int) -> list[int]:
    """Return the seeds of the cases: the first seeds in `make test`, a sample of all seeds in a part of a soak."""
    count = rounds(short, full)
    if not SOAK or count >= full:
        return list(range(count))
    return sorted(random.Random(SEED).sample(range(full), count))


def some(cases: Iterable[T], short: int, full: int) -> list[T]:
    """Return a number of cases: the first cases in `make test`, a sample of all kinds in a part of a soak.

    The last cells of a list of pairs differ in few features only: its first tenth doesn't contain a tenth of each kind.
    """
    count = rounds(short, full)
    if not SOAK:
        return list(islice(cases, count))
    candidates = list(cases)
    return random.Random(SEED).sample(candidates, min(count, len(candidates)))


def covering(cases: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return all combinations of values in a soak; in `make test`, combinations in which each value occurs.

    Args:
        cases: the combinations; values are compared by their `repr`.
    """
    rest, chosen, seen = list(cases), [], set[tuple[int, str]]()
    while rest and not SOAK:
        values = [set(enumerate(map(repr, case))) - seen for case in rest]
        index = max(range(len(rest)), key=lambda number: len(values[number]))
        if not values[index]:
            return chosen
        seen |= values[index]
        chosen.append(rest.pop(index))
    return [*chosen, *rest]
