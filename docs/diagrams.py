"""Diagrams, which GitHub draws from Mermaid's text, as SVG in the site, which loads no script for them."""

from __future__ import annotations

import html
import itertools
import re
from collections.abc import Iterator
from typing import Final

FENCE: Final = re.compile(r"^```mermaid\n(sequenceDiagram|flowchart TD)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PARTICIPANT: Final = re.compile(r"participant (\w+) as (.+)")
_NOTE: Final = re.compile(r"Note over (\w+)(?:,(\w+))?: *(.+)")
_MESSAGE: Final = re.compile(r"(\w+?)(-?)-(>>|x)(\w+): *(.+)")
_COLUMN, _ROW, _CHARACTER, _TOP = 190, 34, 7.0, 46  # pixels


_ANSWER: Final = re.compile(r"""(\w+)(?:\{"(.+?)"\})? -->\|(yes|no)\| (\w+)(?:(\{|\[)"(.+?)"[\}\]])?""")
_WIDE, _HIGH, _GAP_X, _GAP_Y, _LINE = 168, 46, 40, 24, 15  # pixels: size of a box, space between boxes, line of text


def drawn(kind: str, text: str) -> str:
    """Return an SVG of a diagram.

    Args:
        kind: first line of the diagram.
        text: its other lines.

    Raises:
        ValueError: a line is not understood.
    """
    return _sequence(text) if kind == "sequenceDiagram" else _decisions(text)


def _decisions(text: str) -> str:
    """Return an SVG of questions: "yes" leads to the right, "no" leads down."""
    labels, answers = dict[str, str](), dict[str, dict[str, str]]()
    for line in filter(None, map(str.strip, text.splitlines())):
        match = _ANSWER.fullmatch(line)
        if match is None:
            raise ValueError(f"{line!r} is no answer of a decision chart")
        question, label, answer, target, _, target_label = match.groups()
        labels |= {name: shown for name, shown in ((question, label), (target, target_label)) if shown}
        answers.setdefault(question, {})[answer] = target
    first = next(iter(answers))
    places = dict(_places(first, answers, 0, itertools.count()))
    columns, rows = (1 + max(place[axis] for place in places.values()) for axis in (0, 1))
    width, height = columns * (_WIDE + _GAP_X) - _GAP_X + 2, rows * (_HIGH + _GAP_Y) - _GAP_Y + 2
    parts = [part for name, place in places.items() for part in _box(labels[name], place, asks=name in answers)]
    for question, targets in answers.items():
        parts += [part for answer, name in targets.items() for part in _arrow(answer, places[question], places[name])]
    return _svg("decisions", width, height, parts)


def _places(
    name: str, answers: dict[str, dict[str, str]], column: int, rows: Iterator[int]
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield column and row of each box below a box; a question and its "yes" share a row."""
    while name in answers:
        below = list(_places(answers[name]["yes"], answers, column + 1, rows))
        yield name, (column, below[0][1][1])
        yield from below
        name = answers[name]["no"]
    yield name, (column, next(rows))


def _box(label: str, place: tuple[int, int], *, asks: bool) -> Iterator[str]:
    x, y = 1 + place[0] * (_WIDE + _GAP_X), 1 + place[1] * (_HIGH + _GAP_Y)
    lines, look = label.split("<br>"), "" if asks else ' class="name"'
    yield f'<rect x="{x}" y="{y}" width="{_WIDE}" height="{_HIGH}" rx="{18 if asks else 3}"/>'
    top = y + _HIGH / 2 + 4 - _LINE * (len(lines) - 1) / 2
    for number, line in enumerate(lines):
        yield f'<text{look} x="{x + _WIDE / 2}" y="{top + _LINE * number}">{html.escape(line)}</text>'


def _arrow(answer: str, source: tuple[int, int], target: tuple[int, int]) -> Iterator[str]:
    x, y = 1 + source[0] * (_WIDE + _GAP_X), 1 + source[1] * (_HIGH + _GAP_Y)
    if answer == "yes":
        x, y = x + _WIDE, y + _HIGH / 2
        yield f'<line class="solid" marker-end="url(#tip)" x1="{x}" x2="{x + _GAP_X}" y1="{y}" y2="{y}"/>'
        yield f'<text x="{x + _GAP_X / 2 - 3}" y="{y - 5}">yes</text>'
        return
    x, y, end = x + _WIDE / 2, y + _HIGH, 1 + target[1] * (_HIGH + _GAP_Y)
    yield f'<line class="solid" marker-end="url(#tip)" x1="{x}" x2="{x}" y1="{y}" y2="{end}"/>'
    yield f'<text class="start" x="{x + 6}" y="{y + _GAP_Y / 2 + 2}">no</text>'


def _sequence(text: str) -> str:
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
    return _svg("sequence", width, height, parts)


def _svg(kind: str, width: float, height: float, parts: list[str]) -> str:
    return (
        '<div class="diagram">\n'
        f'<svg class="{kind}" viewBox="0 0 {width} {height}" style="width:{width}px" role="img">\n'
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
