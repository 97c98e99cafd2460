"""How `self.log` joins values over batches and ranks: mean, sum, max or min."""

from __future__ import annotations

from typing import Any, Final, Literal

Reduction = Literal["mean", "sum", "max", "min"]
REDUCTIONS: Final = ("mean", "sum", "max", "min")


def check_reduction(name: str, reduce_fx: Any) -> Reduction:
    """Return the reduction's name; `torch.mean` and its kin are taken by their names.

    Raises:
        ValueError: it isn't one of mean, sum, max, min.
    """
    word = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", str(reduce_fx))
    if word not in REDUCTIONS:
        raise ValueError(f"self.log({name!r}, ..., reduce_fx={reduce_fx!r}): known are {', '.join(REDUCTIONS)}")
    return word  # type: ignore[return-value]
