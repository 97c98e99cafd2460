"""The folder of a run, and the checkpoints from which it can continue."""

from __future__ import annotations

import contextlib
import secrets
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fabricx.checkpoint import is_committed, is_foreign, list_committed, read_foreign, read_manifest, verify
from fabricx.checkpoint.storage import as_path
from fabricx.errors import CheckpointError, did_you_mean

if TYPE_CHECKING:
    from fabricx.core.callback import Callback


def new_run_dir(root: Path) -> Path:
    """Return the path of a new folder for a run, which differs also from runs that start in the same second.

    Args:
        root: parent of the folder of all runs.
    """
    return root / "runs" / f"{datetime.now():%Y-%m-%d_%H-%M-%S}-{secrets.token_hex(3)}"


def resolve_checkpoint(
    path: str | Path | None, callback: Callback | None, run_dir: Path | None, root: Path, *, trains: bool = False
) -> Path | None:  # fmt: skip
    """Resolve "last", "best" or a path to a complete checkpoint; None to start from the beginning.

    Args:
        path: "last", "best" or a path; None for no checkpoint.
        callback: writes the run's checkpoints, and records the best; None without.
        run_dir: folder of the run, which is searched for the last checkpoint after the callback's folder.
        root: folder of all runs, which are searched after that.
        trains: the run trains: "last" is a checkpoint from which training can continue, or the beginning.

    Raises:
        ValueError: no best checkpoint was saved, the path is not a complete checkpoint, or there is no last checkpoint
            to evaluate.
        CheckpointError: the checkpoint is damaged; for "last", all checkpoints are damaged.
    """
    if path is None:
        return None
    if path == "best":
        best = getattr(callback, "best_model_path", "")
        if not best:
            raise ValueError("ckpt_path='best': no checkpoint was written yet; call fit first, or pass a path")
        return as_path(best)
    if path == "last":
        folders = [getattr(callback, "dirpath", None)]
        folders += [run_dir / "checkpoints"] if run_dir else []
        folders += sorted((root / "runs").glob("*/checkpoints"), reverse=True)
        committed = [list_committed(folder) for folder in folders if folder]
        newest = next((checkpoints for checkpoints in committed if checkpoints), [])
        if newest:
            return newest_whole((trains and _resumable(newest)) or newest)
        if not trains:
            raise ValueError("ckpt_path='last': there is no complete checkpoint; call fit first, or pass a path")
        print("ckpt_path='last': there is no checkpoint, so training starts from the beginning", file=sys.stderr)
        return None
    checkpoint = as_path(path)
    if is_foreign(checkpoint):
        read_foreign(checkpoint, "meta")  # an error before any process starts
        return checkpoint.resolve()
    if not is_committed(checkpoint):
        near = [str(p) for p in list_committed(checkpoint)] or [str(p) for p in list_committed(checkpoint.parent)]
        there = f"\n  complete checkpoints: {', '.join(near)}" if near else ""
        hint = did_you_mean(str(path), ["last", "best", *near])
        raise ValueError(f"ckpt_path={str(path)!r}: there is no complete checkpoint.{hint}{there}")
    verify(checkpoint)
    return checkpoint.resolve()


def checkpoints_of(run_dir: Path, folder: str | Path | None = None) -> list[Path]:
    """Return the checkpoints from which a run can resume, with snapshots for recovery, sorted by step.

    Args:
        run_dir: the run's folder.
        folder: of its checkpoints; None for the default within `run_dir`.
    """
    resumable = []
    for source in (folder or run_dir / "checkpoints", run_dir / "recovery"):
        for number, path in enumerate(list_committed(source)):
            manifest = read_manifest(path)
            if not manifest.get("weights_only", True):
                resumable.append((int(manifest.get("step", 0)), number, path))
    return [path for _, _, path in sorted(resumable, key=lambda entry: entry[:2])]


def _resumable(checkpoints: list[Path]) -> list[Path]:
    """Return the checkpoints up to the newest from which training can continue, which others may follow after an error.

    Args:
        checkpoints: paths, the newest last.
    """
    for number in range(len(checkpoints), 0, -1):
        with contextlib.suppress(CheckpointError):  # damaged: reported later
            if read_manifest(checkpoints[number - 1]).get("weights_only"):
                continue
        return checkpoints[:number]
    return []


def newest_whole(checkpoints: list[Path]) -> Path:
    """Return the newest intact checkpoint; print each newer, damaged checkpoint.

    Args:
        checkpoints: paths, the newest last.

    Raises:
        CheckpointError: all checkpoints are damaged.
    """
    for path in reversed(checkpoints):
        try:
            verify(path)
        except CheckpointError as error:
            print(f"ckpt_path='last': {error}; trying the previous checkpoint", file=sys.stderr, flush=True)
        else:
            return path
    raise CheckpointError(
        f"ckpt_path='last': all checkpoints in {checkpoints[0].parent} are damaged; set ckpt_path to the path of "
        "another checkpoint"
    )
