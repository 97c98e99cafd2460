from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from fabricx.callbacks import Timer, timer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Clock:
        now = 100.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(timer, "time", clock)
    return clock


def test_steps_stop_when_time_is_up(trainer: Any, clock: Any) -> None:
    callback = Timer("10s")
    run = trainer(callback).start()
    for _ in range(9):
        clock.now += 1
        run.step()
    assert run.stop_reasons == []
    assert callback.time_remaining() == 1
    clock.now += 1
    run.step()
    clock.now += 1
    run.step()
    assert len(run.stop_reasons) == 1  # printed once
    assert "0:00:10" in run.stop_reasons[0]


def test_the_limit_is_printed_if_another_rank_reaches_it_first(trainer: Any, clock: Any) -> None:
    """The main rank stops at the same time, before its own clock reaches the limit."""
    run = trainer(Timer("10s")).start()
    clock.now += 9
    run.step()
    run.stop.agree("reached the time limit of 0:00:10 after 1 steps")
    run.end()
    assert run.printed == ["reached the time limit of 0:00:10 after 1 steps"]
    other = trainer(Timer("10s")).start()
    other.stop.agree("should_stop")
    other.end()
    assert other.printed == []


def test_epochs_stop_when_time_is_up(trainer: Any, clock: Any) -> None:
    run = trainer(Timer("00:00:00:10", interval="epoch")).start()
    clock.now += 8
    run.epoch()
    assert not run.should_stop
    clock.now += 3
    run.epoch()
    assert run.should_stop
    assert run.stop_reasons == []


def test_all_ranks_ask_the_main_rank_at_the_end_of_an_epoch(trainer: Any, clock: Any) -> None:
    """The clock of this rank has reached the limit at the start, and that of the main rank has not."""
    run = trainer(Timer("10s", interval="epoch"))
    run.callbacks[0].load_state_dict({"time_elapsed": {"train": 10.0}})
    run.start().epoch()
    assert len(run.stop_reasons) == run.world.broadcasts == 1


def test_a_resumed_run_has_less_time_left(trainer: Any, clock: Any) -> None:
    first = Timer(timedelta(seconds=10))
    trainer(first).start()
    clock.now += 7
    again = Timer(timedelta(seconds=10))
    again.load_state_dict(first.state_dict())
    run = trainer(again).start()
    assert again.time_remaining() == 3
    clock.now += 3
    run.step()
    assert len(run.stop_reasons) == 1
    again.load_state_dict({"time_elapsed": {"train": 10.0}})
    assert trainer(again).start().stop_reasons == [f"reached the time limit of {again.duration} after 0 steps"]


def test_the_death_of_a_rank_does_not_extend_the_time_limit(trainer: Any, clock: Any) -> None:
    survivor, replacement = Timer("10s"), Timer("10s")
    trainer(survivor).start()
    clock.now += 7
    run = trainer(replacement).start()
    clock.now += 1
    for rank_timer in (survivor, replacement):  # all ranks load the state of the most advanced rank
        rank_timer.load_state_dict({"time_elapsed": {"train": 7.5}})
    assert (survivor.time_remaining(), replacement.time_remaining()) == (2, 2.5)
    clock.now += 2
    assert survivor.state_dict()["time_elapsed"]["train"] == 10
    run.step()
    assert run.stop_reasons == []
    clock.now += 1
    run.step()
    assert len(run.stop_reasons) == 1


def test_time_after_an_error_is_not_counted(trainer: Any, clock: Any) -> None:
    callback = Timer("10s")
    run = trainer(callback).start()
    clock.now += 7
    run.call("on_exception", ValueError())
    clock.now += 100
    callback.load_state_dict(callback.state_dict())
    trainer(callback).start()
    assert callback.time_remaining() == 3


def test_a_duration_of_0_stops_before_the_first_step(trainer: Any, clock: Any) -> None:
    assert len(trainer(Timer(timedelta(0))).start().stop_reasons) == 1


def test_each_stage_is_measured(trainer: Any, clock: Any) -> None:
    callback = Timer()
    run = trainer(callback).start()
    for _ in range(2):
        run.call("on_validation_start")
        clock.now += 5
        run.call("on_validation_end")
        clock.now += 1
    run.end()
    clock.now += 100
    assert callback.time_elapsed("validate") == 10
    assert callback.time_elapsed("train") == 12
    assert callback.time_remaining() is None
    assert callback.start_time("train") == 100
    assert callback.end_time("train") == 112
    assert callback.time_elapsed("test") == 0


def test_an_unknown_stage_is_refused() -> None:
    with pytest.raises(ValueError, match="stages: train"):
        Timer().time_elapsed("training")


def test_an_unknown_interval_is_refused() -> None:
    with pytest.raises(ValueError, match="interval"):
        Timer(interval="batch")  # type: ignore[arg-type]
