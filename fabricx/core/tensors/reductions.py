"""Reductions of logged values over batches and ranks: mean, sum, max or min."""

from __future__ import annotations

from typing import Any, Final, Literal

Reduction = Literal["mean", "sum", "max", "min"]
REDUCTIONS: Final = ("mean", "sum", "max", "min")

_ALIASES: Final = {"avg": "mean", "amax": "max", "amin": "min"}  # of torch.distributed and of torch's functions


def check_reduction(name: str, reduce_fx: Any) -> Reduction:
    """Return the name of a reduction.

    Args:
        name: name of the logged value, for the message.
        reduce_fx: name, or a function with such a name, such as `torch.mean`; "avg" is "mean".

    Raises:
        ValueError: it is not mean, sum, max or min.
    """
    word = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", str(reduce_fx))
    word = _ALIASES.get(word.lower(), word.lower())
    if word not in REDUCTIONS:
        raise ValueError(
            f"self.log({name!r}, ..., reduce_fx={reduce_fx!r}): unknown reduction.\n  known: {', '.join(REDUCTIONS)}"
        )
    return word  # type: ignore[return-value]
