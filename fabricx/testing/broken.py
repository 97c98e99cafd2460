"""The error of all contract suites."""

from __future__ import annotations


class BrokenContract(AssertionError):
    """A strategy, callback, logger, codec or launcher breaks its contract; the message names the difference."""
