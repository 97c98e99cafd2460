"""Checkpoints on disk: written whole or not at all."""

from __future__ import annotations

from fabricx.checkpoint.files import MANIFEST, MARKER, is_committed, list_committed, load, remove, save
from fabricx.checkpoint.loading import load_module

__all__ = ["MANIFEST", "MARKER", "is_committed", "list_committed", "load", "load_module", "remove", "save"]
