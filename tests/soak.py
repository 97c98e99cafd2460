"""How much of a long test is done: a little in `make test`, all in `make soak`, a sample of that with SOAK below 1."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Final, TypeVar

import pytest

T = TypeVar("T")
SOAK: Final = float(os.environ.get("FABRICX_SOAK", "0"))
SEED: Final = int(os.environ.get("FABRICX_SEED", "1"))  # which sample


def rounds(short: int, full: int) -> int:
    """Return how many cases a test tries.

    Args:
        short: cases in `make test`.
        full: cases with FABRICX_SOAK=1; FABRICX_SOAK=n tries n times as many, and never fewer than `short`.
    """
    return max(short, round(full * SOAK))


def params(short: Iterable[Any], more: Iterable[Any]) -> list[Any]:
    """Return the parameters of a test.

    Args:
        short: those of `make test`.
        more: those that only `make soak` adds: variants whose code the short ones run, too.
    """
    added = [case if isinstance(case, Sequence) and not isinstance(case, str) else (case,) for case in more]
    return [*short, *(pytest.param(*case, marks=pytest.mark.soak) for case in added if SOAK)]


def seeds(short: int, full: int) -> list[int]:
    """Return the seeds of so many cases: the first ones in `make test`, and any of all in a part of a soak."""
    count = rounds(short, full)
    if not SOAK or count >= full:
        return list(range(count))
    return sorted(random.Random(SEED).sample(range(full), count))


def some(cases: Iterable[T], short: int, full: int) -> list[T]:
    """Return so many cases: the first ones in `make test`, and in a part of a soak any of the list, so of all kinds.

    Lists of pairs differ in their last cells in few features only: the first tenth of one isn't a tenth of its kinds.
    """
    count = rounds(short, full)
    if not SOAK:
        return list(islice(cases, count))
    known = list(cases)
    return random.Random(SEED).sample(known, min(count, len(known)))
