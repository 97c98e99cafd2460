"""Docstrings for the reference: an entry of several arguments becomes an entry for each, and examples become code."""

from __future__ import annotations

import re
from typing import Any, Final

import griffe

_SHARED: Final = re.compile(r"^( +)(\*{0,2}\w+(?:, \*{0,2}\w+)+): (.*\n?(?:\1 +\S.*\n?)*)", re.MULTILINE)
_EXAMPLE: Final = re.compile(r"^>>> .*(?:\n.+)*\n?", re.MULTILINE)


def one_entry_each(docstring: str) -> str:
    r"""Divide entries of several arguments or errors.

    Args:
        docstring: in Google's style.

    >>> print(one_entry_each("Args:\n    low, high: of the\n        range.\n    step: size."))
    Args:
        low: of the
            range.
        high: of the
            range.
        step: size.
    """

    def divided(match: re.Match[str]) -> str:
        text = match[3] if match[3].endswith("\n") else f"{match[3]}\n"
        entries = "".join(f"{match[1]}{name}: {text}" for name in match[2].split(", "))
        return entries if match[3].endswith("\n") else entries[:-1]

    return _SHARED.sub(divided, docstring)


def fenced(docstring: str) -> str:
    """Return a docstring with its interactive examples as blocks of code, which Markdown would show as quotations.

    Args:
        docstring: without common indentation.
    """
    return _EXAMPLE.sub(lambda match: f"```pycon\n{match[0].rstrip()}\n```\n", docstring)


class OneEntryEach(griffe.Extension):
    """Divides entries and marks examples when an object is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(one_entry_each(obj.docstring.value))
