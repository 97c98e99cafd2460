"""State of a run for reports: summary, times of each rank, warnings."""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fabricx.telemetry.diagnosis import diagnose, straggler_scores
from fabricx.telemetry.events import FOLDER, Span, interval_s
from fabricx.telemetry.logged import files_of, metrics_of
from fabricx.telemetry.reader import Files, check_run, is_foreign_link
from fabricx.telemetry.run import Run, joined
from fabricx.telemetry.timeline import History

SILENT_S: Final = 10.0  # a process of a run of few ranks writes a record every second
CONFIG_FILES: Final = ("config.yaml", "arguments.yaml")  # a run from the command line has the first, else the second
_MAX_WARNINGS: Final = 200
_UNMEASURED: Final = "the run recorded no telemetry (enable_telemetry=False)"


@dataclass
class LoadedRun:
    """A run that was read from its folder.

    Attributes:
        run_dir: the folder.
        run: state of the run.
        complaints: sentences about missing or unreadable records.
        history: timelines and resources of each rank.
        measured: the run recorded telemetry; otherwise only the metrics of its loggers are known.
    """

    run_dir: Path
    run: Run
    complaints: list[str]
    history: History = field(default_factory=History)
    measured: bool = True

    @property
    def state(self) -> str:
        """Return "running", how the run ended, or that no process writes records any more."""
        if not self.measured:
            return "unknown, because the run recorded no telemetry"
        if self.run.closed:
            return {"success": "done", "failed": "failed", "interrupted": "stopped"}.get(
                self.run.closed, self.run.closed
            )
        age = time.time() - self.run.ended
        if age < _silent_s(self.run):
            return "running"
        return f"no records for {duration(age)}: the run was killed, or its machine failed"


def _silent_s(run: Run) -> float:
    """Return the seconds without records after which a process is dead."""
    return max(SILENT_S, 3 * interval_s(run.size))


def load_run(run_dir: Path) -> LoadedRun:
    """Read all records of a run, or the metrics of its loggers if it recorded no telemetry.

    Args:
        run_dir: the run's folder.

    Raises:
        NotARun: the folder has no records.
    """
    if (run_dir / FOLDER).is_dir():
        os.listdir(run_dir / FOLDER)  # an error without the right to read it, where `glob` finds nothing
    if not any((run_dir / FOLDER).glob("worker*.jsonl")) and files_of(run_dir):
        return _logged_run(run_dir)
    check_run(run_dir)
    files, history = Files(run_dir), History()
    run = Run(history)
    run.feed(files.new())
    live = {number for number, rank in run.ranks.items() if rank.ending is None}
    history.close(run.ended, {number: rank.heard for number, rank in run.ranks.items()}, live, _silent_s(run))
    missing = sorted(set(range(run.size)) - set(run.ranks))
    complaints = files.complaints()
    if missing:
        ranks = f"rank {', '.join(map(str, missing))}"
        complaints.append(f"{ranks} (of {run.size} ranks): no records; the other ranks are shown")
    if run.malformed:
        complaints.append(f"{run.malformed} records have invalid fields; the other records are shown")
    if run.lost:
        complaints.append(f"{run.lost} records are missing: the disk was full")
    return LoadedRun(run_dir, run, complaints, history)


def _logged_run(run_dir: Path) -> LoadedRun:
    run = Run()
    run.metrics = metrics_of(run_dir)
    run.steps = max((step for values in run.metrics.values() for step in values), default=0)
    return LoadedRun(run_dir, run, [], measured=False)


def runs_in(folder: Path) -> list[Path]:
    """Return the folders of runs in a folder, sorted by name.

    Args:
        folder: parent folder, such as a sweep's.
    """
    measured = (path.parent for path in folder.glob(f"*/{FOLDER}") if any(path.glob("*.jsonl")))
    logged = (path for path in folder.glob("*/") if path.name != FOLDER and files_of(path))
    return sorted(path for path in {*measured, *logged} if not is_foreign_link(path))


@dataclass(frozen=True)
class RankLine:
    """A rank's line in a table.

    Attributes:
        rank: the rank.
        host: name of its machine.
        steps: steps done.
        step_ms: mean duration of a step, milliseconds.
        busy_ms: mean duration without waiting for other processes, milliseconds.
        straggler: fraction of a step that the other ranks lose by this rank, 0 to 1.
        samples_per_s: samples per second.
        memory_mib: peak of its main memory, MiB.
        spans: mean milliseconds per step, by span.
    """

    rank: int
    host: str
    steps: int
    step_ms: float
    busy_ms: float
    straggler: float
    samples_per_s: float
    memory_mib: float
    spans: dict[str, float]


