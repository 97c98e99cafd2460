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
from fabricx.telemetry.diagnosis import SPAN_LABELS
from fabricx.telemetry.events import FOLDER
from fabricx.telemetry.pages.run_page import write_page
from fabricx.telemetry.pages.sweep_page import write_comparison
from fabricx.telemetry.report import LoadedRun
from fabricx.telemetry.sweep import comparison


def main(command: str, arguments: Sequence[str]) -> int:
    """Run a command.

    Args:
        command: "report" or "status".
        arguments: arguments of the command line.

    Returns:
        exit status: 0, or 1 after an error.
    """
    parser = argparse.ArgumentParser(prog=f"fabricx {command}", description=_DESCRIPTIONS[command])
    several = " or of a sweep" if command == "report" else ""
    parser.add_argument("folder", type=Path, help=f"folder of a run{several}, such as runs/2026-01-31_12-00-00-abcdef")
    folder = parser.parse_args(arguments).folder
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False, emoji=False)
    try:
        if command == "status":
            _status(console, report.load_run(folder))
        elif (runs := report.runs_in(folder)) and not (folder / FOLDER).is_dir():
            _compare(console, folder, [report.load_run(run) for run in runs])
        else:
            _report(console, report.load_run(folder))
    except (FabricxError, OSError) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 1
    return 0


_DESCRIPTIONS = {
    "report": "Report a run: print tables, and write report.html, which needs no network, into its folder. Works also "
    "for runs that are in progress or have crashed. For the folder of a sweep, compare its runs.",
    "status": "Print the ranks of a run with the newest step of each and the time since its last heartbeat.",
}


def _report(console: Console, loaded: LoadedRun) -> None:
    _summary(console, loaded)
    lines = report.rank_lines(loaded.run)
    spans = [span for span in SPAN_LABELS if any(span in line.spans for line in lines)]
    table = Table("rank", "ms a step", *(SPAN_LABELS[span] for span in spans), "straggler", "samples/s", "MiB")
    for line in lines:
        times = [f"{line.spans.get(span, 0.0):.2f}" for span in spans]
        rest = [f"{line.straggler:.2f}", f"{line.samples_per_s:.1f}", f"{line.memory_mib:.0f}"]
        table.add_row(str(line.rank), f"{line.step_ms:.2f}", *times, *rest)
    console.print(table)
    if last := report.final_values(loaded.run):
        console.print(_rows("metric", "last value", list(last.items())))
    for ranks, text, count in report.warnings_of(loaded.run)[:10]:
        _print(console, f"rank {ranks} ({count} time{'s' if count > 1 else ''}): {text}")
    _print(console, f"\nthe page: {write_page(loaded)}")


def _status(console: Console, loaded: LoadedRun) -> None:
    _print(console, f"{loaded.run_dir}: {loaded.state}; {report.recovery(loaded.run)}")
    table = Table("rank", "host", "process", "step", "heard", "MiB", "cores", "at")
    for rank in loaded.run.present:
        now, attributes = rank.now, rank.attributes
        heard = "ended" if rank.ending is not None else f"{report.duration(max(0.0, time.time() - rank.heard))} ago"
        where = ""
        if rank.ending is None and "still_s" in now:
            where = f"{report.duration(now['still_s'])} {'waiting ' if now.get('waits') else ''}at {now['where']}"
        _add(
            table, str(rank.rank), str(attributes.get("host", "")), str(attributes.get("pid", "")), str(rank.step),
            heard, str(now.get("memory_mib", "")), str(now.get("cpu_cores", "")), where,
        )  # fmt: skip
    console.print(table)
    for complaint in loaded.complaints:
        _print(console, f"note: {complaint}")


def _compare(console: Console, folder: Path, runs: list[LoadedRun]) -> None:
    header, rows = comparison(runs)
    table = Table(*map(printable, header))
    for row in rows:
        _add(table, *row)
    console.print(table)
    _print(console, f"the page: {write_comparison(folder, runs)}")


def _summary(console: Console, loaded: LoadedRun) -> None:
    for name, text in report.summary(loaded).items():
        _print(console, f"{name:>12}  {text}")
    for complaint in loaded.complaints:
        _print(console, f"{'note':>12}  {complaint}")


def _rows(first: str, second: str, rows: Sequence[tuple[str, str]]) -> Any:
    table = Table(first, second)
    for row in rows:
        _add(table, *row)
    return table


def _print(console: Console, text: str) -> None:
    """Print a run's text, with control characters of the terminal replaced."""
    console.print(printable(text), soft_wrap=True)


def _add(table: Table, *cells: str) -> None:
    table.add_row(*map(printable, cells))
