"""Telemetry of all ranks as scalars, beside the user's metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fabricx.telemetry import tensorboard
from fabricx.telemetry.run import Run
from fabricx.telemetry.tensorboard import Board
from tests.unit.telemetry.test_run import record, steps_of


def shown(folder: Path, run: str = "telemetry") -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / run))
    events.Reload()
    return events


def scalars(folder: Path, name: str, rank: int | None = None) -> list[tuple[int, float]]:
    run = "telemetry" if rank is None else f"telemetry/rank_{rank}"
    return [(event.step, round(event.value, 3)) for event in shown(folder, run).Scalars(name)]


def two_ranks() -> Run:
    run = Run()
    run.feed([record("start", rank, 1.0, size=2, device="cpu") for rank in range(2)])
    return run


def test_no_file_is_written_before_the_first_value(tmp_path: Path) -> None:
    board = Board(tmp_path, two_ranks())
    board.write()
    board.close()
    assert list(tmp_path.iterdir()) == []


def test_each_step_is_written_once_for_each_rank(tmp_path: Path) -> None:
    run = two_ranks()
    board = Board(tmp_path, run)
    for first, last in ((1, 12), (13, 22)):  # the first two steps of a process are omitted
        for rank, (forward, wait) in enumerate([(2_000, 7_000), (9_000, 0)]):
            run.feed([steps_of(rank, first, last, at=10.0 * last, forward=forward, wait=wait)])
        board.write()
        board.write()
    board.close()
    assert scalars(tmp_path, "~ranks/busy_ms", 0) == [(12, 2.0), (22, 2.0)]
    assert scalars(tmp_path, "~ranks/busy_ms", 1) == [(12, 9.0), (22, 9.0)]
    assert scalars(tmp_path, "~ranks/wait_ms", 0) == [(12, 7.0), (22, 7.0)]
    assert scalars(tmp_path, "~ranks/share", 1) == [(12, 0.5), (22, 0.5)]
    assert scalars(tmp_path, "~training/step_ms") == [(12, 9.0), (22, 9.0)]


def test_values_of_an_earlier_attempt_are_not_written_again(tmp_path: Path) -> None:
    run = two_ranks()
    run.feed([steps_of(0, 1, 12, at=100.0, forward=1_000), record("gauges", 0, 100.0, step=9, values={"norm": 1.0})])
    board = Board(tmp_path, run)
    board.skip()
    run.feed([steps_of(0, 13, 22, at=200.0, forward=1_000), record("gauges", 0, 200.0, step=20, values={"norm": 2.0})])
    board.close()
    assert scalars(tmp_path, "~ranks/busy_ms", 0) == [(22, 1.0)]
    assert scalars(tmp_path, "~training/norm") == [(20, 2.0)]


def test_recoveries_are_counted_and_events_are_texts(tmp_path: Path) -> None:
    run = two_ranks()
    run.feed([
        record("event", None, 5.0, name="death", text="worker 1 was killed", step=7),
        record("event", 0, 6.0, name="recovery", text="in place", step=7, seconds=0.5, steps_again=2),
    ])  # fmt: skip
    board = Board(tmp_path, run)
    board.close()
    assert scalars(tmp_path, "~recovery/restarts") == [(7, 1.0)]
    assert scalars(tmp_path, "~recovery/downtime_s") == [(7, 0.5)]
    assert scalars(tmp_path, "~recovery/steps_again") == [(7, 2.0)]
    assert any("death" in tag for tag in shown(tmp_path).Tags()["tensors"])


def test_metrics_of_the_user_are_first_and_each_rank_has_a_colour(tmp_path: Path) -> None:
    import re

    from tensorboard.plugins.custom_scalar import layout_pb2

    run = two_ranks()
    run.feed([steps_of(rank, 1, 12, at=100.0, forward=1_000) for rank in range(2)])
    run.feed([record("gauges", 0, 100.0, step=9, values={"learning_rate": 1.0})])
    board = Board(tmp_path, run)
    board.close()
    folders = sorted(path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("events.out.*"))
    assert folders == ["telemetry", "telemetry/rank_0", "telemetry/rank_1"]  # TensorBoard has a colour for each folder
    tags = [tag for folder in folders for tag in shown(tmp_path, folder).Tags()["scalars"]]
    assert min(tags) > "zebra"  # TensorBoard sorts tags by name
    content = shown(tmp_path).Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    layout = layout_pb2.Layout.FromString(content)
    assert [category.title for category in layout.category] == ["metrics", "training", "ranks"]
    patterns = {chart.title: chart.multiline.tag[0] for category in layout.category for chart in category.chart}
    assert all(re.match(patterns["loss"], tag) for tag in ("loss", "val_loss", "train/Loss_epoch"))
    assert not any(re.match(patterns["loss"], tag) for tag in ("accuracy", "~training/gradient_norm"))
    assert re.match(patterns["other metrics"], "val_accuracy")
    assert not any(re.match(patterns["other metrics"], tag) for tag in ("epoch", "loss", "~ranks/share"))
    used = [pattern for title, pattern in patterns.items() if title not in ("loss", "other metrics", "gradient norm")]
    assert all(
        any(re.match(pattern, tag) for tag in tags) for pattern in used if "mib" not in pattern and "cpu" not in pattern
    )


def test_a_single_rank_needs_no_separate_tensorboard_run(tmp_path: Path) -> None:
    run = Run()
    run.feed([record("start", 0, 1.0, size=1, device="cpu"), steps_of(0, 1, 12, at=100.0, forward=1_000)])
    Board(tmp_path, run).close()
    assert [path.name for path in tmp_path.iterdir()] == ["telemetry"]
    assert [path for path in (tmp_path / "telemetry").iterdir() if path.is_dir()] == []
    assert scalars(tmp_path, "~ranks/busy_ms") == [(12, 1.0)]


def test_of_many_ranks_only_the_first_have_scalars_and_the_slowest_is_named(tmp_path: Path) -> None:
    ranks, run = tensorboard.MOST_RANKS + 6, Run()
    run.feed([record("start", rank, 1.0, size=ranks, device="cpu") for rank in range(ranks)])
    for rank in range(ranks):
        slow = rank == ranks - 2
        run.feed([steps_of(rank, 1, 12, at=100.0, forward=9_000 if slow else 3_000, wait=0 if slow else 6_000)])
    board = Board(tmp_path, run)
    board.write()
    board.close()
    assert len(list((tmp_path / "telemetry").glob("rank_*"))) == tensorboard.MOST_RANKS
    assert scalars(tmp_path, "~ranks/slowest_rank") == [(12, ranks - 2)]
    assert scalars(tmp_path, "~ranks/straggler") == [(12, pytest.approx(0.667))]
    assert scalars(tmp_path, "~training/samples_per_s")