def rank_lines(run: Run) -> list[RankLine]:
    """Return the table line of each present rank.

    Args:
        run: the run.
    """
    rows = {rank.rank: joined(rank.rows) for rank in run.present}
    scores = straggler_scores(list(rows.values()))
    return [
        RankLine(
            number, str(run.ranks[number].attributes.get("host", "")), run.ranks[number].step, 1e3 * row.step_s,
            1e3 * row.busy_s, score, row.samples / max(1e-9, row.steps * row.step_s), run.ranks[number].most_mib,
            {str(span): 1e3 * row.mean(span) for span in Span if row.mean(span) > 0.0},
        )
        for (number, row), score in zip(rows.items(), scores, strict=True)
    ]  # fmt: skip


def summary(loaded: LoadedRun) -> dict[str, str]:
    """Return the main facts about a run, as text by label.

    Args:
        loaded: the run.
    """
    run, facts = loaded.run, {}
    if not loaded.measured:
        verdict = f"{_UNMEASURED}: its times are unknown, and only the metrics of its loggers are shown"
        return {"state": loaded.state, "verdict": verdict, "steps": str(run.steps)}
    attributes: Mapping[str, Any] = next((rank.attributes for rank in run.present), {})
    hosts = sorted({str(rank.attributes.get("host", "")) for rank in run.present} - {""})
    facts["state"] = loaded.state
    facts["verdict"] = diagnose(run)
    facts["strategy"] = f"{attributes.get('strategy', '?')} on {run.size} rank{'s' if run.size > 1 else ''}"
    facts["strategy"] += f" ({', '.join(hosts)}), {attributes.get('device', '?')}, {attributes.get('precision', '?')}"
    facts["steps"] = str(run.steps)
    facts["time"] = f"{duration(run.ended - run.began)}, since {stamp(run.began)}"
    facts["throughput"] = f"{sum(line.samples_per_s for line in rank_lines(run)):.1f} samples per second"
    facts["recovery"] = recovery(run)
    return facts


def recovery(run: Run) -> str:
    """Return a sentence about recoveries: their number, repeated steps, and lost time.

    Args:
        run: the run.
    """
    events = [event for event in run.events if event["name"] == "recovery" and "seconds" in event]
    if not events:
        return "nothing to recover from"
    times = f"recovered {len(events)} time{'s' if len(events) > 1 else ''}"
    again = sum(float(event.get("steps_again", 0.0)) for event in run.events)
    silent = sum(float(event.get("silent_s", 0.0)) for event in run.events)
    seconds = silent + sum(float(event["seconds"]) for event in events)
    noticed = f" ({silent:.1f} s of them until a worker without a sign of life was ended)" if silent else ""
    return f"{times}, {again:.0f} steps trained again, {seconds:.1f} s{noticed}"


def warnings_of(run: Run) -> list[tuple[str, str, int]]:
    """Return distinct warnings and errors in the logs, most frequent first.

    Args:
        run: the run.

    Returns:
        (ranks, text, count) of each.
    """
    times: Counter[str] = Counter()
    ranks: dict[str, set[int]] = defaultdict(set)
    for line in run.logs:
        if line["level"] in ("WARNING", "ERROR", "CRITICAL"):
            text = f"{line['level']} {line['name']}: {line['text']}"
            times[text] += 1
            ranks[text].add(line.get("rank", 0))
    rank_lists = {text: ", ".join(map(str, sorted(numbers))) for text, numbers in ranks.items()}
    return [(rank_lists[text], text, count) for text, count in times.most_common(_MAX_WARNINGS)]


def final_values(run: Run) -> dict[str, str]:
    """Return the last value of each metric as text, by name.

    Args:
        run: the run.
    """
    return {
        name: f"{values[max(values)]:.6g}" for name, values in sorted(run.metrics.items()) if values and name != "epoch"
    }


def stamp(at: float) -> str:
    """Format a time as local date and time.

    Args:
        at: seconds since 1970.
    """
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def duration(seconds: float) -> str:
    """Format a duration.

    Args:
        seconds: the duration.

    >>> duration(0.5), duration(75), duration(7300)
    ('0.5 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
