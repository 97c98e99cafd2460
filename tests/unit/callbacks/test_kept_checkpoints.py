"""Records of kept checkpoints: the checkpoints that each save supersedes, and restoration after a failed save."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from fabricx.callbacks.kept_checkpoints import KeptCheckpoints

A, B, C = "/runs/a.ckpt", "/runs/b.ckpt", "/runs/c.ckpt"


def records(**scores: float) -> KeptCheckpoints:
    kept = KeptCheckpoints()
    kept.keep({f"/runs/{name}.ckpt": torch.tensor(score) for name, score in scores.items()}, "min")
    return kept


def test_the_best_checkpoint_has_the_best_score_or_is_the_newest_without_a_metric() -> None:
    kept = records(a=0.25, b=0.5)
    assert (kept.best_path, kept.best_score) == (A, torch.tensor(0.25))
    kept.keep(kept.models, "max")
    assert kept.best_path == B
    newest = KeptCheckpoints()
    newest.keep({A: torch.tensor(float("nan")), B: torch.tensor(float("nan"))}, None)
    assert (newest.best_path, newest.best_score) == (B, None)


def test_a_save_supersedes_displaced_checkpoints_and_an_unranked_target_of_the_link() -> None:
    kept = records(a=0.5, b=0.25)
    kept.target = C
    pending = kept.begin("/runs/d.ckpt", 8, kept.copy(), A, "/runs/last.ckpt", permanent=False)
    assert pending.superseded == [A, C]
    assert (kept.link, kept.target, kept.paths) == ("/runs/last.ckpt", "/runs/d.ckpt", [A, B, "/runs/d.ckpt"])
    kept.target = B  # ranked: the link may point elsewhere
    assert kept.begin("/runs/e.ckpt", 9, kept.copy(), None, "/runs/last.ckpt", permanent=False).superseded == []


def test_permanent_checkpoints_are_never_superseded() -> None:
    kept = records(a=0.5)
    kept.begin(A, 4, kept.copy(), None, None, permanent=True)
    assert kept.begin(B, 8, kept.copy(), A, None, permanent=False).superseded == []


def test_a_failed_save_restores_the_records_before_it() -> None:
    kept = records(a=0.5)
    before = kept.copy()
    kept.keep({B: torch.tensor(0.25)}, "min")
    kept.begin(B, 8, before, A, "/runs/last.ckpt", permanent=False)
    kept.undo("min")
    assert (list(kept.models), kept.best_path, kept.link, kept.target, kept.pending) == ([A], A, "", "", None)
    kept.undo("min")  # nothing is pending: nothing changes
    assert list(kept.models) == [A]


def test_records_are_unchanged_by_saving_and_loading() -> None:
    kept = records(a=0.5, b=0.25)
    kept.begin(B, 8, kept.copy(), A, "/runs/last.ckpt", permanent=True)
    loaded = KeptCheckpoints()
    loaded.load(pickle.loads(pickle.dumps(kept.state())), "/runs")
    assert loaded == kept


def test_urls_of_another_folder_are_not_loaded() -> None:
    state = records(a=0.5).state()
    state |= {
        "best_model_path": "s3://other/a",
        "best_k_models": {"s3://other/a": torch.tensor(0.5), A: torch.tensor(1.0)},
    }
    kept = KeptCheckpoints()
    kept.load(state, "/runs")
    assert (kept.best_path, list(kept.models)) == ("", [A])


@pytest.mark.parametrize("links", [True, False])
def test_the_link_points_to_a_complete_checkpoint(links: bool, tmp_path: Path) -> None:
    kept, path, link = KeptCheckpoints(), tmp_path / "a.ckpt", tmp_path / "last.ckpt"
    path.mkdir()
    pending = kept.begin(str(path), 4, kept.copy(), None, str(link), permanent=False)
    kept.supersede(pending, str(tmp_path), links=links)
    assert link.is_symlink() is links
