"""Items of collections in objects of users, whose classes may have no length."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def items_of(collection: Any, most: int) -> Iterable[tuple[Any, Any]]:
    """Return keys or indices, and items; nothing for a large collection, which is data.

    The methods of the built-in class are called: a derived class may refuse them, as the tuples of e3nn do.

    Args:
        collection: a dict, list or tuple, or of a derived class.
        most: number of items up to which a collection is not large.

    >>> class Term(tuple):
    ...     def __len__(self): raise NotImplementedError
    >>> list(items_of(Term((4, 5)), most=2)), list(items_of([1, 2, 3], most=2))
    ([(0, 4), (1, 5)], [])
    """
    if isinstance(collection, dict):
        return dict.items(collection) if dict.__len__(collection) <= most else ()
    base: Any = list if isinstance(collection, list) else tuple
    return enumerate(base.__iter__(collection)) if base.__len__(collection) <= most else ()
