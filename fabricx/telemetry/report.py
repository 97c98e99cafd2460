"""Report a run, or compare runs: tables, and a self-contained HTML page."""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml  # type: ignore[import-untyped]

from fabricx.redaction import masked, masked_text
from fabricx.telemetry.charts import Chart, chart
from fabricx.telemetry.diagnosis import SPAN_LABELS, diagnose, straggler_scores
from fabricx.telemetry.events import FOLDER
from fabricx.telemetry.reader import Files, check_run, is_foreign_link, open_untrusted
from fabricx.telemetry.recorder import Span
from fabricx.telemetry.run import Row, Run, joined

SILENT_S: Final = 10.0  # a run without records for this time is dead: live processes write a record every second
# Limits that keep any page below 1 MB:
_MAX_CHARTS: Final = 40  # charts of a kind
_MAX_TEXT: Final = 20_000  # characters of a displayed file
_MAX_LINES: Final = 200  # warnings, and events
_MAX_LINE: Final = 400  # characters of a warning or event
_MAX_DETAILS: Final = 40  # events with details
_MAX_DETAIL: Final = 4_000  # characters of the details
_MAX_NODES: Final = 20_000  # nodes of a configuration; a larger configuration is not compared
_CONFIG_FILES: Final = ("config.yaml", "arguments.yaml")  # a run from the command line has the first, else the second


@dataclass
class LoadedRun:
    """A run that was read from its folder.

    Attributes:
        run_dir: the folder.
        run: state of the run.
        complaints: sentences about missing or unreadable records.
    """

    run_dir: Path
    run: Run
    complaints: list[str]

    @property
    def state(self) -> str:
        """Return "running", how the run ended, or that no process writes records any more."""
        if self.run.closed:
            return {"success": "done", "failed": "failed", "interrupted": "stopped"}.get(
                self.run.closed, self.run.closed
            )
        age = time.time() - self.run.ended
        if age < SILENT_S:
            return "running"
        return f"no records for {duration(age)}: the run was killed, or its machine failed"


def load_run(run_dir: Path) -> LoadedRun:
    """Read all records of a run.

    Args:
        run_dir: the run's folder.

    Raises:
        NotARun: the folder has no records.
    """
    check_run(run_dir)
    files, run = Files(run_dir), Run()
    run.feed(files.new())
    missing = sorted(set(range(run.size)) - set(run.ranks))
    complaints = files.complaints()
    if missing:
        ranks = f"rank {', '.join(map(str, missing))}"
        complaints.append(f"{ranks} (of {run.size} ranks): no records; the other ranks are shown")
    if run.malformed:
        complaints.append(f"{run.malformed} records have invalid fields; the other records are shown")
    if run.lost:
        complaints.append(f"{run.lost} records are missing: the disk was full")
    return LoadedRun(run_dir, run, complaints)


def runs_in(folder: Path) -> list[Path]:
    """Return the folders of runs in a folder, sorted by name.

    Args:
        folder: parent folder, such as a sweep's.
    """
    records = (path for path in folder.glob(f"*/{FOLDER}") if any(path.glob("*.jsonl")))
    return sorted(path.parent for path in records if not is_foreign_link(path.parent))


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
    seconds = sum(float(event["seconds"]) for event in events)
    return f"{times}, {again:.0f} steps trained again, {seconds:.1f} s"


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
    return [(rank_lists[text], text[:_MAX_LINE], count) for text, count in times.most_common(_MAX_LINES)]


def write_page(loaded: LoadedRun) -> Path:
    """Write the HTML page of a run, which needs no network, into its folder.

    Args:
        loaded: the run.

    Returns:
        path of the page.
    """
    run, run_dir = loaded.run, loaded.run_dir
    lines = rank_lines(run)
    longest = max((sum(line.spans.values()) for line in lines), default=1.0) or 1.0
    texts = {name: masked_text(_text(run_dir / name)) for name in (*_CONFIG_FILES, "command.txt", "versions.json")}
    links = ["checkpoints", "logs", "trace.json", FOLDER]
    page = _render(
        "run.html.j2", title=run_dir.resolve().name, summary=summary(loaded), complaints=loaded.complaints, lines=lines,
        longest=longest, words={str(span): label for span, label in SPAN_LABELS.items()}, finals=final_values(run),
        metrics=metric_charts(run), speed=speed_charts(run), gauges=gauge_charts(run),
        events=_event_rows(run.events), warnings=warnings_of(run),
        texts={name: text for name, text in texts.items() if text},
        links=[name for name in links if (run_dir / name).exists()],
    )  # fmt: skip
    return _written(run_dir / "report.html", page)


def final_values(run: Run) -> dict[str, str]:
    """Return the last value of each metric as text, by name.

    Args:
        run: the run.
    """
    return {
        name: f"{values[max(values)]:.6g}" for name, values in sorted(run.metrics.items()) if values and name != "epoch"
    }


def metric_charts(run: Run) -> list[Chart]:
    """Return charts of the metrics that the module logged.

    Args:
        run: the run.
    """
    curves = {name: {name: sorted(values.items())} for name, values in run.metrics.items() if name != "epoch"}
    return _charts(curves)


