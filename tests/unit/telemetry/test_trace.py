"""The trace of a run, validated like a viewer does."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from fabricx.telemetry.trace import write_trace

ROUNDING = 1.5  # microseconds: times of spans are integers, or multiples of 0.1


def check_trace(path: Path) -> list[dict[str, Any]]:
    """Check that ui.perfetto.dev accepts a file, and return its events."""
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    rows: dict[tuple[Any, Any], list[tuple[float, float, str]]] = defaultdict(list)
    ends: dict[Any, set[str]] = defaultdict(set)
    named = {event["pid"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    for event in events:
        assert event["ph"] in "MXiCsft", event
        assert event["pid"] in named, event
        if event["ph"] == "M":
            continue
        assert isinstance(event["ts"], (int, float)), event
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            rows[event["pid"], event["tid"]].append((event["ts"], event["dur"], event["name"]))
        if event["ph"] in "sf":
            ends[event["id"]].add(event["ph"])
    for row in rows.values():
        open_until: list[float] = []
        for begin, seconds, name in sorted(row, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= begin + ROUNDING:
                open_until.pop()
            assert not open_until or begin + seconds <= open_until[-1] + ROUNDING, f"{name} overlaps what it isn't in"
            open_until.append(begin + seconds)
    return events


def write(folder: Path, name: str, *records: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps({"run": "a", **record}) + "\n" for record in records))


def a_run(run_dir: Path) -> None:
    """Two ranks with different monotonic clocks, a server, and a death."""
    for rank, mono in ((0, 50.0), (1, 7.0)):
        write(
            run_dir / "telemetry", f"worker{rank}-1-a.jsonl",
            {"kind": "start", "at": 1000.0, "mono": mono, "rank": rank, "size": 2, "host": "h"},
            {
                "kind": "laps", "at": 1001.0, "mono": mono + 1, "rank": rank,
                "laps": [[None, mono, 0.0], ["forward", mono + 0.2, 0.0], ["backward", mono + 0.6, 0.1]],
            },
            {"kind": "pushed", "at": 1001.0, "mono": mono + 1, "rank": rank, "servers": [0],
             "pushed": [[rank, 1, mono + 0.55]]},
        )  # fmt: skip
    write(
        run_dir / "telemetry", "server0-3-c.jsonl",
        {"kind": "applied", "at": 1001.5, "mono": 1.5, "applied": [[0, 1, 0.7, 0.8], [1, 1, 0.8, 0.9]]},
    )  # fmt: skip
    write(
        run_dir / "telemetry", "launcher-9-b.jsonl",
        {"kind": "event", "at": 1000.7, "mono": 3.0, "name": "death", "text": "worker 1: killed", "step": 1},
    )  # fmt: skip


def test_a_trace_has_a_row_for_each_rank_and_arrows_from_push_to_apply(tmp_path: Path) -> None:
    a_run(tmp_path)
    path = write_trace(tmp_path)
    assert path is not None
    events = check_trace(path)
    spans = {(e["pid"], e["name"]): (e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    for rank in (0, 1):  # at equal wall times
        assert spans[rank, "forward"] == (0.0, 200_000.0)
        assert spans[rank, "backward"] == (200_000.0, 400_000.0)
        assert spans[rank, "waits"] == (500_000.0, 100_000.0)
    arrows = [(e["ph"], e["id"], e["ts"]) for e in events if e["ph"] in "sf"]
    assert sorted(arrows) == [
        ("f", "push/0/1/0", 700_000.0), ("f", "push/1/1/0", 800_000.0),
        ("s", "push/0/1/0", 550_000.0), ("s", "push/1/1/0", 550_000.0),
    ]  # fmt: skip
    [instant] = [e for e in events if e["ph"] == "i"]
    assert (instant["name"], instant["ts"], instant["s"]) == ("death: worker 1: killed", 700_000.0, "g")


def test_operators_of_torchs_profiler_are_converted_to_the_same_clock(tmp_path: Path) -> None:
    a_run(tmp_path)
    profiled = {
        "baseTimeNanoseconds": 900 * 10**9,
        "traceEvents": [
            {"ph": "X", "name": "aten::mm", "pid": 4711, "tid": 4711, "ts": 100.3e6, "dur": 5.0},
            {"ph": "s", "id": 3, "name": "x", "cat": "ac2g", "pid": 4711, "tid": 4711, "ts": 100.3e6},
            {"ph": "M", "name": "process_name", "pid": 4711, "args": {"name": "python"}},
        ],
    }
    (tmp_path / "telemetry" / "operators-rank1.json").write_text(json.dumps(profiled))
    path = write_trace(tmp_path)
    assert path is not None
    [operator] = [e for e in check_trace(path) if e["name"] == "aten::mm"]
    assert (operator["pid"], operator["ts"]) == (1, 300_000.0)
    [arrow] = [e for e in check_trace(path) if e.get("cat") == "ac2g"]
    assert arrow["id"] == "rank1/3"


def test_a_run_that_traced_nothing_has_no_trace(tmp_path: Path) -> None:
    write(tmp_path / "telemetry", "worker0-1-a.jsonl", {"kind": "start", "at": 1.0, "mono": 1.0, "rank": 0, "size": 1})
    assert write_trace(tmp_path) is None
