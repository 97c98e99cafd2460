"""The event file of a process, with a line per record."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fabricx.telemetry import events
from fabricx.telemetry.events import EventFile, run_id
from fabricx.telemetry.reader import Files


def test_all_files_of_a_run_have_one_id_also_of_later_attempts(tmp_path: Path) -> None:
    for process in ("worker 0", "worker 1", "launcher"):
        file = EventFile(tmp_path, process)
        file.write("event", name="a", text="b", step=1)
        file.close()
    assert {record["run"] for record in Files(tmp_path).new()} == {run_id(tmp_path)}
    assert sorted(record["who"] for record in Files(tmp_path).new()) == ["launcher", "worker0", "worker1"]


def test_a_full_disk_loses_records_and_reports_their_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = EventFile(tmp_path, "worker 0", 0)
    write = os.write

    def full(number: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(events.os, "write", lambda number, data: write(number, data[:10]))
    file.write("event", name="torn", text="", step=1)
    monkeypatch.setattr(events.os, "write", full)
    file.write("event", name="lost", text="", step=2)
    monkeypatch.undo()
    file.write("event", name="kept", text="", step=3)
    file.close()
    files = Files(tmp_path)
    records = files.new()
    assert [record["kind"] for record in records] == ["lost", "event"]
    assert records[0]["records"] == 2
    assert records[1]["name"] == "kept"


FORKS = """
import os, sys
from pathlib import Path
from fabricx.telemetry.events import EventFile
file = EventFile(Path(sys.argv[1]), "worker 0", 0)
file._lock.acquire()  # as a thread does that is writing when another one forks
child = os.fork()
if not child:
    file.write("event", name="from a loader's process", text="", step=1)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_process_forked_during_a_write_can_write(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORKS, str(tmp_path)], check=True, timeout=30)
    assert [record["name"] for record in Files(tmp_path).new()] == ["from a loader's process"]
