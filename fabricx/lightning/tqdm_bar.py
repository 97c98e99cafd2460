"""The class of bars at Lightning's path `callbacks.progress.tqdm_progress`."""

from __future__ import annotations

import math
from typing import Any, Final

from tqdm.auto import tqdm  # type: ignore[import-untyped]

_WIDTH: Final = 5  # of a number, at least: its place does not move when the last digit is 0


class Tqdm(tqdm):  # type: ignore[misc]  # tqdm has no types
    """A bar of tqdm whose numbers have a constant width."""

    @staticmethod
    def format_num(n: Any) -> str:
        """Return a number with zeros at its end, up to a width of 5.

        >>> Tqdm.format_num(0.1), Tqdm.format_num("1.0"), Tqdm.format_num(10), Tqdm.format_num(1e-5)
        ('0.100', '1.000', '10', '1e-5')

        Args:
            n: a number, or a text.
        """
        text: str = n if isinstance(n, str) else tqdm.format_num(n)
        if isinstance(n, float) and math.isfinite(n) and not set(text) & set(".e"):
            text += "."
        whole, point, _ = text.partition(".")
        return text.ljust(_WIDTH, "0") if point and "e" not in text and whole.lstrip("+-").isdigit() else text
