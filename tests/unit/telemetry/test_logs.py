"""Logs and warnings of ranks: their files, and the lines on the console."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path

import pytest

from fabricx.telemetry.aggregator import Aggregator
from fabricx.telemetry.events import EventFile
from fabricx.telemetry.logs import LogSettings, logging_to, merge
from fabricx.telemetry.reader import Files

FORMAT = logging.Formatter("<%(message)s>")


def speak(run_dir: Path, rank: int, settings: LogSettings | None) -> None:
    file = EventFile(run_dir, f"worker {rank}", rank)
    with logging_to(file, rank, settings):
        logging.getLogger("own").info("epoch of rank %d", rank)
        logging.getLogger("own").warning("the disk is slow")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("shape mismatch", stacklevel=1)
    file.close()


def without_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove pytest's handlers, because the root logger of a worker has none."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])


def test_a_worker_logs_as_its_launcher_does_and_only_the_main_rank_on_the_console(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_handlers(monkeypatch)
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *rest, **more: shown.append(str(message)))
    settings = LogSettings(logging.INFO, FORMAT)
    speak(tmp_path, 0, settings)
    assert capfd.readouterr().err == "<epoch of rank 0>\n<the disk is slow>\n"
    assert shown == ["shape mismatch"]
    speak(tmp_path, 1, settings)
    assert capfd.readouterr().err == ""
    assert shown == ["shape mismatch"]
    lines_read = [(r["rank"], r["level"], r["text"].partition(" (")[0]) for r in Files(tmp_path).new()]
    lines = [("INFO", "epoch of rank {}"), ("WARNING", "the disk is slow"), ("WARNING", "shape mismatch")]
    assert lines_read == [(rank, level, text.format(rank)) for rank in (0, 1) for level, text in lines]
    assert logging.getLogger().handlers == []


def test_a_process_that_launches_no_ranks_keeps_its_console_handler(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_handlers(monkeypatch)
    level = logging.getLogger().level
    file = EventFile(tmp_path, "worker 0", 0)
    with logging_to(file, 0, None):
        logging.getLogger("own").info("nobody asked for this")
        logging.getLogger("own").warning("the disk is slow")
    file.close()
    assert capfd.readouterr().err == "the disk is slow\n"  # Python's default output without configuration
    assert logging.getLogger().level == level


def test_the_name_of_a_file_that_is_no_text_can_be_logged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_handlers(monkeypatch)
    monkeypatch.setattr(warnings, "showwarning", lambda *rest, **more: None)
    name = os.fsdecode(b"\xff.png")
    file = EventFile(tmp_path, "worker 0", 0)
    with logging_to(file, 0, None), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn(f"empty: {name}", stacklevel=1)
        logging.getLogger("own").warning("broken: %s", name)
    file.close()
    records = Files(tmp_path).new()
    merge(tmp_path, records)
    for written in ("rank-0.log", "all.log"):
        text = (tmp_path / "logs" / written).read_text()
        assert "empty: \\udcff.png (" in text
        assert "broken: \\udcff.png\n" in text
    assert "Logging error" not in capfd.readouterr().err


def test_one_file_has_the_lines_of_all_ranks_in_the_order_of_time(tmp_path: Path) -> None:
    lines = [
        {"at": 3.0, "rank": 1, "level": "INFO", "name": "a", "text": "third"},
        {"at": 1.5, "rank": 0, "level": "WARNING", "name": "a", "text": "second"},
    ]
    merge(tmp_path, sorted(lines, key=lambda line: line["at"]))
    text = (tmp_path / "logs" / "all.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in text] == ["rank 0 WARNING a: second", "rank 1 INFO a: third"]


def test_warnings_of_silent_ranks_are_printed_once_with_a_count_unless_the_main_rank_has_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    watcher = Aggregator(tmp_path, board=False)
    files = [EventFile(tmp_path, f"worker {rank}", rank) for rank in range(3)]
    for _ in range(5):
        for file in files[1:]:
            file.write("log", level="WARNING", name="own", text="half a batch")
    for file in files:
        file.write("log", level="WARNING", name="own", text="everywhere")
    files[1].write("log", level="INFO", name="own", text="fine")
    watcher.close("success")
    for file in files:
        file.close()
    assert capfd.readouterr().err.splitlines() == [
        "rank 1: WARNING own: half a batch", "rank 1, 2 (10 times): WARNING own: half a batch"
    ]  # fmt: skip
    assert len((tmp_path / "logs" / "all.log").read_text().splitlines()) == 14
