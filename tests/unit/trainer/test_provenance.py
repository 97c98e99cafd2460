"""Records of a run's origin in its folder."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fabricx.trainer import provenance


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, timeout=30)


def test_the_commit_says_whether_files_have_changed_since(tmp_path: Path) -> None:
    assert provenance.git_commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert provenance.git_commit(tmp_path) is None  # nothing is committed yet
    (tmp_path / "train.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    commit = provenance.git_commit(tmp_path)
    assert commit is not None
    assert len(commit) == 40
    (tmp_path / "train.py").write_text("2")
    assert provenance.git_commit(tmp_path) == f"{commit}-dirty"


def test_a_run_is_described_once_and_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--token=abc", "lr=1"])
    folder = tmp_path / "run"
    provenance.write(folder, {"module": {"lr": 0.1, "api_key": "abc"}})
    monkeypatch.setattr(sys, "orig_argv", ["fabricx", "resume"])
    provenance.write(folder, None)
    assert "train.py" in (command := (folder / "command.txt").read_text())
    assert "lr=1" in command
    assert yaml.safe_load((folder / "config.yaml").read_text()) == {"module": {"lr": 0.1, "api_key": "<masked>"}}
    versions = json.loads((folder / "versions.json").read_text())
    assert {"python", "torch", "git"} <= set(versions)
    assert not any("abc" in path.read_text() for path in folder.iterdir())


def test_a_configuration_truncated_by_a_full_disk_is_not_used_for_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_text(file: Path, text: str) -> None:
        file.write_bytes(text[:20].encode())
        if len(text) > 5000:
            raise OSError(errno.ENOSPC, "No space left on device")

    provenance.write(tmp_path, {"seed": 1})
    monkeypatch.setattr(Path, "write_text", write_text)
    monkeypatch.setattr(provenance, "versions", dict)
    with pytest.raises(ValueError, match=r"config-resumed-1.yaml can't be written \(No space left"):
        provenance.write_resumed(tmp_path, {f"key{number}": number for number in range(1000)})
    assert provenance.newest_configuration(tmp_path) == tmp_path / "config.yaml"
    assert not list(tmp_path.glob(".*.new"))


def test_arguments_are_written_where_there_is_no_configuration(tmp_path: Path) -> None:
    provenance.write_arguments(tmp_path, {"max_steps": 3})
    provenance.write_arguments(tmp_path, {"max_steps": 4})
    assert yaml.safe_load((tmp_path / "arguments.yaml").read_text()) == {"max_steps": 3}
    other = tmp_path / "configured"
    provenance.write(other, {})
    provenance.write_arguments(other, {"max_steps": 3})
    assert not (other / "arguments.yaml").exists()


def test_a_file_without_secrets_is_not_written_again(tmp_path: Path) -> None:
    plain, secret = tmp_path / "plain.yaml", tmp_path / "secret.yaml"
    plain.write_text("lr:   0.1  # a comment\n")
    secret.write_text("password: abc\n")
    for file in (plain, secret):
        provenance.mask_file(file)
    assert plain.read_text() == "lr:   0.1  # a comment\n"
    assert yaml.safe_load(secret.read_text()) == {"password": "<masked>"}
