"""The command that lists, verifies and exports checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fabricx import checkpoint
from fabricx.checkpoint.command import main, table
from tests.unit.checkpoint.hostile import rewrite, saved


def test_text_in_a_checkpoint_sends_no_control_characters_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_complex_numbers_in_double_precision_are_kept_and_an_export_of_them_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {name: torch.full(size, 1 / 3 + 2j / 3, dtype=torch.complex128) for name, size in
               {"a": (), "b": (3,), "c": (0, 2), "d": (2, 4)}.items()}  # fmt: skip
    path = checkpoint.save(tmp_path / "one.ckpt", {"strategy": {"module": weights}, "hparams": {}}, {})
    loaded = checkpoint.load(path, verified=True)["strategy"]["module"]
    assert loaded.keys() == weights.keys()
    for name, weight in weights.items():
        assert loaded[name].dtype == weight.dtype
        assert torch.equal(loaded[name], weight)
    assert main(["export", str(path)]) == 1
    assert "safetensors has no complex128, which is the type of a, b, c, d" in capsys.readouterr().err


def test_an_export_into_a_missing_folder_is_an_error_that_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint.save(tmp_path / "one.ckpt", {"strategy": {"module": {"a": torch.ones(1)}}, "hparams": {}}, {})
    target = tmp_path / "missing" / "weights.safetensors"
    assert main(["export", str(path), str(target)]) == 1
    assert f"error: {target} can't be written: " in capsys.readouterr().err
