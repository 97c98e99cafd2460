"""The launching process reads the records of all ranks: console output, merged logs and events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fabricx.telemetry import aggregator
from fabricx.telemetry.aggregator import Aggregator
from fabricx.telemetry.events import EventFile
from fabricx.telemetry.reader import Files


def warn(run_dir: Path, rank: int, *texts: str) -> None:
    file = EventFile(run_dir, f"worker {rank}", rank)
    for text in texts:
        file.write("log", level="WARNING", name="own", text=text)
    file.close()


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


@pytest.fixture(autouse=True)
def at_the_end_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregator, "READ_INTERVAL_S", 60.0)


def test_a_warning_of_ranks_without_a_console_is_printed_once_with_its_count(tmp_path: Path, capsys: Any) -> None:
    watcher = Aggregator(tmp_path, board=False)
    warn(tmp_path, 1, "slow disk", "slow disk", "once")
    warn(tmp_path, 2, "slow disk")
    warn(tmp_path, 0, "of the main rank")  # which writes to the console directly
    warn(tmp_path, 1, "of the main rank")
    watcher.close("success")
    lines = said(capsys)
    assert sorted(lines) == [
        "rank 1, 2 (3 times): WARNING own: slow disk", "rank 1: WARNING own: once", "rank 1: WARNING own: slow disk",
    ]  # fmt: skip


def test_warnings_of_an_earlier_attempt_are_not_repeated(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    warn(tmp_path, 1, "old")
    later = aggregator.time.time() + 5.0
    with monkeypatch.context() as patch:
        patch.setattr(aggregator.time, "time", lambda: later)
        watcher = Aggregator(tmp_path, board=False)
    watcher.close("success")
    assert said(capsys) == []


def test_a_warning_sends_no_control_characters_to_the_terminal(tmp_path: Path, capsys: Any) -> None:
    watcher = Aggregator(tmp_path, board=False)
    warn(tmp_path, 1, "\x1b]0;title\x07")
    watcher.close("success")
    assert not set("".join(said(capsys))) & set("\x1b\x07")


def test_events_outside_of_ranks_are_recorded_and_logs_are_merged_at_the_end(tmp_path: Path) -> None:
    watcher = Aggregator(tmp_path, board=False)
    watcher.record_event("death", "worker 1 was killed", seconds=0.5)
    warn(tmp_path, 1, "first")
    watcher.close("interrupted")
    records = Files(tmp_path).new()
    [event] = [record for record in records if record["kind"] == "event"]
    assert (event["name"], event["text"], event["seconds"]) == ("death", "worker 1 was killed", 0.5)
    assert [record["ending"] for record in records if record["kind"] == "closed"] == ["interrupted"]
    assert "first" in (tmp_path / "logs" / "all.log").read_text()


def test_a_full_disk_loses_the_merged_log_and_does_not_end_the_run(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    watcher = Aggregator(tmp_path, board=False)
    monkeypatch.setattr(aggregator.logs, "merge", full)
    watcher.close("success")
    assert said(capsys) == ["the disk is full: telemetry is not written until space is free"]
    watcher = Aggregator(tmp_path, board=False)
    monkeypatch.setattr(aggregator.logs, "merge", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        watcher.close("success")
