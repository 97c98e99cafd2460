"""No gradient exceeds the staleness bound, and no worker waits indefinitely for its turn."""

from __future__ import annotations

from fabricx.parameter_server.server.update_order import UpdateOrder


def ordered(bases: dict[int, int], bound: int = 1) -> UpdateOrder:
    order = UpdateOrder(ordered=True, bound=bound)
    for worker, version in bases.items():
        order.record_pull(worker, version)
    return order


def test_the_bound_limits_the_number_of_computing_workers() -> None:
    order = ordered({0: 0, 1: 0})
    assert not order.may_begin(2)
    assert order.may_begin(1)  # it asks again after a restart of its server


def test_an_early_update_waits_for_the_gradient_that_it_would_make_too_old() -> None:
    order = ordered({0: 0, 1: 1})
    assert not order.may_push(1, 1)
    assert order.may_push(0, 1)
    assert order.record_push(0) == 0
    assert order.may_push(1, 2)


def test_a_turn_belongs_to_a_worker_until_its_gradient_arrives() -> None:
    order = ordered({0: 0, 1: 0})
    order.take_turn(1)
    assert order.may_take_turn(1, 0)
    assert not order.may_take_turn(0, 0)
    order.record_push(1)
    assert order.may_take_turn(0, 1)


def test_the_turn_of_a_worker_that_has_left_is_free() -> None:
    order = ordered({0: 0, 1: 0})
    order.take_turn(1)
    order.remove(1)
    assert order.may_take_turn(0, 0)


def test_a_disconnected_worker_has_no_turn_and_does_not_wait() -> None:
    order = ordered({0: 1, 1: 1})  # two workers compute, so that a third gradient would make another gradient too old
    order.remove(2)
    assert not order.has_place(2)
    assert order.may_push(2, 1)


def test_without_a_bound_no_worker_waits() -> None:
    order = UpdateOrder()
    assert order.has_place(0)
    for worker in range(9):
        assert order.may_begin(worker)
        order.record_pull(worker, 0)
    assert order.may_push(8, 100)
