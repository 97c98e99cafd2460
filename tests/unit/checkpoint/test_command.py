"""The command that lists, verifies and exports checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from fabricx import checkpoint
from fabricx.checkpoint.command import main, table
from tests.unit.checkpoint.hostile import rewrite, saved


def test_words_of_a_checkpoint_do_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path)
    rewrite(path, lambda manifest: manifest.update(strategy="\x1b]0;title\x07\x1b[2J", step="\x9b1"))
    assert main(["ls", str(path)]) == 0
    assert not set(capsys.readouterr().out) & set("\x1b\x07\x9b")


def test_a_table_that_is_too_wide_has_a_line_for_each_folder(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    manifest = {"step": 7, "epoch": 1, "world_size": 2, "strategy": "DDP"}
    paths = [checkpoint.save(folder / f"{name}.ckpt", {}, manifest) for folder in folders for name in ("one", "two")]
    wide = table(paths)
    assert len(wide.splitlines()) == 5
    assert table(paths, 1000) == wide
    lines = table(paths, 70).splitlines()
    assert [line for line in lines if line in map(str, folders)] == list(map(str, folders))
    assert [line.split()[-1] for line in lines if line.endswith(".ckpt")] == ["one.ckpt", "two.ckpt"] * 2
    assert max(len(line) for line in lines if line not in map(str, folders)) <= 70
