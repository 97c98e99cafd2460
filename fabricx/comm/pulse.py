"""Signs of life: how far this process has come, for whoever watches it from outside."""

from __future__ import annotations

from typing import Final

_STEPS: Final = [0]


def advance() -> None:
    """Note that the main thread has come a batch further."""
    _STEPS[0] += 1


def reached() -> int:
    """Return how often it has."""
    return _STEPS[0]
