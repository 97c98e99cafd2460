"""Parse durations and counts in text: "2h30m", "500st"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final, Literal

Unit = Literal["step", "epoch", "batch", ""]

_SECONDS: Final = {"w": 604800.0, "d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|[wdhms])")
_UNITS: Final[Mapping[str, Unit]] = {"st": "step", "ep": "epoch", "ba": "batch", "": ""}
_COUNT: Final = re.compile(r"(\d[\d_]*)\s*([a-z]*)")


def parse_duration(value: str | timedelta | Mapping[str, float]) -> timedelta:
    """Parse a duration.

    >>> parse_duration("2h30m")
    datetime.timedelta(seconds=9000)
    >>> parse_duration("00:12:00:00") == parse_duration({"hours": 12})
    True

    Args:
        value: a `timedelta`; text of numbers with the units w, d, h, m, s, ms; "DD:HH:MM:SS"; or a mapping with the
            arguments of `timedelta`.

    Raises:
        ValueError: `value` is invalid, or negative.
    """
    try:
        if isinstance(value, timedelta):
            length = value
        else:
            length = _from_mapping(value) if isinstance(value, Mapping) else _from_text(str(value))
    except OverflowError:
        raise ValueError(f"the duration {value!r} is too long") from None
    if length < timedelta(0):
        raise ValueError(f"the duration {value!r} must be 0 or more")
    return length


def _from_mapping(value: Mapping[str, float]) -> timedelta:
    try:
        return timedelta(**value)
    except TypeError:
        raise ValueError(
            f"the duration {dict(value)} can't be parsed; valid keys: weeks, days, hours, minutes, seconds"
        ) from None


def _from_text(text: str) -> timedelta:
    compact = re.sub(r"\s+", "", text.lower())
    clock = re.fullmatch(r"(\d+):(\d+):(\d+):(\d+)", compact)
    if clock:
        days, hours, minutes, seconds = map(int, clock.groups())
        return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    parts = _PART.findall(compact)
    units = [unit for _, unit in parts]
    if not parts or "".join(number + unit for number, unit in parts) != compact or len(set(units)) < len(units):
        hint = f' Did you mean "{compact}s" or "{compact}m"?' if re.fullmatch(r"\d+(\.\d+)?", compact) else ""
        raise ValueError(
            f"the duration {text!r} can't be parsed.{hint}\n"
            '  write numbers with units (w, d, h, m, s, ms), such as "2h30m" or "90s", or "DD:HH:MM:SS"'
        )
    return timedelta(seconds=sum(float(number) * _SECONDS[unit] for number, unit in parts))


def parse_count(text: str) -> tuple[int, Unit]:
    """Parse a count with an optional unit.

    >>> parse_count("500st"), parse_count("3ep"), parse_count("10")
    ((500, 'step'), (3, 'epoch'), (10, ''))

    Args:
        text: a whole number with the unit "st" (steps, i.e. weight updates), "ep" (epochs), "ba" (batches) or none.

    Returns:
        number and unit; the unit is "" if the text has none.

    Raises:
        ValueError: the text is not a whole number, or its unit is unknown.
    """
    match = _COUNT.fullmatch(text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(
            f"the count {text!r} can't be parsed\n"
            '  write a whole number with a unit: st (steps), ep (epochs) or ba (batches), such as "500st"'
        )
    return int(match[1]), _UNITS[match[2]]


def check_count(name: str, value: Any, unit: str, least: int = 0) -> int | None:
    """Validate a number of epochs, steps or batches.

    Args:
        name: name of the argument, for error messages.
        value: whole number, text such as "3ep" or "500st", or None.
        unit: expected unit: "step", "epoch" or "batch".
        least: smallest valid number.

    Returns:
        the number; None for None.

    Raises:
        ValueError: `value` cannot be parsed, has a different unit, or is too small.
    """
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value, text_unit = parse_count(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if text_unit not in (unit, ""):
            raise ValueError(f"{name} counts {unit}, not {text_unit}: write a number without a unit")
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: must be a whole number, {least} or more")
    return value
