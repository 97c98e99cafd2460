"""Telemetry of all ranks as scalars, beside the user's metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fabricx.telemetry.run import Run
from fabricx.telemetry.tensorboard import Board
from tests.unit.telemetry.test_run import record, steps_of


def shown(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "telemetry"))
    events.Reload()
    return events


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(event.step, round(event.value, 3)) for event in shown(folder).Scalars(name)]


def two_ranks() -> Run:
    run = Run()
    run.feed([record("start", rank, 1.0, size=2, device="cpu") for rank in range(2)])
    return run


def test_nothing_is_written_before_there_is_something_to_show(tmp_path: Path) -> None:
    board = Board(tmp_path, two_ranks())
    board.write()
    board.close()
    assert list(tmp_path.iterdir()) == []


def test_each_step_is_written_once_for_each_rank(tmp_path: Path) -> None:
    run = two_ranks()
    board = Board(tmp_path, run)
    for first, last in ((1, 12), (13, 22)):  # the first two steps of a process are left out
        for rank, (forward, wait) in enumerate([(2_000, 7_000), (9_000, 0)]):
            run.feed([steps_of(rank, first, last, at=10.0 * last, forward=forward, wait=wait)])
        board.write()
        board.write()
    board.close()
    assert scalars(tmp_path, "busy_ms/rank_0") == [(12, 2.0), (22, 2.0)]
    assert scalars(tmp_path, "busy_ms/rank_1") == [(12, 9.0), (22, 9.0)]
    assert scalars(tmp_path, "wait_ms/rank_0") == [(12, 7.0), (22, 7.0)]
    assert scalars(tmp_path, "share/rank_1") == [(12, 0.5), (22, 0.5)]
    assert scalars(tmp_path, "step_ms") == [(12, 9.0), (22, 9.0)]


def test_what_an_earlier_attempt_has_written_is_not_written_again(tmp_path: Path) -> None:
    run = two_ranks()
    run.feed([steps_of(0, 1, 12, at=100.0, forward=1_000), record("gauges", 0, 100.0, step=9, values={"norm": 1.0})])
    board = Board(tmp_path, run)
    board.skip()
    run.feed([steps_of(0, 13, 22, at=200.0, forward=1_000), record("gauges", 0, 200.0, step=20, values={"norm": 2.0})])
    board.close()
    assert scalars(tmp_path, "busy_ms/rank_0") == [(22, 1.0)]
    assert scalars(tmp_path, "norm") == [(20, 2.0)]


def test_recoveries_are_counted_and_events_are_texts(tmp_path: Path) -> None:
    run = two_ranks()
    run.feed([
        record("event", None, 5.0, name="death", text="worker 1 was killed", step=7),
        record("event", 0, 6.0, name="recovery", text="in place", step=7, seconds=0.5, steps_again=2),
    ])  # fmt: skip
    board = Board(tmp_path, run)
    board.close()
    assert scalars(tmp_path, "recovery/restarts") == [(7, 1.0)]
    assert scalars(tmp_path, "recovery/downtime_s") == [(7, 0.5)]
    assert scalars(tmp_path, "recovery/steps_again") == [(7, 2.0)]
    assert any("death" in tag for tag in shown(tmp_path).Tags()["tensors"])
