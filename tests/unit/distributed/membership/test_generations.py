"""Groups of lost workers are aborted where the backend raises no error, such as NCCL; groups only record the calls."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import distributed_c10d as c10d

from fabricx.distributed.membership.generations import Generation, Membership, enter, membership
from fabricx.distributed.world import World
from fabricx.errors import PeerLost


def test_a_worker_waits_for_the_next_generation_without_a_limit() -> None:
    waiting, waits = Membership(), []
    wait_for = waiting._news.wait_for

    def recorded(condition: Any, timeout: float | None = None) -> bool:
        waits.append(timeout)
        waiting._newest = Generation(1, (0,))
        return wait_for(condition, timeout)

    waiting._news.wait_for = recorded  # type: ignore[method-assign]
    assert waiting.newer_than(0).number == 1
    assert waits == [None]


class Group:
    """A group that records the calls on it."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def abort(self) -> None:
        assert membership().outdated(0), "who sees the result has to know that it may be anything"
        self.calls.append(f"abort {self.name}")

    def _get_backend(self, device: Any) -> Any:
        return SimpleNamespace(
            _group_start=lambda: self.calls.append("begin"), _group_end=lambda: self.calls.append("end")
        )


@pytest.fixture
def member() -> Iterator[Membership]:
    before = membership()
    enter(Membership(0, "", lambda kind, content: None))
    membership().building(0, None, silent=True)
    yield membership()
    enter(before)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    recorded: list[str] = []
    names = {Group("0", recorded): "0", Group("1", recorded): "1"}
    monkeypatch.setattr(c10d, "_world", SimpleNamespace(pg_names=names))
    monkeypatch.setattr(c10d, "is_nccl_available", lambda: True)
    return recorded


def test_all_groups_are_aborted_together_and_each_once(member: Membership, calls: list[str]) -> None:
    assert not member.shut_broken()
    member.on_message("broken", 0)
    assert member.shut_broken()
    assert calls == ["begin", "abort 1", "abort 0", "end"]
    c10d._world.pg_names[Group("2", calls)] = "2"  # type: ignore[index]
    assert member.shut_broken()  # while a worker is busy with it still
    assert calls[4:] == ["begin", "abort 2", "end"]
    member.shut()
    assert len(calls) == 7
    assert not member.shut_broken()


@pytest.mark.parametrize("silent", [True, False])
def test_a_departure_aborts_groups_only_if_it_would_be_silent(
    member: Membership, calls: list[str], *, silent: bool
) -> None:
    member.building(0, None, silent=silent)
    member.on_message("generation", Generation(1, (0, 2)))
    assert member.shut_broken() is silent  # otherwise an error is raised when the other workers close their connections
    assert bool(calls) is silent


def test_results_of_a_collective_are_valid_only_if_no_worker_has_left(member: Membership) -> None:
    silent, loud = World(size=2, backend="cpu:gloo,cuda:nccl"), World(size=2)
    silent.settle()
    with pytest.raises(ValueError, match="process group"):
        silent.gather_objects("an error of any kind")
    member.on_message("broken", 0)
    with pytest.raises(PeerLost):
        silent.settle()
    with pytest.raises(PeerLost):
        silent.gather_objects("an error of any kind")
    loud.settle()
    with pytest.raises(ValueError, match="process group"):
        loud.gather_objects("there is no group")


def test_a_worker_that_opens_a_group_is_marked_as_joining(member: Membership) -> None:
    """The wait for a dead worker ends by a time-out, and is no lost operation."""
    assert not member.joins
    with member.opening():
        assert member.joins
    assert not member.joins
    member.shut()
    assert not member.joins
