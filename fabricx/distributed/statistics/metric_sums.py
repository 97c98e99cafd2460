"""Merge sums of logged values of several ranks: {name: [reduction options, total, weights]}."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor


def plain(value: Any) -> Any:
    """Convert a one-element tensor to a Python number, which is pickled a hundred times faster.

    Args:
        value: a tensor, or any other value, which is returned as it is.
    """
    return value.item() if isinstance(value, Tensor) else value


def merge_sums(sums: dict[str, Any], added: dict[str, Any]) -> dict[str, Any]:
    """Merge two dictionaries of metric sums, such as the sums of two parts of an epoch; the inputs stay unchanged.

    Args:
        sums: sums by metric name, [reduction options, total, weights]; the first option is "mean", "sum", "max" or
            "min".
        added: sums in the same form.

    >>> kind = ["mean", False, True, False, True, False]
    >>> merge_sums({"loss": [kind, 2.0, 1]}, {"loss": [kind, 4.0, 3]})["loss"][1:]
    [6.0, 4]
    """
    merged = dict(sums)
    for name, (kind, total, weights) in added.items():
        if name not in merged:
            merged[name] = [kind, total, weights]
            continue
        _, before, weights_before = merged[name]
        merged[name] = [kind, _reduce(kind[0], plain(before), plain(total)), weights_before + weights]
    return merged


def _reduce(reduction: str, old: float, new: float) -> float:
    if reduction in ("mean", "sum"):
        return old + new
    if math.isnan(old) or math.isnan(new):
        return math.nan
    return max(old, new) if reduction == "max" else min(old, new)
