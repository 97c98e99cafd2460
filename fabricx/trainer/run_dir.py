"""The folder of a run, and the checkpoints from which it can continue."""

from __future__ import annotations

import secrets
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fabricx.checkpoint import is_committed, list_committed, read_manifest, verify
from fabricx.checkpoint.storage import as_path
from fabricx.errors import CheckpointError, did_you_mean

if TYPE_CHECKING:
    from fabricx.trainer.trainer import Trainer


def new_run_dir(root: Path) -> Path:
    """Return a folder's name for a run; two that start in the same second differ."""
    return root / "runs" / f"{datetime.now():%Y-%m-%d_%H-%M-%S}-{secrets.token_hex(3)}"


def resolve_checkpoint(trainer: Trainer, path: str | Path | None) -> Path | None:
    """Return the checkpoint that a path, "last" or "best" means; None to start fresh.

    Raises:
        ValueError: there is no best one, or nothing that is complete at the path.
        CheckpointError: it is damaged; "last" goes back to the one before.
    """
    if path is None:
        return None
    if path == "best":
        best = getattr(trainer.checkpoint_callback, "best_model_path", "")
        if not best:
            raise ValueError("ckpt_path='best': no checkpoint was written yet; call fit first, or give a path")
        return as_path(best)
    if path == "last":
        folders = [getattr(trainer.checkpoint_callback, "dirpath", None)]
        folders += [trainer.run_dir / "checkpoints"] if trainer.run_dir else []
        folders += sorted((Path(trainer.default_root_dir) / "runs").glob("*/checkpoints"), reverse=True)
        found = [list_committed(folder) for folder in folders if folder]
        newest = next((checkpoints for checkpoints in found if checkpoints), [])
        return newest_whole(newest) if newest else None
    given = as_path(path)
    if not is_committed(given):
        near = [str(one) for one in list_committed(given)] or [str(one) for one in list_committed(given.parent)]
        there = f"\n  complete ones: {', '.join(near)}" if near else ""
        hint = did_you_mean(str(path), ["last", "best", *near])
        raise ValueError(f"ckpt_path={str(path)!r}: there is no complete checkpoint.{hint}{there}")
    verify(given)
    return given.resolve()


def checkpoints_of(run_dir: Path, folder: str | Path | None = None) -> list[Path]:
    """Return what a run can go on from, the furthest last: its checkpoints, and its snapshots for recovery.

    Args:
        run_dir: the run's folder.
        folder: of its checkpoints, if that is another one.
    """
    placed = []
    for place in (folder or run_dir / "checkpoints", run_dir / "recovery"):
        for number, path in enumerate(list_committed(place)):
            manifest = read_manifest(path)
            if not manifest.get("weights_only", True):
                placed.append((int(manifest.get("step", 0)), number, path))
    return [path for _, _, path in sorted(placed, key=lambda entry: entry[:2])]


def newest_whole(checkpoints: list[Path]) -> Path:
    """Return the newest checkpoint whose files are what they were; damaged ones are named.

    Raises:
        CheckpointError: all are damaged.
    """
    for path in reversed(checkpoints):
        try:
            verify(path)
        except CheckpointError as error:
            print(f"ckpt_path='last': {error}; trying the one before", file=sys.stderr, flush=True)
        else:
            return path
    raise CheckpointError(f"ckpt_path='last': each checkpoint in {checkpoints[0].parent} is damaged")
