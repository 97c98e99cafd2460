"""Runs and sweeps in a terminal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from fabricx.telemetry.command import _table, main
from tests.unit.telemetry.written import a_run


def test_the_command_prints_tables_and_the_path_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = a_run(tmp_path / "run")
    assert main("report", [str(run_dir)]) == 0
    shown = capsys.readouterr().out
    assert "rank 1 is slow in forward" in shown
    assert str(run_dir / "report.html") in shown
    assert main("status", [str(run_dir)]) == 0
    assert "done" in capsys.readouterr().out
    assert main("report", [str(tmp_path)]) == 0
    assert "module" not in capsys.readouterr().out
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize("command", ["report", "status"])
def test_a_folder_that_is_not_a_run_is_an_error_with_the_expected_argument(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main(command, [str(tmp_path)]) == 1
    assert "has no records of a run" in capsys.readouterr().err


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_is_longer_than_the_terminal_is_wide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        values = {f"a_long_name_of_a_value_{n}": number for n in range(9)}
        a_run(tmp_path / "sweep" / str(number), loss=1.0 / (1 + number), module=values, monitor="loss", mode="min")
    assert [
        main(*arguments) for arguments in (("report", ["sweep/0"]), ("status", ["sweep/0"]), ("report", ["sweep"]))
    ] == [0] * 3
    shown = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= width
    for text in ("is slow in forward", "communication", "straggler", "a_long_name_of_a_value_8", "78 %"):
        assert text in shown.replace("\n" + " " * 14, " "), text
    assert "loss = 0.00666667 (lowest), run 2" in " ".join(shown.split())
    assert "…" not in shown


def test_a_wide_column_does_not_break_the_word_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _table(Console(), ["rank", "at"], [["0", "43 s waiting at " + "a_long_path/" * 12]])
    assert "rank" in capsys.readouterr().out.split()


def test_a_report_does_not_import_torch() -> None:
    program = "import sys, fabricx.telemetry.command; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert ended.stdout == "False\n"
