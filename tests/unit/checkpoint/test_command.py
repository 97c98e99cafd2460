"""The command that lists, verifies and exports checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from fabricx.checkpoint.command import main
from tests.unit.checkpoint.hostile import rewrite, saved


def test_words_of_a_checkpoint_do_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path)
    rewrite(path, lambda manifest: manifest.update(strategy="\x1b]0;title\x07\x1b[2J", step="\x9b1"))
    assert main(["ls", str(path)]) == 0
    assert not set(capsys.readouterr().out) & set("\x1b\x07\x9b")
