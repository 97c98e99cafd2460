"""Paths of new checkpoints: existing files are versioned, and what a callback keeps is not overwritten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fabricx.callbacks.checkpoint_files import Suffixes
from fabricx.callbacks.checkpoint_paths import CheckpointPaths
from fabricx.callbacks.kept_checkpoints import KeptCheckpoints


def paths(folder: Path, records: KeptCheckpoints, *others: KeptCheckpoints, versions: bool = True) -> CheckpointPaths:
    return CheckpointPaths(folder, Suffixes(), versions, records, others)


def records(*kept: Path, link: str = "") -> KeptCheckpoints:
    return KeptCheckpoints(models={str(path): torch.tensor(0.5) for path in kept}, link=link)


def test_a_name_that_exists_gets_a_version_unless_its_checkpoint_is_displaced(tmp_path: Path, trainer: Any) -> None:
    run, existing = trainer(), tmp_path / "best.ckpt"
    assert paths(tmp_path, records()).free(run, "best") == str(existing)
    existing.write_text("")
    assert paths(tmp_path, records(existing)).free(run, "best") == str(tmp_path / "best-v1.ckpt")
    assert paths(tmp_path, records(existing)).free(run, "best", displaced=str(existing)) == str(existing)


def test_without_versions_only_checkpoints_of_other_callbacks_are_kept(tmp_path: Path, trainer: Any) -> None:
    run, existing = trainer(), tmp_path / "best.ckpt"
    existing.write_text("")
    own = records(existing)
    assert paths(tmp_path, own, versions=False).free(run, "best") == str(existing)
    assert paths(tmp_path, records(), own, versions=False).free(run, "best") == str(tmp_path / "best-v1.ckpt")


def test_a_link_replaces_its_own_and_no_link_of_another_callback(tmp_path: Path, trainer: Any) -> None:
    run, link = trainer(), tmp_path / "last.ckpt"
    link.symlink_to(tmp_path / "step=4.ckpt")
    assert paths(tmp_path, records(link=str(link))).link(run, "last") == str(link)
    assert paths(tmp_path, records(), records(link=str(link))).link(run, "last") == str(tmp_path / "last-v1.ckpt")
