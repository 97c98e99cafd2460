"""Hangs of ranks without a supervisor, with simulated clock and store."""

from __future__ import annotations

from typing import Any

import pytest

from fabricx.distributed.activity import heartbeat
from fabricx.distributed.activity.collective_trace import GroupTrace, Route, TransferTrace
from fabricx.distributed.activity.heartbeat import Diagnosis
from fabricx.distributed.world import World
from fabricx.errors import RanksDisagree
from fabricx.launch.launch_watch import LOOK_S, Post, Watch, packed, unpacked

ROUTE = Route(0, 1, "forward", 3)


class Store:
    """A store in memory."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key].encode()


class Ranks:
    """Two ranks of a launch, of which a test sets the activity.

    Args:
        monkeypatch: replaces the activity of this process.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.reached, self.rank, self.waiting = 0.0, 0, 0, True
        self.diagnoses: dict[int, Diagnosis] = {0: at("all_gather"), 1: at("all_reduce")}
        monkeypatch.setattr(heartbeat, "reached", lambda: self.reached)
        monkeypatch.setattr(heartbeat, "waits", lambda: self.waiting)
        monkeypatch.setattr(heartbeat, "diagnosis", lambda: self.diagnoses[self.rank])
        store: Any = Store()
        self.store = store
        self.watches = [Watch(World(rank=rank, size=2, store=store), lambda: self.now) for rank in range(2)]

    def passes(self, seconds: float, silent: tuple[int, ...] = ()) -> list[tuple[float, str | Exception]]:
        """Advance the clock; returns the reports of the main rank with their times."""
        reports = []
        for _ in range(int(seconds / LOOK_S)):
            self.now += LOOK_S
            for rank, watch in reversed(list(enumerate(self.watches))):
                self.rank = rank
                if rank not in silent and (report := watch.look()):
                    reports.append((self.now, report))
        return reports


def at(collective: str) -> Diagnosis:
    group = GroupTrace((0, 1), "0", {6: "barrier", 7: collective}, (7,))
    return Diagnosis(
        "train.py:5 in validation_step", f"{collective} #7", "barrier #6", "all stacks", (group,), cpu_s=3.0
    )


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def test_ranks_in_different_collectives_are_an_error_of_the_main_rank(ranks: Ranks) -> None:
    reports = ranks.passes(30)
    time_s, error = reports[0]
    assert isinstance(error, RanksDisagree)
    assert "rank 0 waits in all_gather #7, rank 1 waits in all_reduce #7" in str(error)
    assert 10 < time_s < 20


def test_a_collective_that_all_ranks_have_started_is_reported_after_a_minute_and_again_later(ranks: Ranks) -> None:
    ranks.diagnoses[1] = ranks.diagnoses[0]
    ranks.passes(3)
    ranks.reached = 1
    reports = ranks.passes(200)
    assert [time_s for time_s, _ in reports] == [64.0, 124.0]
    assert str(reports[0][1]).startswith(
        "no further batch for 60 s (the longest pause before was 0.0 s)\n  rank 0 waits for others at"
    )
    assert "all ranks are alike: rank 0 waits in all_gather #7" in str(reports[0][1])


def test_a_rank_that_posts_nothing_is_named_and_no_deadlock_is_concluded(ranks: Ranks) -> None:
    ranks.passes(12)  # both ranks have posted
    ranks.reached = 1
    reports = ranks.passes(70, silent=(1,))
    assert len(reports) == 1
    assert "rank 1 doesn't answer" in str(reports[0][1])


def test_ranks_with_progress_or_cpu_time_are_not_reported(ranks: Ranks) -> None:
    for _ in range(30):
        ranks.reached += 1
        assert ranks.passes(5) == []
    assert not ranks.store.values
    ranks.waiting = False
    assert ranks.passes(90) == []  # the longest pause was 5 s, so that 90 s are not reported again


def test_a_post_is_received_unchanged_without_stacks_and_control_characters() -> None:
    transfers = TransferTrace({("send", ROUTE): 4}, ("receive", ROUTE, 2))
    group = GroupTrace((0, 1), "0", {7: "all_reduce"}, (7,))
    sent = Diagnosis("a.py:1 in f: \x1b[31m", "all_reduce #7", "", "stacks", (group,), transfers, 1.5)
    post = unpacked(packed(Post(3, 2.5, sent)).encode())
    assert post == Post(
        3,
        2.5,
        Diagnosis("a.py:1 in f: \N{REPLACEMENT CHARACTER}[31m", "all_reduce #7", "", "", (group,), transfers, 1.5),
    )
