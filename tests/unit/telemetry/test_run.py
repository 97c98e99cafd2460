"""The state of a run from its records: changes of ranks, rollbacks, rows of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fabricx.telemetry import run as runs
from fabricx.telemetry.report import load_run, recovery, warnings_of
from fabricx.telemetry.run import Rank, Row, Run, joined

MS = 1e-3


def row(steps: int = 10, samples: int = 80, **ms: float) -> Row:
    return Row(steps, 0.0, steps, samples, {name: steps * value * MS for name, value in ms.items()})


def record(kind: str, rank: int | None, at: float, file: str = "", **fields: Any) -> dict[str, Any]:
    name = file or f"worker{rank}"
    rank_field = {} if rank is None else {"rank": rank}
    return {"kind": kind, "at": at, "mono": at - 1000.0, "file": name, "who": name, **rank_field, **fields}


def steps_of(rank: int, first: int, last: int, at: float, file: str = "", **us: int) -> dict[str, Any]:
    count = last - first + 1
    columns = {name: [value] * count for name, value in us.items()}
    return record(
        "steps", rank, at, file, steps=list(range(first, last + 1)), each=1, since=at - 1000.0,
        ends_us=[10_000 * n for n in range(count)], samples=[4] * count, us=columns,
    )  # fmt: skip


def test_a_long_run_keeps_a_bounded_number_of_rows_that_still_sum_to_all_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runs, "MAX_ROWS", 16)
    rank = Rank(0)
    for step in range(1, 1001):
        rank.add(Row(step, float(step), 1, 4, {"forward": 0.5}))
    whole = joined(rank.rows)
    assert len(rank.rows) <= 16
    assert (whole.steps, whole.samples, whole.step, whole.at) == (1000, 4000, 1000, 1000.0)
    assert whole.step_s == pytest.approx(0.5)


def test_first_steps_of_a_process_are_omitted() -> None:
    run = Run()
    run.feed([record("start", 0, 5.0, size=1), steps_of(0, 1, 10, 6.0, forward=100)])
    assert joined(run.ranks[0].rows).steps == 10 - runs.WARM_UP
    assert run.steps == 10


def test_a_rank_continues_in_another_process_and_clocks_of_machines_are_aligned() -> None:
    run = Run()
    run.feed([
        record("start", 0, 100.0, "worker0", size=2, clock_offset_s=0.0, host="a"),
        record("start", 1, 130.0, "worker1", size=2, clock_offset_s=30.0, host="b"),
        steps_of(1, 1, 5, 131.0, "worker1", forward=100),
        record("became", 0, 102.0, "worker0", size=1, generation=1),
        record("start", None, 103.0, "worker2", size=1, pid=77, host="c"),
        record("became", 1, 104.0, "worker2", size=2, generation=1),
        steps_of(1, 6, 9, 105.0, "worker2", forward=100),
        record("end", 1, 106.0, "worker2", ending="success"),
    ])  # fmt: skip
    rank = run.ranks[1]
    assert (rank.processes, rank.step, rank.ending) == (2, 9, "success")
    assert (rank.attributes["pid"], rank.attributes["host"]) == (77, "c")
    assert run.ranks[0].processes == 1  # only the group changed, not the process
    assert run.size == 2
    assert run.began == 100.0
    assert [round(row.at, 3) for row in rank.rows] == [101.02, 101.03, 101.04, 105.02, 105.03]


def test_values_logged_after_the_resume_point_are_dropped() -> None:
    run = Run()
    logged = [record("metrics", 0, float(step), step=step, values={"loss": step / 10}) for step in (1, 2, 3)]
    run.feed([*logged, record("rewind", 0, 4.0, step=1), record("metrics", 0, 5.0, step=2, values={"loss": "nan"})])
    assert list(run.metrics["loss"]) == [1, 2]
    assert run.metrics["loss"][1] == 0.1
    assert str(run.metrics["loss"][2]) == "nan"


def test_recoveries_are_counted_with_their_duration() -> None:
    run = Run()
    run.feed([
        record("event", None, 1.0, "launcher", name="failure", text="x", step=5, steps_again=3.0),
        record("event", 0, 2.0, name="recovery", text="started again", step=2, seconds=1.5),
        record("event", 0, 3.0, name="recovery", text="2 workers continue", step=7, seconds=0.25, steps_again=0),
        record("event", 0, 4.0, name="recovery", text="recovered 2 times, 0 samples lost", step=9),
    ])  # fmt: skip
    assert recovery(run) == "recovered 2 times, 3 steps trained again, 1.8 s"
    run.feed([record("event", None, 5.0, "launcher", name="hang", text="rank 1 doesn't answer", silent_s=30.0)])
    assert recovery(run).startswith("recovered 2 times, 3 steps trained again, 31.8 s (30.0 s of them until a worker")


def test_an_event_of_the_launching_process_has_the_newest_step_of_that_moment() -> None:
    run = Run()
    run.feed([
        record("start", 0, 1.0, size=1), steps_of(0, 1, 21, 2.0, forward=100),
        record("event", None, 2.5, "launcher", name="death", text="killed", step=7),
        steps_of(0, 22, 30, 3.0, forward=100),
    ])  # fmt: skip
    assert run.events[0]["step"] == 21


def test_a_warning_of_several_ranks_is_shown_once_with_the_count() -> None:
    run = Run()
    lines = [record("log", rank, 1.0, level="WARNING", name="a", text="low") for rank in (0, 1, 1)]
    run.feed([*lines, record("log", 1, 2.0, level="INFO", name="a", text="fine")])
    assert warnings_of(run) == [("0, 1", "WARNING a: low", 3)]


def test_a_rank_without_a_file_is_named_and_all_others_are_shown(tmp_path: Path) -> None:
    folder = tmp_path / "telemetry"
    folder.mkdir()
    (folder / "worker0-1-a.jsonl").write_text('{"kind": "start", "at": 1, "mono": 0, "rank": 0, "size": 3}\n')
    seen = load_run(tmp_path)
    assert seen.complaints == ["rank 1, 2 (of 3 ranks): no records; the other ranks are shown"]
    assert "no records for" in seen.state
