"""`fabricx report` and `fabricx status` in a terminal."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fabricx.errors import FabricxError
from fabricx.redaction import printable
from fabricx.telemetry import report
from fabricx.telemetry.diagnosis import SPAN_LABELS
from fabricx.telemetry.events import FOLDER
from fabricx.telemetry.logged import files_of
from fabricx.telemetry.pages.run_page import write_page
from fabricx.telemetry.pages.sweep_page import write_comparison
from fabricx.telemetry.report import LoadedRun
from fabricx.telemetry.sweep import comparison, sweep_of


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
    width = shutil.get_terminal_size((_WIDTH, 24)).columns
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    try:
        if command == "status":
            _status(console, report.load_run(folder))
        elif (runs := report.runs_in(folder)) and not ((folder / FOLDER).is_dir() or files_of(folder)):
            _compare(console, folder, [report.load_run(run) for run in runs])
        else:
            _report(console, report.load_run(folder))
    except (FabricxError, OSError) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 1
    return 0


_WIDTH: Final = 80  # columns, if the output is not a terminal
_LABEL: Final = 12  # columns of the labels of facts
_SHORTEST_MS: Final = 0.005  # a shorter part of a step is not shown
_GAP: Final = 2  # columns between two columns of a table
_DESCRIPTIONS = {
    "report": "Report a run: print tables, and write report.html, which needs no network, into its folder. Works also "
    "for runs that are in progress or have crashed. For the folder of a sweep, compare its runs.",
    "status": "Print the ranks of a run with the newest step of each and the time since its last heartbeat.",
}


def _report(console: Console, loaded: LoadedRun) -> None:
    for name, text in report.summary(loaded).items():
        _fact(console, name, text)
    for complaint in loaded.complaints:
        _fact(console, "note", complaint)
    lines = report.rank_lines(loaded.run)
    spans = [span for span in SPAN_LABELS if any(line.spans.get(span, 0.0) >= _SHORTEST_MS for line in lines)]
    rows = []
    for line in lines:
        times = [f"{line.spans.get(span, 0.0):.2f}" for span in spans]
        rest = [f"{line.straggler:.2f}", f"{line.samples_per_s:.1f}", f"{line.memory_mib:.0f}"]
        rows.append([str(line.rank), f"{line.step_ms:.2f}", *times, *rest])
    header = ["rank", "ms a step", *(SPAN_LABELS[span] for span in spans), "straggler", "samples/s", "MiB"]
    _table(console, header, rows)
    if last := report.final_values(loaded.run):
        _table(console, ["metric", "last value"], [list(row) for row in last.items()])
    for ranks, text, count in report.warnings_of(loaded.run)[:10]:
        _paragraph(console, f"rank {ranks} ({count} time{'s' if count > 1 else ''}): {text}", "", "  ")
    _print(console, f"the page: {write_page(loaded)}")


def _status(console: Console, loaded: LoadedRun) -> None:
    _paragraph(console, f"{loaded.run_dir}: {loaded.state}; {report.recovery(loaded.run)}", "", "  ")
    rows = []
    for rank in loaded.run.present:
        now, attributes = rank.now, rank.attributes
        heard = "ended" if rank.ending is not None else f"{report.duration(max(0.0, time.time() - rank.heard))} ago"
        where = ""
        if rank.ending is None and "still_s" in now:
            where = f"{report.duration(now['still_s'])} {'waiting ' if now.get('waits') else ''}at {now['where']}"
        rows.append([
            str(rank.rank), str(attributes.get("host", "")), str(attributes.get("pid", "")), str(rank.step),
            heard, str(now.get("memory_mib", "")), str(now.get("cpu_cores", "")), where,
        ])  # fmt: skip
    _table(console, ["rank", "host", "process", "step", "heard", "MiB", "cores", "at"], rows)
    for complaint in loaded.complaints:
        _fact(console, "note", complaint)


def _compare(console: Console, folder: Path, runs: list[LoadedRun]) -> None:
    _table(console, *comparison(runs))
    sweep = sweep_of(runs)
    if (best := sweep.best) is not None:
        which = f"{sweep.monitor} = {best.score:.6g} ({'highest' if sweep.mode == 'max' else 'lowest'})"
        _fact(console, "best", f"{which}, run {best.loaded.run_dir.name}: {best.label}")
    _print(console, f"the page: {write_comparison(folder, runs)}")


def _table(console: Console, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table. Columns beyond the width of the terminal follow below, each time with the first column."""
    header, rows = [*map(printable, header)], [[*map(printable, row)] for row in rows]
    if not rows:
        return
    cells = [max(len(row[n]) for row in rows) for n in range(len(header))]
    widths = [max(cell, len(name)) for cell, name in zip(cells, header, strict=True)]
    if sum(widths) + _GAP * len(widths) > console.width:  # break lines between the words of the header
        widths = [max([cell, *map(len, name.split())]) for cell, name in zip(cells, header, strict=True)]
    for columns in column_groups(widths, console.width):
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
        excess = max(0, sum(widths[n] + _GAP for n in columns) - console.width)
        widest = max(columns, key=widths.__getitem__)
        for n in columns:
            number = n > 0 and all(_is_number(row[n]) for row in rows)
            width = max(1, widths[n] - excess if n == widest else widths[n])  # rich would narrow all columns
            table.add_column(header[n], justify="right" if number else "left", overflow="fold", width=width)
        for row in rows:
            table.add_row(*(row[n] for n in columns))
        console.print(table)
        console.print()


def column_groups(widths: Sequence[int], width: int) -> Iterator[list[int]]:
    """Divide the columns of a table into tables that fit, of which each begins with the first column.

    Args:
        widths: width of each column.
        width: width of the terminal.

    Yields:
        numbers of the columns of a table.

    >>> list(column_groups([4, 10, 10, 10], 30))
    [[0, 1, 2], [0, 3]]
    """
    group, used = [0], widths[0]
    for number in range(1, len(widths)):
        if len(group) > 1 and used + _GAP + widths[number] > width:
            yield group
            group, used = [0], widths[0]
        group.append(number)
        used += _GAP + widths[number]
    yield group


def _fact(console: Console, name: str, text: str) -> None:
    _paragraph(console, text, f"{name:>{_LABEL}}  ", " " * (_LABEL + 2))


def _paragraph(console: Console, text: str, first: str, rest: str) -> None:
    """Print a text in lines of the terminal's width; words, such as paths, are never broken."""
    lines = textwrap.wrap(
        printable(text), console.width, initial_indent=first, subsequent_indent=rest, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    for line in lines or [first]:
        _print(console, line)


def _print(console: Console, text: str) -> None:
    """Print a run's text, with control characters of the terminal replaced."""
    console.print(printable(text), soft_wrap=True)


def _is_number(text: str) -> bool:
    try:
        float(text or "0")
    except ValueError:
        return False
    return True