def speed_charts(run: Run) -> list[Chart]:
    """Return charts of throughput, busy time and waiting time by rank.

    Args:
        run: the run.
    """

    def by_rank(measure: Any) -> dict[str, list[tuple[float, float]]]:
        return {
            f"rank {rank.rank}": [(row.step, measure(row)) for row in rank.rows if row.steps] for rank in run.present
        }

    def speed(row: Row) -> float:
        return row.samples / max(1e-9, row.steps * row.step_s)

    return _charts({
        "samples per second, by rank": by_rank(speed),
        "busy time of a step, ms": by_rank(lambda row: 1e3 * row.busy_s),
        "waiting for others, ms": by_rank(lambda row: 1e3 * row.mean(Span.WAIT, Span.PULL)),
        "waiting for data, ms": by_rank(lambda row: 1e3 * row.mean(Span.DATA)),
    })  # fmt: skip


def gauge_charts(run: Run) -> list[Chart]:
    """Return charts of gauges. Gauges that differ only in a number at the end of the name share a chart.

    Args:
        run: the run.
    """
    groups: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, values in run.gauges.items():
        if name != "epoch":
            stem, _, number = name.rpartition("_")
            numbered = stem and number.isdecimal()
            groups[stem if numbered else name][f"rank {number}" if numbered else name] = sorted(values.items())
    return _charts(groups)


def _charts(curves: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]) -> list[Chart]:
    """Return the charts with more than a single point, by title."""
    moving = {title: lines for title, lines in curves.items() if any(len(points) > 1 for points in lines.values())}
    charts = (chart(title, lines) for title, lines in sorted(moving.items()))
    return [drawn for drawn in charts if drawn is not None][:_MAX_CHARTS]


def write_comparison(folder: Path, runs: Sequence[LoadedRun]) -> Path:
    """Write the HTML page that compares runs.

    Args:
        folder: folder of the sweep, for the page.
        runs: the runs.

    Returns:
        path of the page.
    """
    names = sorted({name for loaded in runs for name in loaded.run.metrics if name != "epoch"})
    curves = {
        name: {
            loaded.run_dir.name: sorted(loaded.run.metrics[name].items())
            for loaded in runs
            if name in loaded.run.metrics
        }
        for name in names
    }
    header, rows = comparison(runs)
    page = _render("sweep.html.j2", title=folder.resolve().name, header=header, rows=rows, metrics=_charts(curves))
    return _written(folder / "report.html", page)


def comparison(runs: Sequence[LoadedRun]) -> tuple[list[str], list[list[str]]]:
    """Return a table of runs: configuration values that differ, last values of metrics, and state.

    Args:
        runs: the runs.

    Returns:
        (header, rows).
    """
    flat = [_flat(_configuration(loaded.run_dir)) for loaded in runs]
    keys = sorted({key for config in flat for key in config})
    differ = [key for key in keys if len({config.get(key) for config in flat}) > 1]
    metrics = sorted({name for loaded in runs for name in loaded.run.metrics if name != "epoch"})
    rows = []
    for loaded, config in zip(runs, flat, strict=True):
        last = final_values(loaded.run)
        shown = [f"{float(last[name]):.4g}" if name in last else "" for name in metrics]
        rows.append([loaded.run_dir.name, *(config.get(key, "") for key in differ), *shown, loaded.state])
    return ["run", *differ, *metrics, "state"], rows


def _configuration(run_dir: Path) -> Mapping[str, Any]:
    """Return a run's configuration, or the Trainer's arguments for a run that was started in Python."""
    texts = (_text(run_dir / name) for name in _CONFIG_FILES)
    try:
        config = yaml.safe_load(next(filter(None, texts), "{}"))
        return masked(config) if isinstance(config, dict) and _has_at_most(_MAX_NODES, config) else {}
    except (yaml.YAMLError, RecursionError):
        return {}


def _has_at_most(limit: int, value: Any) -> bool:
    """Return whether a value has at most `limit` nodes, counting repeated references of YAML each time."""
    parts, count = [value], 0
    while parts and count <= limit:
        part = parts.pop()
        count += 1
        parts += [*part, *part.values()] if isinstance(part, Mapping) else part if isinstance(part, list) else []
    return count <= limit


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = str(value)
    return flat


def _event_rows(events: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return the newest events for the page: the first line of each, and further lines of the newest as details."""
    rows = []
    for index, event in enumerate(events[::-1][:_MAX_LINES]):
        first, _, rest = str(event["text"]).strip().partition("\n")
        rows.append({
            "at": stamp(event["at"]), "step": str(event.get("step", "")), "name": str(event["name"]),
            "first": first[:_MAX_LINE], "rest": rest[:_MAX_DETAIL] if index < _MAX_DETAILS else "",
        })  # fmt: skip
    return rows[::-1]


def _text(path: Path) -> str:
    try:
        with open_untrusted(path) as file:
            return file.read(4 * _MAX_TEXT).decode(errors="replace")[:_MAX_TEXT]
    except OSError:
        return ""


def _written(path: Path, page: str) -> Path:
    """Write a page atomically. A link at `path` is replaced, not followed: it could point to any file of the reader."""
    fresh = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "w", encoding="utf-8") as file:
            file.write(page)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    return path


def _render(template: str, **facts: Any) -> str:
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template(template).render(made=stamp(time.time()), **facts)


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
