"""For each lease, each server uses a single gradient."""

from __future__ import annotations

import pytest

from fabricx.parameter_server.server.lease_ledger import LeaseLedger
from fabricx.parameter_server.server.leases import Leases
from fabricx.parameter_server.wire.messages import Counts


def opened(*, grants: bool, leases: int = 4) -> tuple[LeaseLedger, Counts]:
    counts = Counts()
    ledger = LeaseLedger(2, grants=grants, counts=counts)
    ledger.open(Leases(0, leases, ledger.workers))
    return ledger, counts


def test_the_server_that_grants_leases_accepts_the_gradient_of_the_holder() -> None:
    ledger, _ = opened(grants=True)
    lease = ledger.grant(0).lease
    assert lease is not None
    assert not ledger.accepts(1, [lease], in_order=True)
    assert ledger.accepts(0, [lease], in_order=True)


def test_a_gradient_out_of_order_returns_its_lease() -> None:
    ledger, _ = opened(grants=True)
    lease = ledger.grant(0).lease
    assert lease is not None
    assert not ledger.accepts(0, [lease], in_order=False)
    granted = ledger.grant(1)
    assert (granted.lease, granted.again) == (lease, True)


def test_other_servers_accept_the_first_gradient_of_a_lease() -> None:
    ledger, _ = opened(grants=False)
    assert ledger.accepts(0, [2, 3], in_order=True)
    assert not ledger.accepts(1, [1, 3], in_order=True)
    assert ledger.accepts(1, [1], in_order=True)


@pytest.mark.parametrize("grants", [True, False])
def test_leases_are_counted_when_granted_and_used(grants: bool) -> None:
    ledger, counts = opened(grants=grants)
    assert ledger.is_leased
    ledger.use([0, 1])
    ledger.use([1])
    assert (counts.dealt, counts.used, counts.repeated) == (4, 2, 1)
    ledger.close()
    assert counts.dealt == 0  # no lease was granted


def test_workers_in_lockstep_send_gradients_without_a_lease() -> None:
    counts = Counts()
    ledger = LeaseLedger(2, grants=True, counts=counts)
    ledger.use([0])
    ledger.done([0])
    assert not ledger.is_leased
    assert (counts.used, counts.repeated) == (0, 0)
