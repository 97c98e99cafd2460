"""The folder of a run, and the checkpoints from which it can continue."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import warnings
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fabricx.checkpoint import is_committed, is_foreign, list_committed, read_foreign, read_manifest, verify
from fabricx.checkpoint.files import oldest_first
from fabricx.checkpoint.storage import as_path, is_local
from fabricx.errors import CheckpointError, MissingCheckpoint, PossibleUserWarning, did_you_mean
from fabricx.launch.run_lock import is_detached, lock_owner, occupied
from fabricx.telemetry.events import FOLDER
from fabricx.telemetry.reader import open_untrusted

if TYPE_CHECKING:
    from fabricx.core.callback import Callback

_LAST: Final = 65536  # bytes at the end of a file that contain its last record
_IN_PROGRESS: Final = "is in progress"


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
        trains: the run trains: "last" is the newest checkpoint or snapshot for recovery from which training can
            continue, or the beginning.

    Raises:
        ValueError: no best checkpoint was saved, the path is not a complete checkpoint, there is no last checkpoint
            to evaluate, or "last" is of a run that continues without the process that has started it.
        CheckpointError: the checkpoint is damaged; for "last", all checkpoints are damaged.
    """
    if path is None:
        return None
    if path == "best":
        best = getattr(callback, "best_model_path", "")
        if not best:
            if getattr(callback, "best_k_models", None):
                raise ValueError(
                    "ckpt_path='best': the monitored metric was NaN in each checkpoint, and NaN is never the best; "
                    "pass 'last' or a path"
                )
            raise ValueError("ckpt_path='best': no checkpoint was written yet; call fit first, or pass a path")
        return as_path(best)
    if path == "last":
        if trains:
            _refuse_detached(root)
        newest = newest_checkpoints(callback, run_dir, root, trains=trains)
        if newest:
            return newest_whole((trains and _resumable(newest)) or newest)
        if not trains:
            raise ValueError("ckpt_path='last': there is no complete checkpoint; call fit first, or pass a path")
        warnings.warn(
            "ckpt_path='last': there is no checkpoint, so training starts from the beginning",
            PossibleUserWarning,
            stacklevel=2,
        )
        return None
    checkpoint = as_path(path)
    if is_foreign(checkpoint):
        read_foreign(checkpoint, "meta")  # an error before any process starts
        return checkpoint.resolve()
    if not is_committed(checkpoint):
        nearby = (checkpoint, checkpoint / "checkpoints", checkpoint.parent)
        near = next(filter(None, ([str(complete) for complete in list_committed(folder)] for folder in nearby)), [])
        others = "".join(f"\n  {complete}" for complete in near[1:])
        listing = f"\n  complete checkpoints: {near[0]}{others}" if near else ""
        hint = did_you_mean(str(path), ["last", "best", *near]) if not checkpoint.is_dir() else ""
        hint = " 'last' is the newest checkpoint, also of a job that is submitted again." if path == "hpc" else hint
        if not hint and not near:
            listing = "\n  pass the path of a checkpoint, 'last' or 'best'; `fabricx checkpoint ls FOLDER` lists paths"
        raise MissingCheckpoint(f"ckpt_path={str(path)!r}: there is no complete checkpoint.{hint}{listing}")
    verify(checkpoint)
    return checkpoint.resolve()


def _refuse_detached(root: Path) -> None:
    """Refuse to train from the last checkpoint of a run that continues: a second run would train the same steps."""
    for lock in root.glob("runs/*/running"):
        owner = lock_owner(lock.parent)
        if owner is not None and is_detached(owner):
            raise occupied(lock.parent, owner)


def newest_checkpoints(callback: Callback | None, run_dir: Path | None, root: Path, *, trains: bool) -> list[Path]:
    """Return the complete checkpoints of the newest run that has some, among which "last" is chosen; oldest first.

    Args:
        callback, run_dir, root, trains: see `resolve_checkpoint`.
    """
    runs = [run_dir] if run_dir else []
    runs += sorted((root / "runs").glob("*"), reverse=True)
    folder = getattr(callback, "dirpath", None)
    committed = [_committed(folder, run_dir, trains=trains)] if folder else []
    committed += [_committed(run / "checkpoints", run, trains=trains) for run in runs]
    return next((checkpoints for checkpoints in committed if checkpoints), [])


def describe(checkpoint: Path) -> str:
    """Return the path of a checkpoint with its position, and how the run that wrote it ended.

    Args:
        checkpoint: a complete checkpoint, or a file of another program.
    """
    shown = os.path.relpath(checkpoint) if is_local(checkpoint) else str(checkpoint)
    shown = min(shown, str(checkpoint), key=len)
    if is_foreign(checkpoint):
        return shown
    manifest = read_manifest(checkpoint)
    ending = ending_of(checkpoint.parent.parent) if is_local(checkpoint) else ""
    return f"{shown} (step {manifest.get('step')}, epoch {manifest.get('epoch')}{ending and f'; its run {ending}'})"


def ending_of(run_dir: Path) -> str:
    """Return how a run ended, such as "failed"; "" without records of a run.

    Args:
        run_dir: the run's folder.
    """
    owner = lock_owner(run_dir) if (run_dir / "running").exists() else None
    if owner is not None and owner.split()[:1] != [str(os.getpid())]:
        return _IN_PROGRESS
    try:
        newest = max((run_dir / FOLDER).glob("launcher-*.jsonl"), key=lambda file: file.stat().st_mtime)
        with open_untrusted(newest) as file:
            file.seek(max(0, newest.stat().st_size - _LAST))
            record = json.loads(file.read().splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return ""
    endings = {"success": "is complete", "failed": "failed", "interrupted": "was interrupted"}
    return endings.get(str(record.get("ending")), "was killed")


def checkpoints_of(run_dir: Path, folder: str | Path | None = None) -> list[Path]:
    """Return the checkpoints from which a run can resume, with snapshots for recovery, sorted by step and time.

    A checkpoint without a readable manifest has the step of the checkpoint before it; `newest_whole` reports it.

    Args:
        run_dir: the run's folder.
        folder: folder of its checkpoints; None for the default within `run_dir`.
    """
    resumable, step = [], 0
    sources = (folder or run_dir / "checkpoints", run_dir / "recovery")
    for path in oldest_first([path for source in sources for path in list_committed(source)]):
        with contextlib.suppress(CheckpointError):
            manifest = read_manifest(path)
            if manifest.get("weights_only", True):
                continue
            step = int(manifest.get("step", 0))
        resumable.append((step, path))
    return [path for _, path in sorted(resumable, key=lambda entry: entry[0])]


def _committed(folder: Path | str, run_dir: Path | None, *, trains: bool) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first, for training with a run's snapshots for recovery.

    A run in progress deletes its snapshots, so these are omitted.
    """
    checkpoints = list_committed(folder)
    if trains and run_dir is not None and (snapshots := list_committed(run_dir / "recovery")):
        checkpoints += snapshots if ending_of(run_dir) != _IN_PROGRESS else []
    return oldest_first(checkpoints)


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
