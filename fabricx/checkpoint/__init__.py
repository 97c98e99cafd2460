"""Checkpoints on disk: written whole or not at all, by all ranks at once, and read by any number of them."""

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

if TYPE_CHECKING:
    from fabricx.checkpoint.loading import load as load
    from fabricx.checkpoint.loading import load_module as load_module
    from fabricx.checkpoint.writing import Writer as Writer
    from fabricx.checkpoint.writing import save as save

# torch.distributed.checkpoint takes most of a second to import: not before tensors are written or read.
_LATER = {"load": "loading", "load_module": "loading", "Writer": "writing", "save": "writing"}
__all__ = ["MANIFEST", "MARKER", "is_committed", "list_committed", "read_manifest", "remove", "sweep", "verify"]
__all__ += ["Writer", "load", "load_module", "save"]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
