"""`fabricx report` and `fabricx status` in a terminal."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fabricx.errors import FabricxError
from fabricx.redaction import printable
from fabricx.telemetry import report
from fabricx.telemetry.diagnosis import WORDS
from fabricx.telemetry.events import FOLDER
from fabricx.telemetry.report import Seen


def main(command: str, arguments: Sequence[str]) -> int:
    """Run one of the commands; returns the exit code."""
    parser = argparse.ArgumentParser(prog=f"fabricx {command}", description=_WHAT[command])
    several = " or of a sweep" if command == "report" else ""
    parser.add_argument("folder", type=Path, help=f"folder of a run{several}, such as runs/2026-01-31_12-00-00-abcdef")
    folder = parser.parse_args(arguments).folder
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False, emoji=False)
    try:
        if command == "status":
            _status(console, report.look_at(folder))
        elif (runs := report.runs_in(folder)) and not (folder / FOLDER).is_dir():
            _compare(console, folder, [report.look_at(run) for run in runs])
        else:
            _report(console, report.look_at(folder))
    except (FabricxError, OSError) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 1
    return 0


_WHAT = {
    "report": "what a run did: tables here, and report.html in its folder, which needs no network. Also for runs that "
    "are still going, or have crashed; of a sweep's folder, a comparison of its runs.",
    "status": "which ranks a run has, how far each is, and when it was heard of last",
}


def _report(console: Console, seen: Seen) -> None:
    _summary(console, seen)
    lines = report.rank_lines(seen.run)
    spans = [span for span in WORDS if any(span in line.spans for line in lines)]
    table = Table("rank", "ms a step", *(WORDS[span] for span in spans), "straggler", "samples/s", "MiB")
    for line in lines:
        times = [f"{line.spans.get(span, 0.0):.2f}" for span in spans]
        rest = [f"{line.straggler:.2f}", f"{line.samples_per_s:.1f}", f"{line.memory_mib:.0f}"]
        table.add_row(str(line.rank), f"{line.step_ms:.2f}", *times, *rest)
    console.print(table)
    if last := report.final_values(seen.run):
        console.print(_rows("metric", "last value", list(last.items())))
    for who, text, times_said in report.warnings_of(seen.run)[:10]:
        _say(console, f"rank {who}, {times_said} time{'s' if times_said > 1 else ''}: {text}")
    _say(console, f"\nthe page: {report.write_page(seen)}")


def _status(console: Console, seen: Seen) -> None:
    _say(console, f"{seen.run_dir}: {seen.state}; {report.recovery(seen.run)}")
    table = Table("rank", "host", "process", "step", "heard", "MiB", "cores", "at")
    for rank in seen.run.present:
        now, known = rank.now, rank.known
        heard = "ended" if rank.ending is not None else f"{report.duration(max(0.0, time.time() - rank.heard))} ago"
        where = ""
        if rank.ending is None and "still_s" in now:
            where = f"{report.duration(now['still_s'])} {'waiting ' if now.get('waits') else ''}at {now['where']}"
        _add(
            table, str(rank.rank), str(known.get("host", "")), str(known.get("pid", "")), str(rank.step), heard,
            str(now.get("memory_mib", "")), str(now.get("cpu_cores", "")), where,
        )  # fmt: skip
    console.print(table)
    for complaint in seen.complaints:
        _say(console, f"note: {complaint}")


def _compare(console: Console, folder: Path, runs: list[Seen]) -> None:
    header, rows = report.comparison(runs)
    table = Table(*map(printable, header))
    for row in rows:
        _add(table, *row)
    console.print(table)
    _say(console, f"the page: {report.write_comparison(folder, runs)}")


def _summary(console: Console, seen: Seen) -> None:
    for name, text in report.summary(seen).items():
        _say(console, f"{name:>12}  {text}")
    for complaint in seen.complaints:
        _say(console, f"{'note':>12}  {complaint}")


def _rows(first: str, second: str, rows: Sequence[tuple[str, str]]) -> Any:
    table = Table(first, second)
    for row in rows:
        _add(table, *row)
    return table


def _say(console: Console, text: str) -> None:
    """Print text of a run, in which nothing steers the terminal."""
    console.print(printable(text), soft_wrap=True)


def _add(table: Table, *cells: str) -> None:
    table.add_row(*map(printable, cells))
