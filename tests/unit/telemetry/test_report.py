"""State of a run for reports."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fabricx.telemetry.report import load_run, runs_in
from tests.unit.telemetry.written import a_run


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link to another user")
def test_a_folder_behind_a_link_of_another_user_is_not_read(tmp_path: Path) -> None:
    private = a_run(tmp_path / "own")
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    for name, user in (("mine", 0), ("theirs", 65534)):
        (sweep / name).symlink_to(private)
        os.lchown(sweep / name, user, user)
    assert [path.name for path in runs_in(sweep)] == ["mine"]
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "telemetry").symlink_to(private / "telemetry")
    assert load_run(theirs).run.steps > 0
    os.lchown(theirs / "telemetry", 65534, 65534)
    assert load_run(theirs).run.steps == 0
