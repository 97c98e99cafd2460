"""The checkpoint from which a run continues."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fabricx import checkpoint
from fabricx.errors import CheckpointError, PossibleUserWarning
from fabricx.trainer import run_dir as module
from fabricx.trainer.run_dir import checkpoints_of, describe, ending_of, new_run_dir, newest_whole, resolve_checkpoint


def saved(path: Path, step: int = 0, **manifest: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return checkpoint.save(path, {"w": torch.arange(4.0)}, {"step": step, "weights_only": False, **manifest})


def damage(path: Path) -> None:
    [shard] = path.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])


def resolved(
    root: Path, path: Any, best: str = "", dirpath: Path | None = None, run_dir: Path | None = None, *,
    trains: bool = False,
) -> Path | None:  # fmt: skip
    callback: Any = SimpleNamespace(best_model_path=best, dirpath=dirpath)
    return resolve_checkpoint(path, callback, run_dir, root, trains=trains)


def test_runs_of_the_same_second_have_separate_folders(tmp_path: Path) -> None:
    assert len({new_run_dir(tmp_path) for _ in range(20)}) == 20


def test_best_is_the_callbacks_best_path_and_an_error_without_a_callback(tmp_path: Path) -> None:
    assert resolved(tmp_path, "best", best="/runs/best.ckpt") == Path("/runs/best.ckpt")
    with pytest.raises(ValueError, match="ckpt_path='best': no checkpoint was written yet; call fit first"):
        resolved(tmp_path, "best")
    only_nan: Any = SimpleNamespace(best_model_path="", best_k_models={"a.ckpt": float("nan")})
    with pytest.raises(ValueError, match="the monitored metric was NaN in each checkpoint"):
        resolve_checkpoint("best", only_nan, None, tmp_path, trains=False)


def test_last_is_searched_in_the_callbacks_folder_then_this_run_then_the_newest_run(
    tmp_path: Path,
) -> None:
    assert resolved(tmp_path, None) is None
    with pytest.raises(ValueError, match="ckpt_path='last': there is no complete checkpoint; call fit first"):
        resolved(tmp_path, "last")
    with pytest.raises(ValueError, match=r"ckpt_path='hpc'.* 'last' is the newest checkpoint"):
        resolved(tmp_path, "hpc")
    with pytest.warns(PossibleUserWarning, match="so training starts from the beginning"):
        assert resolved(tmp_path, "last", trains=True) is None
    runs = [tmp_path / "runs" / f"2026-01-0{day}" for day in (1, 2, 3)]
    older, newer = (saved(run / "checkpoints" / "last.ckpt") for run in runs[:2])
    (runs[2] / "checkpoints").mkdir(parents=True)  # a run that has saved nothing yet
    assert resolved(tmp_path, "last") == newer
    assert resolved(tmp_path, "last", run_dir=runs[0]) == older
    own_path = saved(tmp_path / "own" / "a.ckpt")
    assert resolved(tmp_path, "last", run_dir=runs[0], dirpath=tmp_path / "own") == own_path
    weights = saved(tmp_path / "own" / "exception.ckpt", 2, weights_only=True)  # written after an error within a step
    assert resolved(tmp_path, "last", dirpath=tmp_path / "own") == weights
    assert resolved(tmp_path, "last", dirpath=tmp_path / "own", trains=True) == own_path


def test_training_continues_from_a_newer_snapshot_of_a_run_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, begun = (tmp_path / "runs" / f"2026-01-0{day}" for day in (1, 2))
    written = saved(run / "checkpoints" / "a.ckpt", 5)
    snapshot = saved(run / "recovery" / "step=7", 7)
    (begun / "recovery").mkdir(parents=True)  # has saved nothing yet
    assert resolved(tmp_path, "last", trains=True) == snapshot
    assert resolved(tmp_path, "last") == written  # an evaluation
    monkeypatch.setattr(module, "lock_owner", lambda run: "1")
    (run / "running").touch()
    assert resolved(tmp_path, "last", trains=True) == written  # a run in progress deletes its snapshots
    monkeypatch.setattr(module, "lock_owner", lambda run: "1 detached: stop it")
    with pytest.raises(ValueError, match="continues, although the process that started it has died"):
        resolved(tmp_path, "last", trains=True)
    assert resolved(tmp_path, "last") == written
    monkeypatch.undo()
    newest = saved(run / "checkpoints" / "b.ckpt", 8)
    assert resolved(tmp_path, "last", trains=True) == newest
    assert resolved(tmp_path, "last", trains=True, run_dir=run, dirpath=run / "checkpoints") == newest
    only_snapshot = saved(begun / "recovery" / "step=2", 2)
    assert resolved(tmp_path, "last", trains=True) == only_snapshot
    own_path = saved(tmp_path / "own" / "a.ckpt")
    assert resolved(tmp_path, "last", trains=True, dirpath=tmp_path / "own") == own_path


def test_a_damaged_newest_checkpoint_is_skipped_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older, newer = saved(tmp_path / "a.ckpt", 1), saved(tmp_path / "b.ckpt", 2)
    damage(newer)
    assert newest_whole([older, newer]) == older
    assert "b.ckpt" in (output := capsys.readouterr().err)
    assert "trying the previous checkpoint" in output
    damage(older)
    with pytest.raises(CheckpointError, match=r"all checkpoints in .* are damaged; set ckpt_path"):
        newest_whole([older, newer])


def test_a_path_without_a_checkpoint_is_an_error_that_lists_nearby_checkpoints(tmp_path: Path) -> None:
    good = saved(tmp_path / "checkpoints" / "epoch=1.ckpt")
    assert resolved(tmp_path, good) == good
    for wrong in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "epoch=2.ckpt"):
        with pytest.raises(ValueError, match=r"there is no complete checkpoint.*\n  complete checkpoints: .*epoch=1"):
            resolved(tmp_path, wrong)
    with pytest.raises(FileNotFoundError, match="Did you mean 'last'"):
        resolved(tmp_path, "lats")
    with pytest.raises(FileNotFoundError, match="pass the path of a checkpoint, 'last' or 'best'"):
        resolved(tmp_path, tmp_path / "other" / "runs")
    damage(good)
    with pytest.raises(CheckpointError):
        resolved(tmp_path, good)


def test_a_run_is_resumed_from_checkpoints_and_snapshots_by_step(tmp_path: Path) -> None:
    snapshot = saved(tmp_path / "recovery" / "snapshot", 5)
    late, early = (saved(tmp_path / "checkpoints" / f"{name}.ckpt", step) for name, step in (("a", 7), ("b", 3)))
    saved(tmp_path / "checkpoints" / "weights.ckpt", 9, weights_only=True)
    assert checkpoints_of(tmp_path) == [early, snapshot, late]
    elsewhere = saved(tmp_path / "own" / "c.ckpt", 6)
    assert checkpoints_of(tmp_path, tmp_path / "own") == [snapshot, elsewhere]
    (late / "manifest.json").write_text("{")
    assert newest_whole(checkpoints_of(tmp_path)) == snapshot


@pytest.mark.parametrize(
    ("records", "ending"),
    [
        ('{"kind": "launched"}\n{"kind": "closed", "ending": "failed"}\n', "failed"),
        ('{"kind": "closed", "ending": "interrupted"}\n', "was interrupted"),
        ('{"kind": "closed", "ending": "success"}\n', "is complete"),
        ('{"kind": "launched"}\n', "was killed"),
        ("no record", ""),
        (None, ""),
    ],
)
def test_a_checkpoint_is_described_with_the_ending_of_its_run(tmp_path: Path, records: str | None, ending: str) -> None:
    path = saved(tmp_path / "checkpoints" / "a.ckpt", 5)
    if records is not None:
        (tmp_path / "telemetry").mkdir()
        (tmp_path / "telemetry" / "launcher-1.jsonl").write_text(records)
    assert ending_of(tmp_path) == ending
    text = describe(path)
    assert "(step 5, epoch" in text
    assert text.endswith(f"; its run {ending})" if ending else ")")
