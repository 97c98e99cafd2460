from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from fabricx.callbacks import time_interval
from fabricx.callbacks.time_interval import TimeInterval, steps_until_check


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time_interval, "time", clock)
    return clock


class Broadcast:
    """World of two ranks that records the main rank's broadcasts and replays them on the second rank."""

    def __init__(self) -> None:
        self.size = 2
        self.said: list[Any] = []

    def broadcast_object(self, value: Any) -> Any:
        self.said.append(value)
        return value


def test_ranks_with_different_clocks_agree(clock: Clock) -> None:
    main, other = TimeInterval(timedelta(seconds=100)), TimeInterval(timedelta(seconds=100))
    main_world = Broadcast()
    due_main, due_other = [], []
    for step in range(1, 5101):
        clock.now += 0.1
        before = len(main_world.said)
        if main.due(step, main_world):  # type: ignore[arg-type]
            due_main.append(step)
        clock.now += 1000.0  # the clock of the second rank differs
        answers = main_world.said[before:]
        if other.due(step, SimpleNamespace(size=2, broadcast_object=lambda value, replayed=answers: replayed.pop())):  # type: ignore[arg-type]
            due_other.append(step)
        clock.now -= 1000.0
        assert not answers  # the clock is read at the same steps
    assert due_main == due_other
    assert due_main == pytest.approx([1000, 2000, 3000, 4000, 5000], abs=25)
    assert len(main_world.said) < 5 * 40  # and not 5,000 times


def test_slower_steps_delay_the_interval_only_slightly(clock: Clock) -> None:
    interval, world = TimeInterval(timedelta(seconds=100)), Broadcast()
    step = 0
    while not interval.due(step, world):  # type: ignore[arg-type]
        step += 1
        clock.now += 0.1 if step < 500 else 0.5
    assert 100 <= clock.now < 160


def test_the_clock_is_read_at_least_ten_times_per_interval() -> None:
    assert steps_until_check(remaining_s=600, interval_s=600, s_per_step=1) == 60
    assert steps_until_check(remaining_s=30, interval_s=600, s_per_step=1) == 30
    assert steps_until_check(remaining_s=-5, interval_s=600, s_per_step=1) == 1
    assert steps_until_check(remaining_s=5, interval_s=600, s_per_step=0) > 1
