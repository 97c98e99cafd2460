"""A run, or several, as tables and as one page that needs nothing else."""

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
from fabricx.telemetry.diagnosis import WORDS, straggler_scores, verdict
from fabricx.telemetry.events import FOLDER
from fabricx.telemetry.reader import Files, check_run, is_foreign_link, opened
from fabricx.telemetry.recorder import Span
from fabricx.telemetry.run import Row, Run, joined

SILENT_S: Final = 10.0  # a process that lives says so each second
_CHARTS: Final = 40  # the most of one kind: a page stays below 1 MB, whatever a run has done
_MADE_OF: Final = ("config.yaml", "arguments.yaml")  # a run has one of them
_TEXT: Final = 20_000  # characters of a file that is shown
_LINES: Final = 200  # of warnings, and of events
_LINE: Final = 400  # characters of one
_STACKS: Final = 40  # events that are shown with all that belongs to them
_STACK: Final = 4_000  # characters of that
_NODES: Final = 20_000  # the most parts of a configuration that is compared


@dataclass
class Seen:
    """A run and its folder.

    Attributes:
        run_dir: the folder.
        run: what its records tell.
        complaints: what of them couldn't be read.
    """

    run_dir: Path
    run: Run
    complaints: list[str]

    @property
    def state(self) -> str:
        """Return how it goes, or has ended."""
        if self.run.closed:
            return {"success": "done", "failed": "failed", "interrupted": "stopped"}.get(
                self.run.closed, self.run.closed
            )
        age = time.time() - self.run.ended
        if age < SILENT_S:
            return "running"
        return f"nothing was heard for {duration(age)}: it was killed, or its machine is gone"


def look_at(run_dir: Path) -> Seen:
    """Read all records of a run.

    Raises:
        NotARun: there are none.
    """
    check_run(run_dir)
    files, run = Files(run_dir), Run()
    run.feed(files.new())
    missing = sorted(set(range(run.size)) - set(run.ranks))
    complaints = files.complaints()
    if missing:
        which = f"rank {', '.join(map(str, missing))}"
        complaints.append(f"{which}: no records are there of {run.size} ranks; all others are shown")
    if run.malformed:
        complaints.append(f"{run.malformed} records aren't what they should be; all others are shown")
    if run.lost:
        complaints.append(f"{run.lost} records are missing: the disk was full")
    return Seen(run_dir, run, complaints)


def runs_in(folder: Path) -> list[Path]:
    """Return the runs' folders in a folder, such as that of a sweep."""
    found = (path for path in folder.glob(f"*/{FOLDER}") if any(path.glob("*.jsonl")))
    return sorted(path.parent for path in found if not is_foreign_link(path.parent))


@dataclass(frozen=True)
class RankLine:
    """One rank in a table: milliseconds of a step by span, and what else is known of it."""

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
    """Return where each rank's time goes."""
    rows = {rank.rank: joined(rank.rows) for rank in run.present}
    scores = straggler_scores(list(rows.values()))
    return [
        RankLine(
            number, str(run.ranks[number].known.get("host", "")), run.ranks[number].step, 1e3 * row.step_s,
            1e3 * row.busy_s, score, row.samples / max(1e-9, row.steps * row.step_s), run.ranks[number].most_mib,
            {str(span): 1e3 * row.mean(span) for span in Span if row.mean(span) > 0.0},
        )
        for (number, row), score in zip(rows.items(), scores, strict=True)
    ]  # fmt: skip


def summary(seen: Seen) -> dict[str, str]:
    """Return what there is to say of a run in a few lines."""
    run, found = seen.run, {}
    known: Mapping[str, Any] = next((rank.known for rank in run.present), {})
    hosts = sorted({str(rank.known.get("host", "")) for rank in run.present} - {""})
    found["state"] = seen.state
    found["verdict"] = verdict(run)
    found["strategy"] = f"{known.get('strategy', '?')} on {run.size} rank{'s' if run.size > 1 else ''}"
    found["strategy"] += f" ({', '.join(hosts)}), {known.get('device', '?')}, {known.get('precision', '?')}"
    found["steps"] = str(run.steps)
    found["time"] = f"{duration(run.ended - run.began)}, since {stamp(run.began)}"
    found["throughput"] = f"{sum(line.samples_per_s for line in rank_lines(run)):.1f} samples per second"
    found["recovery"] = recovery(run)
    return found


