"""Recorded time of a rank: spans, steps, heartbeats, clocks."""

from __future__ import annotations

import json
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from fabricx.telemetry import recorder
from fabricx.telemetry.events import EventFile, Span
from fabricx.telemetry.reader import Files
from fabricx.telemetry.recorder import Recorder
from fabricx.telemetry.run import Run


class Clock:
    """Manually advanced clock with the counters of a rank's waiting time."""

    servers = 0
    waits_for_servers = False

    def __init__(self) -> None:
        self.now = 100.0
        self.waited_s = self.pushed_s = 0.0
        self.pushes: deque[tuple[int, int, float]] = deque()

    def passes(self, seconds: float, waiting: float = 0.0) -> None:
        self.now += seconds
        self.waited_s += waiting


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(recorder, "_clock", lambda: clock.now)
    return clock


def recorded(run_dir: Path, clock: Clock, rank: int = 0) -> Recorder:
    return Recorder(EventFile(run_dir, f"worker {rank}", rank), clock, torch.device("cpu"))


def kinds(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in Files(run_dir).new() if record["kind"] == kind]


def test_a_lap_is_added_to_its_span_and_waiting_is_counted_separately(tmp_path: Path, clock: Clock) -> None:
    recording = recorded(tmp_path, clock)
    recording.begin()
    for step in (1, 2):
        clock.passes(0.010)
        recording.lap(Span.DATA)
        clock.passes(0.030)
        recording.lap(Span.FORWARD)
        clock.passes(0.050, waiting=0.020)
        recording.lap(Span.BACKWARD)
        recording.samples += 8
        clock.passes(0.005)
        recording.end_step(step)
    recording.close("success")
    [steps] = kinds(tmp_path, "steps")
    assert steps["steps"] == [1, 2]
    assert steps["samples"] == [8, 8]
    assert steps["ends_us"] == [0, 95_000]
    assert steps["us"] == {
        "data": [10_000] * 2, "forward": [30_000] * 2, "backward": [30_000] * 2, "wait": [20_000] * 2,
        "other": [5_000] * 2,
    }  # fmt: skip
    assert recording.totals() == (
        pytest.approx({"data": 0.02, "forward": 0.06, "backward": 0.06, "wait": 0.04, "other": 0.01}),
        2,
    )
    [end] = kinds(tmp_path, "end")
    assert end["ending"] == "success"
    run = Run()
    run.feed(Files(tmp_path).new())
    assert run.ranks[0].most_mib == end["memory_mib"] > 10  # also without a heartbeat, in less than a second


def test_a_checkpoint_within_a_validation_is_counted_as_checkpoint_time(tmp_path: Path, clock: Clock) -> None:
    recording = recorded(tmp_path, clock)
    recording.begin()
    clock.passes(1.0)
    with recording.within(Span.VALIDATION):
        clock.passes(2.0)
        with recording.within(Span.CHECKPOINT):
            clock.passes(4.0)
        clock.passes(8.0)
    clock.passes(16.0)
    recording.end_step(1)
    recording.close("success")
    [steps] = kinds(tmp_path, "steps")
    assert {name: us[0] / 1e6 for name, us in steps["us"].items()} == {"other": 17, "validation": 10, "checkpoint": 4}


def test_the_time_of_an_interrupted_step_is_in_no_step(tmp_path: Path, clock: Clock) -> None:
    recording = recorded(tmp_path, clock)
    recording.begin()
    clock.passes(5.0)
    recording.lap(Span.FORWARD)
    recording.became(rank=1, size=3, generation=1)
    recording.begin()
    clock.passes(0.5)
    recording.lap(Span.FORWARD)
    recording.end_step(7)
    recording.close("success")
    [steps] = kinds(tmp_path, "steps")
    assert steps["us"] == {"forward": [500_000]}
    assert steps["rank"] == 1
    [became] = kinds(tmp_path, "became")
    assert (became["size"], became["generation"], became["rank"]) == (3, 1, 1)


