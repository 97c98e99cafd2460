"""Page of a run."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fabricx.redaction import masked_text
from fabricx.telemetry.diagnosis import SPAN_LABELS
from fabricx.telemetry.events import FOLDER, Span
from fabricx.telemetry.pages import render
from fabricx.telemetry.pages.charts import Points, Tick, duration_text, nice_ticks
from fabricx.telemetry.pages.gallery import Curves, moving, sections_of
from fabricx.telemetry.pages.lanes import ACTIVITIES, SVG_CELLS, Activity, Lane, lane_svg, lanes
from fabricx.telemetry.reader import open_untrusted
from fabricx.telemetry.report import (
    CONFIG_FILES,
    LoadedRun,
    RankLine,
    duration,
    rank_lines,
    stamp,
    summary,
    warnings_of,
)  # fmt: skip
from fabricx.telemetry.run import NOT_OF_A_STEP, WARM_UP, Row, Run

# Limits that keep a page small:
_MAX_TEXT: Final = 20_000  # characters of a displayed file
_MAX_LINES: Final = 200  # warnings, and events
_MAX_LINE: Final = 400  # characters of a warning or event
_MAX_DETAILS: Final = 40  # events with details
_MAX_DETAIL: Final = 4_000  # characters of the details
_SHORTEST_S: Final = 0.005  # a shorter activity is not shown
_SHORTEST_MS: Final = 0.005  # neither is a shorter part of a step
_MAX_MARKS: Final = 100  # marks of a kind in the charts
_FAILURES: Final = ("failure", "death", "hang", "lost rank", "bad gradient")
_POINT: Final = "Where a point stands for several values it is their median, and the band is their range."
_LINKS: Final = {
    "checkpoints": "checkpoints of the run", "logs": "log lines of each rank, and of all ranks",
    "fabricx.log": "log of the launching process",
    "trace.json": "spans of all ranks, for ui.perfetto.dev",
    FOLDER: "raw records of each process, a line of JSON each, and scalars for TensorBoard",
}  # fmt: skip
_COLUMN_HELP: Final = {
    "ms a step": "mean duration of a step, without validations and checkpoints",
    "busy": "a step without waiting for other processes, ms",
    "straggler": "fraction of a step that the other ranks lose by this rank, 0 to 1",
    "samples/s": "samples per second of this rank", "MiB": "peak of the main memory of the process",
}  # fmt: skip


def write_page(loaded: LoadedRun) -> Path:
    """Write the HTML page of a run, which needs no network, into its folder.

    Args:
        loaded: the run.

    Returns:
        path of the page.
    """
    return render.write_page(loaded.run_dir / "report.html", "run.html.j2", lambda scale: _facts(loaded, scale))


def _facts(loaded: LoadedRun, scale: float) -> dict[str, Any]:
    """Return the values for the template."""
    run, run_dir = loaded.run, loaded.run_dir
    relative = _relative_paths(run_dir.resolve().name)
    size = int(_MAX_TEXT * scale)
    texts = {name: masked_text(_text(run_dir / name, size)) for name in (*CONFIG_FILES, "command.txt", "versions.json")}
    marks = _marks(run, loaded.history.validations, relative)
    kinds = [
        ("Metrics over the steps", f"What the module logged. {_POINT}", metric_curves(run)),
        ("Speed", f"By rank. {_POINT}", speed_curves(run)),
        ("Resources", "Peaks by rank, measured each second.", resource_curves(loaded)),
        ("Gauges of the training", f"What strategies and callbacks measured. {_POINT}", gauge_curves(run)),
    ]
    sections, data = sections_of(kinds, marks, run.ended - run.began, scale)
    timelines = lanes(loaded.history.timelines, max(64, int(4096 * scale)))
    seconds = run.ended - run.began
    data |= {"lanes": [lane.data() for lane in timelines], "marks": marks, "activities": [
        {"n": activity.name, "c": activity.colour} for activity in ACTIVITIES
    ]}  # fmt: skip
    events = _event_rows(run, relative, scale)
    lines = rank_lines(run)
    return {
        "data": data, "title": run_dir.resolve().name, "summary": summary(loaded), "running": loaded.state == "running",
        "complaints": [relative(text) for text in loaded.complaints], "finals": final_rows(run), "sections": sections,
        "marks": marks, "events": events, "more_events": max(0, len(run.events) - int(_MAX_LINES * scale)),
        "texts": {name: text for name, text in texts.items() if text},
        "warnings": [
            (ranks, relative(text[:2000])[: int(_MAX_LINE * scale)], count) for ranks, text, count in warnings_of(run)
        ],
        "links": {name: text for name, text in _LINKS.items() if (run_dir / name).exists()}, "warm_up": WARM_UP,
        **_lane_facts(loaded, timelines, seconds), **_step_facts(lines),
    }  # fmt: skip


def final_rows(run: Run) -> list[dict[str, str]]:
    """Return the last, lowest and highest value of each metric.

    Args:
        run: the run.
    """
    rows = []
    for name, values in sorted(run.metrics.items()):
        if not values or name == "epoch":
            continue
        row = {
            "name": name,
            "last": f"{values[max(values)]:.6g}",
            "low": "",
            "low_step": "",
            "high": "",
            "high_step": "",
        }
        finite = {step: value for step, value in values.items() if math.isfinite(value)}
        if len(values) > 1 and finite:
            for key, step in (
                ("low", min(finite, key=finite.__getitem__)),
                ("high", max(finite, key=finite.__getitem__)),
            ):
                row |= {key: f"{finite[step]:.6g}", f"{key}_step": str(step)}
        rows.append(row)
    return rows


def metric_curves(run: Run) -> list[Curves]:
    """Return the metrics that the module logged.

    Args:
        run: the run.
    """
    named = {name: {name: sorted(values.items())} for name, values in run.metrics.items() if name != "epoch"}
    return moving([Curves(name, points) for name, points in sorted(named.items())])


def speed_curves(run: Run) -> list[Curves]:
    """Return throughput, busy time and waiting time by rank.

    Args:
        run: the run.
    """

    def by_rank(measure: Callable[[Row], float]) -> dict[str, Points]:
        return {
            f"rank {rank.rank}": [(row.step, measure(row)) for row in rank.rows if row.steps] for rank in run.present
        }

    def speed(row: Row) -> float:
        return row.samples / max(1e-9, row.steps * row.step_s)

    waiting = by_rank(lambda row: 1e3 * row.mean(Span.WAIT, Span.PULL))
    throughput = Curves(
        "samples per second, by rank", by_rank(speed), help="samples of a rank by the time of its steps"
    )
    times = [
        Curves("busy time of a step, ms", by_rank(lambda row: 1e3 * row.busy_s), help=_COLUMN_HELP["busy"]),
        Curves("waiting for others, ms", waiting, help="ms of a step"),
        Curves("waiting for data, ms", by_rank(lambda row: 1e3 * row.mean(Span.DATA)), help="ms of a step"),
    ]

    def is_visible(curves: Curves) -> bool:
        return any(value >= 10 * _SHORTEST_MS for points in curves.points.values() for _, value in points)

    return moving([throughput, *(curves for curves in times if is_visible(curves))])


def resource_curves(loaded: LoadedRun) -> list[Curves]:
    """Return memory and processor use by rank, over time.

    Args:
        loaded: the run.
    """
    titles = {
        "memory_mib": ("main memory, MiB", "resident memory of the rank's process"),
        "device_mib": ("device memory, MiB", "memory of the device that tensors occupy"),
        "cpu_cores": ("CPU cores", "processor time of the process per second"),
    }
    curves = []
    for name, (title, text) in titles.items():
        points = {
            f"rank {rank}": [
                (bins.width * (number + 0.5), values[name]) for number, values in enumerate(bins.bins) if name in values
            ]
            for rank, bins in sorted(loaded.history.resources.items())
        }
        curves.append(Curves(title, {rank: series for rank, series in points.items() if series}, "time", text))
    return moving(curves)


def gauge_curves(run: Run) -> list[Curves]:
    """Return the gauges. Gauges that differ only in a number at the end of the name share a chart.

    Args:
        run: the run.
    """
    groups: dict[str, dict[str, Points]] = defaultdict(dict)
    for name, values in run.gauges.items():
        if name != "epoch":
            stem, _, number = name.rpartition("_")
            numbered = stem and number.isdecimal()
            groups[stem if numbered else name][f"rank {number}" if numbered else name] = sorted(values.items())
    return moving([Curves(name, points) for name, points in sorted(groups.items())])


def _lane_facts(loaded: LoadedRun, present: Sequence[Lane], seconds: float) -> dict[str, Any]:
    """Return the timeline, and the account of the run's time."""
    used = [
        number
        for number in range(len(ACTIVITIES))
        if any(lane.seconds.get(number, 0.0) >= _SHORTEST_S for lane in present)
    ]
    drawn = {lane.rank: lane_svg(lane, seconds) for lane in lanes(loaded.history.timelines, SVG_CELLS)}
    rows = []
    for lane in present:
        parts = [_part(ACTIVITIES[number], lane.seconds[number], seconds) for number in used if number in lane.seconds]
        rows.append({
            "rank": lane.rank, "svg": drawn[lane.rank], "parts": parts, "total": _seconds(sum(lane.seconds.values())),
            "cells": [_seconds(lane.seconds[number]) if number in lane.seconds else "" for number in used],
        })  # fmt: skip
    ticks = [Tick(100 * at / max(1e-9, seconds), duration_text(at)) for at in nice_ticks(0.0, seconds, 6, time=True)]
    return {
        "lanes": rows, "activities": [ACTIVITIES[number] for number in used], "time_ticks": ticks,
        "account": _account(present, seconds, loaded.run.size),
    }  # fmt: skip


