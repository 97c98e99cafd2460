"""Pickling of classes and functions that other processes cannot import: those of the script, and local ones."""

from fabricx.by_value.reducer import (
    RESOLVERS,
    Reducer,
    dump,
    dumps,
    dumps_for_peer,
    is_importable,
    supply_children,
    variables_of,
)
from fabricx.by_value.resolvers import Resolvers
from fabricx.by_value.shared_objects import share, shared_objects

__all__ = [
    "RESOLVERS",
    "Reducer",
    "Resolvers",
    "dump",
    "dumps",
    "dumps_for_peer",
    "is_importable",
    "share",
    "shared_objects",
    "supply_children",
    "variables_of",
]
