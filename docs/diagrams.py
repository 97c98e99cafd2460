"""Sequence diagrams, which GitHub draws from Mermaid's text, as SVG in the site, which loads no script for them."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Final

FENCE: Final = re.compile(r"^```mermaid\nsequenceDiagram\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PARTICIPANT: Final = re.compile(r"participant (\w+) as (.+)")
_NOTE: Final = re.compile(r"Note over (\w+)(?:,(\w+))?: *(.+)")
_MESSAGE: Final = re.compile(r"(\w+?)(-?)-(>>|x)(\w+): *(.+)")
_COLUMN, _ROW, _CHARACTER, _TOP = 190, 34, 7.0, 46  # pixels


def drawn(text: str) -> str:
    """Return an SVG of a sequence diagram.

    Args:
        text: lines of participants, messages and notes.

    Raises:
        ValueError: a line is none of these.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    names = {match[1]: match[2] for line in lines if (match := _PARTICIPANT.fullmatch(line))}
    steps = [line for line in lines if not _PARTICIPANT.fullmatch(line)]
    column = max(_COLUMN, *(8.0 * len(label) + 26 for label in names.values()))
    at = {name: column * (number + 0.5) for number, name in enumerate(names)}
    width, height = max(column * len(names), *(_right(step, at) for step in steps)), _TOP + _ROW * len(steps) + 12
    parts = [part for name, label in names.items() for part in _lifeline(label, at[name], column / 2 - 7, height)]
    for number, line in enumerate(steps):
        parts += _step(line, at, _TOP + _ROW * (number + 0.75), width)
    return (
        '<div class="diagram">\n'
        f'<svg class="sequence" viewBox="0 0 {width} {height}" style="width:{width}px" role="img">\n'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z"/></marker><marker id="end" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="9" '
        'markerHeight="9" orient="auto"><path d="M1 1L7 7M7 1L1 7" stroke="currentColor"/></marker></defs>\n'
        + "\n".join(parts)
        + "\n</svg></div>\n"
    )


def _right(line: str, at: dict[str, float]) -> float:
    """Return the width that a step needs: a participant's message to itself may have space at one side only."""
    message = _MESSAGE.fullmatch(line)
    if message is None or message[1] != message[4]:
        return 0.0
    needed = 30 + len(message[5]) * _CHARACTER
    return 0.0 if at[message[1]] > needed else at[message[1]] + needed


def _lifeline(label: str, x: float, half: float, height: float) -> Iterator[str]:
    yield f'<line class="life" x1="{x}" x2="{x}" y1="{_TOP - 14}" y2="{height}"/>'
    yield f'<rect x="{x - half}" y="2" width="{2 * half}" height="30" rx="4"/>'
    yield f'<text x="{x}" y="21" class="name">{html.escape(label)}</text>'


def _step(line: str, at: dict[str, float], y: float, width: float) -> Iterator[str]:
    if note := _NOTE.fullmatch(line):
        x, half = (at[note[1]] + at[note[2] or note[1]]) / 2, len(note[3]) * _CHARACTER / 2 + 8
        x = min(max(x, half), width - half)
        yield f'<rect class="note" x="{x - half}" y="{y - 17}" width="{2 * half}" height="24"/>'
        yield f'<text x="{x}" y="{y}">{html.escape(note[3])}</text>'
        return
    message = _MESSAGE.fullmatch(line)
    if message is None:
        raise ValueError(f"{line!r} is neither a participant, nor a message, nor a note of a sequence diagram")
    source, dashed, tip, target, label = message.groups()
    look = f'class="{"dashed" if dashed else "solid"}" marker-end="url(#{"end" if tip == "x" else "tip"})"'
    if source == target:
        needed = 30 + len(label) * _CHARACTER
        left = at[source] + needed > width and at[source] > needed
        side, anchor = (-1, "end") if left else (1, "start")
        yield f'<path {look} d="M{at[source]} {y - 8}h{22 * side}v14h{-22 * side}"/>'
        yield f'<text class="{anchor}" x="{at[source] + 30 * side}" y="{y + 3}">{html.escape(label)}</text>'
        return
    yield f'<line {look} x1="{at[source]}" x2="{at[target]}" y1="{y + 4}" y2="{y + 4}"/>'
    half = len(label) * _CHARACTER / 2
    x = min(max((at[source] + at[target]) / 2, half), width - half)
    yield f'<text x="{x}" y="{y - 2}">{html.escape(label)}</text>'