def _account(present: Sequence[Lane], seconds: float, size: int) -> str:
    """Return a sentence about the sum of all activities."""
    whole = f"the {_seconds(seconds)} from the first to the newest record of the run"
    short = [str(lane.rank) for lane in present if abs(sum(lane.seconds.values()) - seconds) > 0.01 * seconds + 0.01]
    if short:
        return f"Of {whole}, some are missing on rank {', '.join(short)}: clocks were set, or records are missing."
    text = f"The activities of each rank add up to {whole}."
    return text if len(present) >= size else f"{text} Ranks without records are not shown."


def _part(activity: Activity, seconds: float, whole: float) -> dict[str, Any]:
    percent = 100 * seconds / max(1e-9, whole)
    return {"name": activity.name, "colour": activity.colour, "percent": percent, "text": _seconds(seconds)}


def _seconds(seconds: float) -> str:
    return duration(seconds) if seconds >= 60 else f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2g} s"


def _step_facts(lines: Sequence[RankLine]) -> dict[str, Any]:
    """Return the parts of a step by rank."""
    parts_of_step = [span for span in SPAN_LABELS if span not in NOT_OF_A_STEP]
    spans = [s for s in parts_of_step if any(line.spans.get(s, 0.0) >= _SHORTEST_MS for line in lines)]
    longest = max((line.step_ms for line in lines), default=1.0) or 1.0
    names = [
        "rank",
        "host",
        "steps",
        "ms a step",
        "busy",
        *(SPAN_LABELS[span] for span in spans),
        "straggler",
        "samples/s",
        "MiB",
    ]
    kinds = {source: activity for activity in ACTIVITIES for source in activity.sources}
    rows: list[dict[str, Any]] = []
    for line in lines:
        times = [f"{ms:.2f}" for ms in (line.step_ms, line.busy_ms, *(line.spans.get(span, 0.0) for span in spans))]
        rest = [f"{line.straggler:.2f}", f"{line.samples_per_s:.1f}", f"{line.memory_mib:.0f}"]
        parts = [
            {"name": SPAN_LABELS[span], "colour": kinds[span].colour, "percent": 100 * line.spans[span] / longest,
             "text": f"{line.spans[span]:.2f} ms"}
            for span in sorted(spans, key=lambda span: ACTIVITIES.index(kinds[span])) if span in line.spans
        ]  # fmt: skip
        rows.append({
            "rank": line.rank, "step_ms": line.step_ms, "parts": parts,
            "cells": [str(line.rank), line.host, str(line.steps), *times, *rest],
        })  # fmt: skip
    colours = {part["colour"] for row in rows for part in row["parts"]}
    return {
        "lines": rows, "columns": [{"name": name, "help": _COLUMN_HELP.get(name, "")} for name in names],
        "step_activities": [activity for activity in ACTIVITIES if activity.colour in colours],
    }  # fmt: skip