def recovery(run: Run) -> str:
    """Return how often a run went on after something had happened, and what that took."""
    events = [event for event in run.events if event["name"] == "recovery" and "seconds" in event]
    if not events:
        return "nothing to recover from"
    times = f"recovered {len(events)} time{'s' if len(events) > 1 else ''}"
    again = sum(float(event.get("steps_again", 0.0)) for event in run.events)
    seconds = sum(float(event["seconds"]) for event in events)
    return f"{times}, {again:.0f} steps trained again, {seconds:.1f} s"


def warnings_of(run: Run) -> list[tuple[str, str, int]]:
    """Return what was logged as a warning or worse, each once: by which ranks, what, and how often."""
    times: Counter[str] = Counter()
    ranks: dict[str, set[int]] = defaultdict(set)
    for line in run.logs:
        if line["level"] in ("WARNING", "ERROR", "CRITICAL"):
            text = f"{line['level']} {line['name']}: {line['text']}"
            times[text] += 1
            ranks[text].add(line.get("rank", 0))
    who = {text: ", ".join(map(str, sorted(found))) for text, found in ranks.items()}
    return [(who[text], text[:_LINE], count) for text, count in times.most_common(_LINES)]


def write_page(seen: Seen) -> Path:
    """Write one run's page, which needs no network, into its folder."""
    run, run_dir = seen.run, seen.run_dir
    lines = rank_lines(run)
    longest = max((sum(line.spans.values()) for line in lines), default=1.0) or 1.0
    texts = {name: masked_text(_text(run_dir / name)) for name in (*_MADE_OF, "command.txt", "versions.json")}
    links = ["checkpoints", "logs", "trace.json", FOLDER]
    page = _render(
        "run.html.j2", title=run_dir.resolve().name, summary=summary(seen), complaints=seen.complaints, lines=lines,
        longest=longest, words={str(span): word for span, word in WORDS.items()}, finals=final_values(run),
        metrics=metric_charts(run), speed=speed_charts(run), gauges=gauge_charts(run),
        events=_told(run.events), warnings=warnings_of(run),
        texts={name: text for name, text in texts.items() if text},
        links=[name for name in links if (run_dir / name).exists()],
    )  # fmt: skip
    return _written(run_dir / "report.html", page)


def final_values(run: Run) -> dict[str, str]:
    """Return the last value of each metric."""
    return {
        name: f"{values[max(values)]:.6g}" for name, values in sorted(run.metrics.items()) if values and name != "epoch"
    }


def metric_charts(run: Run) -> list[Chart]:
    """Return what the module has logged."""
    curves = {name: {name: sorted(values.items())} for name, values in run.metrics.items() if name != "epoch"}
    return _charts(curves)


def speed_charts(run: Run) -> list[Chart]:
    """Return how fast it was, and where the ranks' time went, over the run."""

    def each(measure: Any) -> dict[str, list[tuple[float, float]]]:
        return {
            f"rank {rank.rank}": [(row.step, measure(row)) for row in rank.rows if row.steps] for rank in run.present
        }

    def speed(row: Row) -> float:
        return row.samples / max(1e-9, row.steps * row.step_s)

    return _charts({
        "samples per second, by rank": each(speed),
        "busy time of a step, ms": each(lambda row: 1e3 * row.busy_s),
        "waiting for others, ms": each(lambda row: 1e3 * row.mean(Span.WAIT, Span.PULL)),
        "waiting for data, ms": each(lambda row: 1e3 * row.mean(Span.DATA)),
    })  # fmt: skip


