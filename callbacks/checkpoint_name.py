"""From a template and the metrics of the moment to the name of a checkpoint."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

DEFAULT_TEMPLATE: Final = "{epoch}-{step}"
_FIELD: Final = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")


def format_name(template: str, metrics: Mapping[str, float], auto_insert: bool = True) -> str:
    """Fill in a template's fields.

    >>> format_name("{epoch}-{step}-{val_loss:.2f}", {"epoch": 3, "step": 40, "val_loss": 0.1234})
    'epoch=3-step=40-val_loss=0.12'
    >>> format_name("best-{epoch:02d}", {"epoch": 3}, auto_insert=False)
    'best-03'

    Args:
        template: text with `{name}` or `{name:format}`, where a name is that of a logged metric, "epoch" or "step".
        metrics: the values; a name without one becomes "nan".
        auto_insert: put "name=" before each value. A "/" in the name becomes "_", since it would make a folder.

    Raises:
        ValueError: a format isn't one that numbers have.
    """

    def fill(field: re.Match[str]) -> str:
        name, spec = field[1], field[2] or ""
        text = _format_value(metrics.get(name, math.nan), name, spec)
        return f"{name.replace('/', '_')}={text}" if auto_insert else text

    return _FIELD.sub(fill, template)


def _format_value(value: float, name: str, spec: str) -> str:
    try:
        if isinstance(value, int):
            return format(value, spec)
        if not math.isfinite(value):
            return str(value)
        return format(int(value) if spec.endswith("d") else value, spec or ".6g")
    except ValueError:
        raise ValueError(
            f"the checkpoint's file name has the field {{{name}:{spec}}}, and {spec!r} is not a format of numbers; "
            'formats are such as ".2f" or "03d"'
        ) from None
