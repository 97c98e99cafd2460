"""One run at a time in a folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fabricx.launch.run_lock import exclusive_run, lock_owner


def test_a_second_run_in_a_folder_is_refused_with_the_process_of_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    with exclusive_run(folder, "socket of the run"):
        assert lock_owner(folder) == f"{os.getpid()} socket of the run"
        with pytest.raises(ValueError, match=f"process {os.getpid()} is training in .*one: wait until it ends"):
            exclusive_run(folder).__enter__()
        with exclusive_run(tmp_path / "runs" / "two"):
            pass
    assert lock_owner(folder) is None
    assert not (folder / "running").exists()
    with exclusive_run(folder):
        assert lock_owner(folder) == str(os.getpid())  # without the label of the first


def test_a_file_that_a_killed_run_has_left_locks_nothing(tmp_path: Path) -> None:
    (tmp_path / "running").write_text("1234 killed")
    assert lock_owner(tmp_path) is None
    with exclusive_run(tmp_path):
        pass
