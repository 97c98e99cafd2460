from __future__ import annotations

from dataclasses import dataclass

import pytest

from fabricx.distributed.store.state import StoreState, Wait, pack, unpack


@dataclass(eq=False)
class Caller:
    wait: Wait | None = None
    at_end: tuple[str, bytes] | None = None
    soon: bool = False

    def detect_loss_soon(self) -> None:
        self.soon = True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def request(state: StoreState, caller: Caller, *parts: str) -> list[bytes] | None:
    answer = state.request(caller, pack(*(part.encode() for part in parts)))
    return None if answer is None else unpack(answer)


def answers(state: StoreState) -> list[tuple[Caller, list[bytes]]]:
    return [(caller, unpack(data)) for caller, data in state.answers(8)]  # type: ignore[misc]


def test_requests_are_answered_when_their_keys_exist_or_at_their_deadline():
    clock = Clock()
    state, callers = StoreState(clock), [Caller() for _ in range(4)]
    every, either, late, number = callers
    assert request(state, every, "wait", "60", "1", "a", "b") is None
    assert request(state, either, "wait", "60", "", "a", "b") is None
    assert request(state, late, "wait", "5", "1", "c") is None
    assert request(state, number, "reach", "60", "count", "2") is None
    assert state.next_deadline() == 5.0

    state.set("a", b"1")
    request(state, Caller(), "add", "count", "1")
    assert answers(state) == [(either, [b"a", b"1"])]
    clock.now = 5.0
    state.set("b", b"2")
    request(state, Caller(), "add", "count", "1")
    assert answers(state) == [(late, []), (every, [b"a", b"1", b"b", b"2"]), (number, [b"count", b"2"])]
    assert all(caller.wait is None for caller in callers)
    assert answers(state) == []
    assert state.requests == 6


def test_a_request_triggered_by_an_answer_is_answered_in_the_same_pass():
    state, first, second = StoreState(), Caller(), Caller()
    request(state, first, "wait", "60", "1", "a")
    request(state, second, "wait", "60", "1", "b")
    state.set("a", b"")
    passed = state.answers(2)
    assert next(passed) == (first, pack(b"a", b""))
    request(state, first, "set", "b", "")  # the process sends its next request at once
    assert list(passed) == [(second, pack(b"b", b""))]


def test_a_closed_connection_drops_its_requests_and_extends_its_sequence():
    state, ended, waiting = StoreState(), Caller(), Caller()
    request(state, ended, "push_at_end", "gone", "3", "1")
    assert ended.soon
    request(state, ended, "wait", "60", "1", "a")
    request(state, waiting, "wait", "60", "1", "gone/0")
    state.ended(ended)
    state.set("a", b"")
    assert answers(state) == [(waiting, [b"gone/0", b"3"])]


def test_deadlines_of_answered_requests_are_dropped():
    state, caller = StoreState(), Caller()
    for number in range(1000):
        request(state, caller, "wait", "60", "1", str(number))
        state.set(str(number), b"")
        assert len(answers(state)) == 1
    assert len(state._deadlines) < 100


@pytest.mark.parametrize("message", [("nothing",), ("wait", "nan", "1", "a"), ("reach", "1", "a"), ("add", "a", "x")])
def test_malformed_requests_raise_an_error(message: tuple[str, ...]):
    with pytest.raises((AttributeError, ValueError)):
        request(StoreState(), Caller(), *message)
