"""Export the spans of all ranks in Chrome's trace format, for ui.perfetto.dev.

Format: "Trace Event Format", Google, 2016. Times are microseconds since the run's first record.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from fabricx.telemetry.diagnosis import SPAN_LABELS
from fabricx.telemetry.events import FOLDER, Span
from fabricx.telemetry.reader import Files, Record
from fabricx.telemetry.run import Run

NAME: Final = "trace.json"
OPERATORS: Final = "operators-rank"  # prefix of the files of torch's profiler; the rank follows
_SERVERS: Final = 1000  # process number of the first server, above all ranks
_SPANS, _STEPS = 0, 1  # thread numbers: the rows of a rank
_BEGINS: Final = "start", "became", "rewind"  # kinds of records that interrupt the sequence of laps and steps


def write_trace(run_dir: Path) -> Path | None:
    """Write the trace of a run.

    Args:
        run_dir: the run's folder.

    Returns:
        path of the trace, or None if the run recorded no trace.
    """
    records = Files(run_dir).new()
    operators = sorted((run_dir / FOLDER).glob(f"{OPERATORS}*.json"))
    if not operators and not any(record["kind"] == "laps" for record in records):
        return None
    run = Run()
    run.feed(records)
    events = [*_names(run, records), *_spans(run, records), *_flows(run, records), *_instants(run)]
    for path in operators:
        events += _of_profiler(path, run.began)
    file = run_dir / NAME
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "runId": run.id}))
    fresh.replace(file)
    return file


def _names(run: Run, records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    for number, rank in sorted(run.ranks.items()):
        yield _name("process_name", number, 0, f"rank {number} ({rank.attributes.get('host', '?')})")
        yield {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}}
        yield _name("thread_name", number, _SPANS, "spans")
        yield _name("thread_name", number, _STEPS, "steps")
    for server in sorted({_server(record) for record in records if record["kind"] == "applied"}):
        yield _name("process_name", server, 0, f"server {server - _SERVERS}")
        yield _name("thread_name", server, _SPANS, "gradients applied")


def _name(kind: str, process: int, thread: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": text}}


def _spans(run: Run, records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    """Yield events for laps, for the waiting within them (drawn at their end), and for steps."""
    ends: dict[str, float] = {}  # end of the last lap, by file
    done: dict[str, float] = {}  # end of the last step, by file
    for record in records:
        name, rank = record["file"], record.get("rank")
        if record["kind"] in _BEGINS:
            ends.pop(name, None)
            done.pop(name, None)
        elif record["kind"] == "laps" and rank is not None:
            for span, end, waited in record["laps"]:
                begin = ends.get(name)
                ends[name] = end
                if begin is None or span is None:
                    continue
                yield _span(run, record, SPAN_LABELS[span], rank, _SPANS, begin, end)
                if waited > 0.0 and span not in (Span.WAIT, Span.PULL):
                    yield _span(run, record, "waits", rank, _SPANS, max(begin, end - waited), end)
        elif record["kind"] == "steps" and rank is not None:
            for step, offset in zip(record["steps"], record["ends_us"], strict=False):
                end = record["since"] + offset / 1e6
                if name in done and record["each"] == 1:
                    yield _span(run, record, f"step {step}", rank, _STEPS, done[name], end)
                done[name] = end
        elif record["kind"] == "now" and rank is not None and "memory_mib" in record:
            args = {"MiB": record["memory_mib"]}
            yield {"ph": "C", "name": "memory", "pid": rank, "ts": _us(record["at"] - run.began), "args": args}


def _span(run: Run, record: Record, name: str, process: int, thread: int, begin: float, end: float) -> dict[str, Any]:
    ts = _us(run.wall(record, begin) - run.began)
    return {"ph": "X", "name": name, "pid": process, "tid": thread, "ts": ts, "dur": _us(end - begin)}


def _flows(run: Run, records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    """Yield events for gradients that servers applied, with arrows from the worker that sent the gradient."""
    for record in records:
        if record["kind"] == "pushed" and record.get("rank") is not None:
            for worker, number, at in record["pushed"]:
                yield from _arrows(run, record, record["rank"], "s", worker, number, at, record["servers"])
        elif record["kind"] == "applied":
            server = _server(record)
            for worker, number, begin, end in record["applied"]:
                name = f"gradient {number} of worker {worker}"
                yield _span(run, record, name, server, _SPANS, begin, end)
                yield from _arrows(run, record, server, "f", worker, number, begin, [server - _SERVERS])


def _arrows(
    run: Run, record: Record, process: int, end: str, worker: int, number: int, at: float, servers: Iterable[int]
) -> Iterator[dict[str, Any]]:  # fmt: skip
    for server in servers:
        arrow = {"ph": end, "cat": "push", "name": "push", "id": f"push/{worker}/{number}/{server}"}
        if end == "f":
            arrow["bp"] = "e"
        yield {**arrow, "pid": process, "tid": _SPANS, "ts": _us(run.wall(record, at) - run.began)}


def _server(record: Record) -> int:
    return _SERVERS + int(record["who"].removeprefix("server"))


def _instants(run: Run) -> Iterator[dict[str, Any]]:
    for event in run.events:
        text = str(event["text"])
        first = text.partition("\n")[0][:120]
        yield {
            "ph": "i", "s": "g", "name": f"{event['name']}: {first}", "pid": event.get("rank", 0), "tid": _SPANS,
            "ts": _us(event["at"] - run.began), "args": {"text": text[:4000]},
        }  # fmt: skip


def _of_profiler(path: Path, began: float) -> list[dict[str, Any]]:
    """Return the events of a file of torch's profiler, with the rank as process and times relative to the run."""
    rank = int(path.stem.removeprefix(OPERATORS))
    try:
        profile = json.loads(path.read_text())
    except ValueError:  # truncated: the process was killed
        return []
    shift = profile.get("baseTimeNanoseconds", 0) / 1e3 - began * 1e6
    events = []
    for event in profile.get("traceEvents", []):
        if "ts" not in event or event.get("ph") not in ("X", "s", "f", "t", "i"):
            continue
        moved = {**event, "pid": rank, "ts": event["ts"] + shift}
        if "id" in event:
            moved["id"] = f"rank{rank}/{event['id']}"
        events.append(moved)
    return events


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