def event_kind(event: Mapping[str, Any]) -> str:
    """Return the kind of an event: "failure", "recovery", "checkpoint" or "other".

    Args:
        event: its record.
    """
    if event["name"] == "recovery":
        return "recovery" if "seconds" in event else "other"  # else it is the summary at the end of the run
    return "failure" if event["name"] in _FAILURES else "checkpoint" if event["name"] == "checkpoint" else "other"


def _marks(run: Run, validations: Sequence[int], relative: Callable[[str], str]) -> list[dict[str, Any]]:
    """Return the events that charts mark, with step and time since the start of the run."""
    by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in run.events:
        kind, at = event_kind(event), event["at"] - run.began
        text = relative(str(event["text"])[:2000].partition("\n")[0])[:160]
        text = text.removesuffix(" is complete") if kind == "checkpoint" else f"{event['name']}: {text}"
        mark = {"kind": kind, "time": round(at, 3), "text": text}
        if isinstance(event.get("step"), int):
            mark["step"] = event["step"]
        if kind == "recovery":
            failed = max(0.0, at - float(event["seconds"]))
            by_kind["failure"].append({"kind": "failure", "time": round(failed, 3), "text": "failure"})
        by_kind[kind].append(mark)
    by_kind["validation"] = [{"kind": "validation", "step": step, "text": "validation"} for step in validations]
    return [mark for marks in by_kind.values() for mark in marks[:: max(1, -(-len(marks) // _MAX_MARKS))]]


def _event_rows(run: Run, relative: Callable[[str], str], scale: float) -> list[dict[str, str]]:
    """Return the newest events for the page: the first line of each, and further lines of the newest as details."""
    rows: list[dict[str, str]] = []
    details = 0
    for group in _grouped(run.events[-int(_MAX_LINES * scale) or -1 :]):
        event = group[-1]
        text = relative(str(event["text"])[:10_000]).strip()
        first, _, rest = text.partition("\n")
        if len(group) > 1:
            lines = [relative(str(member["text"])[:_MAX_LINE]).partition("\n")[0] for member in group]
            first, rest = f"{len(group)} times, the last: {first}", "\n".join(lines)
        details += bool(rest)
        rows.append({
            "at": stamp(event["at"]), "after": duration(max(0.0, event["at"] - run.began)),
            "step": str(event.get("step", "")), "name": str(event["name"]), "kind": event_kind(event),
            "first": first[:_MAX_LINE], "rest": rest[: int(_MAX_DETAIL * scale)] if details <= _MAX_DETAILS else "",
        })  # fmt: skip
    return rows


def _grouped(events: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return events in groups: checkpoints that follow each other, and single other events."""
    groups: list[list[Mapping[str, Any]]] = []
    for event in events:
        routine = event["name"] == "checkpoint" and event["text"].endswith("is complete")
        if (
            routine
            and groups
            and groups[-1][0]["name"] == "checkpoint"
            and groups[-1][-1]["text"].endswith("is complete")
        ):
            groups[-1].append(event)
        else:
            groups.append([event])
    return groups


def _relative_paths(name: str) -> Callable[[str], str]:
    """Return a function that makes the paths of files in the run's folder relative to it, also after it was moved."""
    pattern = re.compile(rf"(?<![\w.])/(?:[^\s'\":]{{1,300}}/)?{re.escape(name)}/")
    return lambda text: pattern.sub("", text)


def _text(path: Path, size: int) -> str:
    try:
        with open_untrusted(path) as file:
            return file.read(4 * size).decode(errors="replace")[:size]
    except OSError:
        return ""
