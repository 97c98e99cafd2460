"""Leases of a worker at its own pace: for gradients and for rounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fabricx.parameter_server.wire.messages import LeaseReply, Reply, Settings
from fabricx.parameter_server.worker.asynchronous import Asynchronous
from fabricx.parameter_server.worker.dealer import LeaseDealer
from fabricx.parameter_server.worker.worker_optimizers import WorkerOptimizers


class Requests:
    """A server that grants a fixed number of leases."""

    def __init__(self, leases: int) -> None:
        self.leases = leases
        self.calls: list[Any] = []

    def ask(self, section: int, *, wait: bool) -> LeaseReply:
        self.calls.append(("ask", wait))
        self.leases -= 1
        return LeaseReply(None, over=True) if self.leases < 0 else LeaseReply(self.leases)

    def open(self, *arguments: Any) -> None:
        self.calls.append(("open", *arguments))

    def close_section(self, section: int) -> None:
        self.calls.append(("close", section))

    def take_turn(self) -> Reply:
        self.calls.append("turn")
        return Reply(version=9)


class Rounds(Asynchronous):
    """Has trained leases with gradients that were not pushed."""

    trained = 0

    @property
    def unpushed(self) -> int:
        return self.trained

    def push_unpushed(self) -> None:
        self.trained = 0


def dealer(leases: int = 0, workers: int = 2, **settings: Any) -> tuple[LeaseDealer, Rounds, Requests]:
    protocol, requests = Rounds(Settings(workers, **settings)), Requests(leases)
    protocol.world = SimpleNamespace(size=workers)  # type: ignore[assignment]
    protocol._exchange = SimpleNamespace(leases=requests)  # type: ignore[assignment]
    return LeaseDealer(protocol), protocol, requests


def test_dealer_and_protocol_have_the_same_lease() -> None:
    leases, protocol, _ = dealer()
    leases.lease = LeaseReply(3)
    assert protocol.leases.lease is leases.lease


@pytest.mark.parametrize("wait", [True, False])
def test_a_round_is_pushed_before_the_wait_for_the_end_of_the_section(wait: bool) -> None:
    leases, protocol, requests = dealer(leases=0)
    protocol.trained = 2
    assert not leases.begins_update
    assert leases.ask(wait=wait).over
    assert protocol.trained == (0 if wait else 2)
    assert requests.calls == ([("ask", False), ("ask", True)] if wait else [("ask", False)])


def test_a_round_continues_while_leases_are_available() -> None:
    leases, protocol, requests = dealer(leases=1)
    protocol.trained = 2
    assert leases.ask(wait=True).lease == 0
    assert (protocol.trained, requests.calls) == (2, [("ask", False)])


@pytest.mark.parametrize(
    ("ordered", "aggregate", "workers", "turns"),
    [(True, False, 2, 1), (False, False, 2, 0), (True, True, 2, 0), (True, False, 1, 0)],
)
def test_a_turn_is_requested_if_the_update_number_depends_on_other_workers(
    ordered: bool, aggregate: bool, workers: int, turns: int
) -> None:
    leases, _, requests = dealer(workers=workers, aggregate=aggregate)
    assert leases.take_turn(ordered=ordered) == (9 if turns else 0)
    assert requests.calls.count("turn") == turns


def test_a_section_begins_at_the_version_of_the_worker() -> None:
    leases, protocol, requests = dealer()
    leases.workers, protocol.numbers.version, protocol.has_whole_weights = (0, 3), 5, True
    leases.open(12, (1, 4, 40))
    assert leases.within_section  # until the ranks meet
    leases.let_all_meet()
    assert requests.calls == [("open", 0, 12, 5, (0, 3), (1, 4, 40)), ("close", 0), ("close", 1)]
    assert not protocol.has_whole_weights


def test_a_worker_that_joins_takes_the_position_of_another() -> None:
    (first, protocol, _), (second, other, _) = dealer(), dealer()
    optimizers = [torch.optim.SGD([torch.zeros(1)], lr=0.1) for _ in range(2)]
    for worker_protocol, optimizer in zip((protocol, other), optimizers, strict=True):
        worker_protocol.optimizers = WorkerOptimizers([optimizer], [])
    first.section, first.planned, protocol.settings.workers = 2, 3, 4
    first.passes(5)
    optimizers[0].param_groups[0]["lr"] = 0.05  # a schedule has stepped
    second.take_position(first.position())
    assert (second.section, second.planned, other.settings.workers, second.scheduled) == (2, 3, 4, 5)
    assert optimizers[1].param_groups[0]["lr"] == 0.05
    earlier = other.numbers.earlier_groups(4)  # of an update of a dead worker
    assert earlier is not None
    assert earlier[0][0]["lr"] == 0.1
