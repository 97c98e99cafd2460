"""Checkpoints on disk: atomic, written by all ranks in parallel, readable by any number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabricx.checkpoint.files import (
    MANIFEST,
    MARKER,
    is_committed,
    list_committed,
    read_manifest,
    remove,
    sweep,
    verify,
)
from fabricx.checkpoint.storage import as_file

if TYPE_CHECKING:
    from fabricx.checkpoint.foreign import is_foreign as is_foreign
    from fabricx.checkpoint.foreign import read_foreign as read_foreign
    from fabricx.checkpoint.reader import data_state as data_state
    from fabricx.checkpoint.reader import load as load
    from fabricx.checkpoint.reader import load_data as load_data
    from fabricx.checkpoint.reader import load_module as load_module
    from fabricx.checkpoint.writer import Writer as Writer
    from fabricx.checkpoint.writer import save as save

# torch.distributed.checkpoint takes most of a second to import, so it is imported at first use.
_LATER = {
    "data_state": "reader",
    "is_foreign": "foreign",
    "load": "reader",
    "load_data": "reader",
    "load_module": "reader",
    "read_foreign": "foreign",
    "save": "writer",
    "Writer": "writer",
}
__all__ = ["MANIFEST", "MARKER", "is_committed", "list_committed", "read_manifest", "remove", "sweep", "verify"]
__all__ += ["Writer", "as_file", "is_foreign", "load", "load_data", "load_module", "read_foreign", "save"]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