def gauge_charts(run: Run) -> list[Chart]:
    """Return what was measured of the training; what has a number at its end is one picture for all numbers."""
    groups: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, values in run.gauges.items():
        if name != "epoch":
            stem, _, number = name.rpartition("_")
            numbered = stem and number.isdecimal()
            groups[stem if numbered else name][f"rank {number}" if numbered else name] = sorted(values.items())
    return _charts(groups)


def _charts(curves: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]) -> list[Chart]:
    """Return the pictures of what has more than one point."""
    moving = {title: lines for title, lines in curves.items() if any(len(points) > 1 for points in lines.values())}
    found = (chart(title, lines) for title, lines in sorted(moving.items()))
    return [one for one in found if one is not None][:_CHARTS]


def write_comparison(folder: Path, runs: Sequence[Seen]) -> Path:
    """Write the page that compares the runs of a sweep."""
    names = sorted({name for seen in runs for name in seen.run.metrics if name != "epoch"})
    curves = {
        name: {seen.run_dir.name: sorted(seen.run.metrics[name].items()) for seen in runs if name in seen.run.metrics}
        for name in names
    }
    header, rows = comparison(runs)
    page = _render("sweep.html.j2", title=folder.resolve().name, header=header, rows=rows, metrics=_charts(curves))
    return _written(folder / "report.html", page)


def comparison(runs: Sequence[Seen]) -> tuple[list[str], list[list[str]]]:
    """Return a table: for each run what differs in its configuration, and the last value of each metric."""
    flat = [_flat(_made_of(seen.run_dir)) for seen in runs]
    keys = sorted({key for one in flat for key in one})
    differ = [key for key in keys if len({one.get(key) for one in flat}) > 1]
    metrics = sorted({name for seen in runs for name in seen.run.metrics if name != "epoch"})
    rows = []
    for seen, one in zip(runs, flat, strict=True):
        last = final_values(seen.run)
        shown = [f"{float(last[name]):.4g}" if name in last else "" for name in metrics]
        rows.append([seen.run_dir.name, *(one.get(key, "") for key in differ), *shown, seen.state])
    return ["run", *differ, *metrics, "state"], rows


def _made_of(run_dir: Path) -> Mapping[str, Any]:
    """Return a run's configuration, or what it was made with in Python."""
    found = (_text(run_dir / name) for name in _MADE_OF)
    try:
        made = yaml.safe_load(next(filter(None, found), "{}"))
        return masked(made) if isinstance(made, dict) and _has_at_most(_NODES, made) else {}
    except (yaml.YAMLError, RecursionError):
        return {}


def _has_at_most(limit: int, value: Any) -> bool:
    """Return whether a value has so many parts, each counted as often as it occurs: YAML can name one many times."""
    parts, count = [value], 0
    while parts and count <= limit:
        part = parts.pop()
        count += 1
        parts += [*part, *part.values()] if isinstance(part, Mapping) else part if isinstance(part, list) else []
    return count <= limit


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = str(value)
    return found


def _told(events: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return the newest events for the page: the first line of each, and of the newest the rest, to be opened."""
    found = []
    for place, event in enumerate(events[::-1][:_LINES]):
        first, _, rest = str(event["text"]).strip().partition("\n")
        found.append({
            "at": stamp(event["at"]), "step": str(event.get("step", "")), "name": str(event["name"]),
            "first": first[:_LINE], "rest": rest[:_STACK] if place < _STACKS else "",
        })  # fmt: skip
    return found[::-1]


def _text(path: Path) -> str:
    try:
        with opened(path) as file:
            return file.read(4 * _TEXT).decode(errors="replace")[:_TEXT]
    except OSError:
        return ""


def _written(path: Path, page: str) -> Path:
    """Write a page; a link in its place, which could lead to any file of the reader's, is replaced itself."""
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
    """Return a time as people write it."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def duration(seconds: float) -> str:
    """Return a time span as people say it.

    >>> duration(0.5), duration(75), duration(7300)
    ('0.5 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
