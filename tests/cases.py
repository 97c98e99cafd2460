"""Many cases in one test; its error names all failing cases."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator


def product(**values: Iterable[object]) -> Iterator[dict[str, object]]:
    """Return all combinations of the values of several arguments."""
    return (dict(zip(values, case, strict=True)) for case in itertools.product(*values.values()))


def check_each(check: Callable[..., None], cases: Iterable[dict[str, object]]) -> None:
    """Call a function with the arguments of each case.

    Raises:
        AssertionError: the function raised in some cases; the message contains each such case with its error.
    """
    failed = []
    for case in cases:
        try:
            check(**case)
        except Exception as error:
            failed.append(f"{case}: {type(error).__name__}: {error}")
    assert not failed, f"{len(failed)} cases fail:\n" + "\n".join(failed)