def test_a_large_file_holds_several_steps_in_a_row(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_DOUBLING_BYTES", 200)  # bytes: exceeded by the first row, and twice by the second
    recording = recorded(tmp_path, clock)
    recording.begin()
    for step in range(1, 12):
        clock.passes(1.0)
        recording.samples += 2
        recording.end_step(step)
        recording._write()
    recording.close("success")
    records = kinds(tmp_path, "steps")
    assert records[0]["each"] == 1
    assert records[-1]["each"] > 1
    assert sum(record["each"] for record in records) == records[-1]["steps"][-1]  # none is counted twice
    assert all(record["samples"] == [2 * record["each"]] for record in records)


def test_each_lap_is_recorded_if_a_trace_is_requested(tmp_path: Path, clock: Clock) -> None:
    recording = recorded(tmp_path, clock)
    recording.trace_laps(on=True)
    recording.begin()
    clock.passes(0.25, waiting=0.125)
    recording.lap(Span.BACKWARD)
    recording.close("success")
    [laps] = kinds(tmp_path, "laps")
    assert laps["laps"] == [[None, 100.0, 0.0], ["backward", 100.25, 0.125]]


def test_numbers_without_a_json_form_are_read_back(tmp_path: Path, clock: Clock) -> None:
    recording = recorded(tmp_path, clock)
    recording.metrics({"loss": float("nan"), "norm": float("inf"), "lr": 0.5}, 3)
    recording.close("failed")
    [path] = (tmp_path / "telemetry").glob("*.jsonl")
    [line] = [line for line in path.read_text().splitlines() if '"metrics"' in line]
    assert "NaN" not in line  # which isn't JSON
    values = json.loads(line)["values"]
    assert {name: str(float(value)) for name, value in values.items()} == {"loss": "nan", "norm": "inf", "lr": "0.5"}


def test_a_thread_writes_a_heartbeat_each_second_with_the_line_of_a_stalled_process(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "interval_s", lambda ranks: 0.01)
    recording = recorded(tmp_path, clock)
    recording.begin()
    deadline = time.monotonic() + 30
    while not kinds(tmp_path, "now") and time.monotonic() < deadline:
        time.sleep(0.01)
    clock.passes(60.0)
    # A record may also have been made while this thread was reading the records.
    while (
        "test_recorder.py" not in (now := kinds(tmp_path, "now")[-1]).get("where", "") and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    recording.close("success")
    assert now["memory_mib"] > 10
    assert now["still_s"] == 60.0
    assert "test_recorder.py" in now["where"]


class TwoMachines:
    """The second of two ranks, on a machine with a clock 30 s ahead; all barriers but the third return late."""

    size, local_size, newcomer, device = 2, 1, False, torch.device("cpu")

    def __init__(self) -> None:
        self.rounds = 0

    def barrier(self) -> None:
        self.rounds += 1
        if self.rounds != 3:
            time.sleep(0.02)

    def all_gather(self, local: torch.Tensor) -> torch.Tensor:
        late = 0.0 if self.rounds == 3 else 0.5
        return torch.stack([local - 30.0 - late, local])


def test_clocks_of_machines_are_compared_by_the_fastest_round_trip() -> None:
    offset, uncertain = recorder._clock_offset(TwoMachines())
    assert offset == pytest.approx(30.0, abs=1e-4)
    assert 0.0 <= uncertain < 0.02


def test_ranks_of_a_machine_share_its_clock() -> None:
    alone = TwoMachines()
    alone.local_size = 2
    assert recorder._clock_offset(alone) == (0.0, 0.0)
    assert alone.rounds == 0


def test_records_and_rows_of_many_ranks_are_less_frequent(tmp_path: Path, clock: Clock) -> None:
    recording = Recorder(EventFile(tmp_path, "worker 0", 0), clock, torch.device("cpu"), ranks=10_000)
    recording.begin()
    for step in range(1, 65):
        clock.passes(0.010)
        recording.end_step(step)
        if step % 16 == 0:
            recording._write()
    recording.close("success")
    records = kinds(tmp_path, "steps")
    assert [(record["each"], len(record["steps"])) for record in records] == [(1, 16), (2, 8), (4, 4), (4, 4)]
    assert len(kinds(tmp_path, "now")) == 0  # a heartbeat is due after 20 seconds
