"""Tampered checkpoints with valid checksums; every function that reads checkpoints must refuse them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fabricx import checkpoint
from fabricx.errors import CheckpointError
from fabricx.testing import TinyModule

SHARD = "rank-00000.safetensors"


def saved(folder: Path) -> Path:
    return checkpoint.save(folder / "one", {"strategy": {"module": {"w": torch.arange(6.0)}}, "hparams": {}}, {})


def listed(data: bytes) -> dict[str, int]:
    return {"bytes": len(data), "crc32": zlib.crc32(data)}


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest like an attacker, with matching checksums."""
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    data = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(data)
    (path / "COMMITTED").write_text(f"manifest.json crc32 {zlib.crc32(data)}\n")


def replace(path: Path, name: str, data: bytes) -> None:
    (path / name).write_bytes(data)
    rewrite(path, lambda manifest: manifest["files"].update({name: listed(data)}))


def is_refused(path: Path, match: str | None = None) -> str:
    """Check that all reading functions refuse it with the same message; returns the message."""
    messages = set()
    for read in (
        lambda: checkpoint.load(path),
        lambda: checkpoint.load(path, verified=True),
        lambda: TinyModule.load_from_checkpoint(path),
    ):
        with pytest.raises(CheckpointError, match=match) as caught:
            read()
        messages.add(str(caught.value))
        assert caught.value.__suppress_context__ or caught.value.__context__ is None  # no other message is shown
    assert len(messages) == 1
    return messages.pop()
