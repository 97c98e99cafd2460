"""Calls of divided modules that differ between ranks are an error."""

from __future__ import annotations

import pytest

from fabricx.errors import RanksDisagree
from fabricx.model_parallel.experts.call_order import CallOrder


def test_calls_are_counted_from_the_start_of_a_step() -> None:
    order, begun, numbers = CallOrder(["a", "b"]), [], []
    step = order.wrap_step(
        lambda: numbers.append([order.next_call("a"), order.next_call("b")]), lambda: begun.append(1)
    )
    step()
    after = order.next_call("a")  # in a hook, or in a recomputation
    step()
    assert begun == [1, 1]
    assert order.calls == 2
    first, second = numbers
    assert first == second
    assert len({*first, after, order.backward()}) == 4


def test_a_step_that_fails_has_ended() -> None:
    def fails() -> None:
        raise KeyError

    order = CallOrder(["a"])
    with pytest.raises(KeyError):
        order.wrap_step(fails, lambda: None)()
    assert not order.in_step


def test_different_call_orders_of_ranks_are_an_error_that_names_the_calls() -> None:
    order = CallOrder(["layers.0.experts", "layers.1.experts"])
    order.in_step = True
    first, second = order.next_call("layers.0.experts"), order.next_call("layers.1.experts")
    order.check([second, second])
    order.in_step = False
    expected = (
        r"\(rank 0: call 2 in the step, of layers.1.experts; rank 1: begins the backward; "
        r"rank 2: call 3 after the step, of layers.0.experts; rank 3: call 1 in the step, of layers.0.experts\)"
    )
    with pytest.raises(RanksDisagree, match=expected):
        order.check([second, order.backward(), order.next_call("layers.0.experts"), first])
