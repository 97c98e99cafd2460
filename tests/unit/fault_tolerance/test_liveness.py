"""Conditions under which a process counts as lost, with a simulated clock."""

from __future__ import annotations

import pytest

from fabricx.fault_tolerance.liveness import START_S, HeartbeatMonitor, Loss


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def run(watch: HeartbeatMonitor, clock: Clock, seconds: float, beats: dict[int, int]) -> dict[int, Loss]:
    """Advance the clock, with two heartbeats per second of the ranks in `beats`; return the lost ranks."""
    lost: dict[int, Loss] = {}
    for _ in range(int(seconds * 2)):
        clock.now += 0.5
        for rank, reached in beats.items():
            watch.heard(rank, reached)
        lost |= watch.silent()
    return lost


def test_only_the_silent_rank_is_declared_dead(clock: Clock) -> None:
    watch = HeartbeatMonitor(10.0, None, clock)
    assert run(watch, clock, 5, {0: 1, 1: 1}) == {}
    assert run(watch, clock, 9, {0: 2}) == {}
    lost = run(watch, clock, 2, {0: 3})
    assert list(lost) == [1]
    assert "no heartbeat" in lost[1].reason
    assert 10.0 < lost[1].silent_s < 12.0  # the report counts it as lost time
    watch.over(1)
    assert run(watch, clock, 60, {0: 3}) == {}  # alive, and without a limit for the time of a batch


def test_a_process_without_a_first_heartbeat_is_declared_dead(clock: Clock) -> None:
    watch = HeartbeatMonitor(10.0, None, clock)
    watch.started(0)
    watch.started(1)
    assert run(watch, clock, START_S - 1, {0: 1}) == {}  # its imports may take long
    assert list(run(watch, clock, 2, {0: 1})) == [1]
    watch.started(1)
    assert list(run(watch, clock, 12, {0: 1})) == []
    assert run(watch, clock, 1, {0: 1, 1: 0}) == {}
    assert list(run(watch, clock, 11, {0: 1})) == [1]  # treated like other ranks from its first heartbeat


def test_a_rank_that_has_not_started_has_no_time_limit(clock: Clock) -> None:
    watch = HeartbeatMonitor(1.0, 1.0, clock)
    assert run(watch, clock, 60, {}) == {}
    assert run(watch, clock, 60, {0: 0}) == {}  # set-up has no limit


def test_a_rank_without_progress_is_declared_dead(clock: Clock) -> None:
    watch = HeartbeatMonitor(10.0, 20.0, clock)
    assert run(watch, clock, 15, {0: 1, 1: 1}) == {}
    assert run(watch, clock, 15, {0: 2, 1: 2}) == {}
    lost = run(watch, clock, 10, {0: 3, 1: 2})
    assert list(lost) == [1]
    assert "completed no batch for" in lost[1].reason


def test_the_time_limit_is_learned_from_the_run(clock: Clock) -> None:
    watch = HeartbeatMonitor(1e9, "learned", clock)
    for step in range(1, 4):
        assert run(watch, clock, 10, {0: step, 1: step}) == {}
    assert run(watch, clock, 185, {0: 4, 1: 3}) == {}
    assert list(run(watch, clock, 25, {0: 4, 1: 3})) == [1]  # twenty times the maximum of ten seconds


def test_a_long_pause_is_reported_with_the_activity_of_each_rank(clock: Clock) -> None:
    watch, reports = HeartbeatMonitor(1e9, None, clock), []
    for second in range(1, 400):
        clock.now += 1.0
        watch.heard(0, min(second, 10), waits=True, where="train.py:3 in training_step: all_reduce(x)")
        watch.heard(1, min(second, 9), where="data.py:7 in __getitem__: sleep(3600)")
        assert watch.silent() == {}
        reports += [text] if (text := watch.news()) is not None else []
    assert len(reports) == 3  # after 60, 120 and 240 seconds
    assert "no further batch for 60 s (the longest pause before was 1.0 s)" in reports[0]
    assert "  rank 0 waits for others at train.py:3 in training_step: all_reduce(x)" in reports[0]
    assert "  rank 1 is at data.py:7 in __getitem__: sleep(3600)" in reports[0]


def test_a_suspended_supervisor_declares_no_rank_dead(clock: Clock) -> None:
    watch = HeartbeatMonitor(10.0, 20.0, clock)
    assert run(watch, clock, 5, {0: 1}) == {}
    clock.now += 3600.0  # Ctrl-Z, and fg
    assert watch.silent() == {}
    assert run(watch, clock, 5, {0: 1}) == {}


def test_only_a_rank_with_earlier_heartbeats_is_called_frozen(clock: Clock) -> None:
    watch = HeartbeatMonitor(10.0, None, clock)
    assert (watch.answers(0), watch.frozen(0)) == (False, False)  # it is starting, and can't answer yet
    watch.heard(0, 1)
    assert (watch.answers(0), watch.frozen(0)) == (True, False)
    clock.now += 11.0
    assert (watch.answers(0), watch.frozen(0)) == (False, True)
