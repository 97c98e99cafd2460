"""Files of records, which may be read at any time while their process writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fabricx.telemetry.events import EventFile
from fabricx.telemetry.reader import Files, NotARun, check_run


def test_an_incomplete_line_is_read_after_its_completion(tmp_path: Path) -> None:
    file = EventFile(tmp_path, "worker 0", 0)
    file.write("event", name="a", text="b", step=1)
    [path] = (tmp_path / "telemetry").glob("*.jsonl")
    files = Files(tmp_path)
    assert len(files.new()) == 1
    with path.open("a") as half:
        half.write('{"kind": "event", "na')
        half.flush()
        assert files.new() == []
        [complaint] = files.complaints()
        assert "incomplete" in complaint
        half.write('me": "late", "at": 1}\n')
    assert [record["name"] for record in files.new()] == ["late"]
    assert files.complaints() == []
    file.close()


def test_invalid_lines_are_counted_and_all_other_lines_are_read(tmp_path: Path) -> None:
    (tmp_path / "telemetry").mkdir()
    (tmp_path / "telemetry" / "worker0-1-a.jsonl").write_text('what?\n[1]\n{"kind": "event", "name": "a", "at": 2}\n')
    files = Files(tmp_path)
    assert [record["name"] for record in files.new()] == ["a"]
    assert files.complaints() == ["worker0-1-a.jsonl: 2 lines are not records; the other lines are shown"]


def test_a_folder_without_records_is_an_error_with_the_expected_argument(tmp_path: Path) -> None:
    with pytest.raises(NotARun, match="does not exist"):
        check_run(tmp_path / "nowhere")
    with pytest.raises(NotARun, match="has no records of a run"):
        check_run(tmp_path)
    (tmp_path / "report.html").touch()
    with pytest.raises(NotARun, match=r"report\.html is a file: pass the folder of a run"):
        check_run(tmp_path / "report.html")
    EventFile(tmp_path / "run", "worker 0").close()
    with pytest.raises(NotARun, match=r"it contains runs, such as .*run"):
        check_run(tmp_path)
    check_run(tmp_path / "run")
