"""Deadlocks: ranks in different collectives that can never complete."""

from __future__ import annotations

import pytest

from fabricx.distributed.activity.collective_trace import GroupTrace, Route, TransferTrace
from fabricx.distributed.activity.heartbeat import Diagnosis
from fabricx.distributed.activity.message_counts import MessageCounts
from fabricx.fault_tolerance.deadlock import AFTER_S, AGAIN_S, DeadlockDetector, blocked, explanation

ALL = (0, 1)


def group(begun: dict[int, str], *pending: int, ranks: tuple[int, ...] = ALL, name: str = "0") -> GroupTrace:
    return GroupTrace(ranks, name, begun, pending)


GATHERS = group({1: "barrier", 2: "all_gather"}, 2)
REDUCES = group({1: "barrier", 2: "all_reduce"}, 2)
BEHIND = group({1: "barrier"}, 1)
TENSOR = group({5: "all_reduce"}, 5, name="tensor")


@pytest.mark.parametrize(
    ("traces", "is_blocked"),
    [
        ({0: [GATHERS], 1: [REDUCES]}, True),
        ({0: [GATHERS], 1: [GATHERS]}, False),  # a slow network
        ({0: [GATHERS], 1: []}, False),  # rank 1 computes, or waits for something else
        ({0: [GATHERS], 1: [BEHIND]}, False),  # the barrier may complete: rank 0 has finished it
        ({0: [TENSOR], 1: [GATHERS, group({4: "all_reduce"}, name="tensor")]}, True),  # groups wait for each other
        ({0: [TENSOR], 1: [GATHERS]}, True),  # rank 1 has not used the group yet
        ({0: [TENSOR], 1: [GATHERS, TENSOR]}, False),  # the tensor group continues
        ({0: [GATHERS, group({3: "broadcast"}, name="1")], 1: [group({2: "all_gather"}), TENSOR]}, False),
        ({0: [group({1: "all_reduce"}, 1, ranks=(0,))]}, False),
        (
            {
                0: [group({3: "all_reduce"}, 3, name="a")], 1: [group({3: "all_reduce"}, 3, name="a")],
                2: [group({1: "barrier"}, 1, ranks=(2, 3), name="b")],
                3: [group({0: "barrier"}, ranks=(2, 3), name="b"), TENSOR],
            },
            False,
        ),  # ranks 0 and 1 continue, and may start the collectives that the other ranks wait for
    ],
)  # fmt: skip
def test_only_ranks_whose_collective_cannot_complete_are_blocked(
    traces: dict[int, list[GroupTrace]], is_blocked: bool
) -> None:
    answers = {rank: Diagnosis("", "", "", "", tuple(groups)) for rank, groups in traces.items()}
    assert blocked(answers) is is_blocked


def answer(trace: GroupTrace, cpu_s: float | None = 1.0) -> Diagnosis:
    return Diagnosis(
        "train.py:5 in validation_step: self(x)", f"{trace.begun[max(trace.begun)]} #2", "", "", (trace,), cpu_s=cpu_s
    )


FORWARD, BACKWARD = Route(0, 1, "forward", 0), Route(1, 0, "backward", 0)


def moves(awaited: tuple[str, Route, int] | None, **begun: int) -> Diagnosis:
    routes = {"forward": FORWARD, "backward": BACKWARD}
    counts = {(kind, routes[name]): number for text, number in begun.items() for kind, name in [text.split("_")]}
    return Diagnosis("", "", "", "", transfers=TransferTrace(counts, awaited))


@pytest.mark.parametrize(
    ("first", "second", "is_blocked"),
    [
        # Stage 0 waits for a gradient, and stage 1 for an activation that stage 0 has not sent.
        (
            moves(("receive", BACKWARD, 1), send_forward=2, receive_backward=1),
            moves(("receive", FORWARD, 3), receive_forward=3),
            True,
        ),
        # The activation is on its way.
        (
            moves(("receive", BACKWARD, 1), send_forward=3, receive_backward=1),
            moves(("receive", FORWARD, 3), receive_forward=3),
            False,
        ),
        # Stage 1 computes the gradient.
        (moves(("receive", BACKWARD, 1), send_forward=2, receive_backward=1), moves(None, receive_forward=2), False),
        # Stage 0 waits until stage 1 receives, which has begun a collective.
        (moves(("send", FORWARD, 1), send_forward=1), Diagnosis("", "", "", "", (REDUCES,)), True),
        (moves(("send", FORWARD, 1), send_forward=1), moves(("receive", FORWARD, 1), receive_forward=1), False),
    ],
)
def test_a_transfer_that_both_ranks_have_started_can_complete(
    first: Diagnosis, second: Diagnosis, is_blocked: bool
) -> None:
    assert blocked({0: first, 1: second}) is is_blocked


@pytest.mark.parametrize(
    ("sent", "awaited", "is_blocked"),
    [
        ((3, 2), (3, 0), False),  # rank 1 computes
        ((3, 3), (3, 0), False),  # the message is on its way
        ((3, 3), (3, 3), False),
    ],
)
def test_an_exchange_completes_when_each_rank_has_sent_its_message(
    sent: tuple[int, int], awaited: tuple[int, int], is_blocked: bool
) -> None:
    answers = {rank: Diagnosis("", "", "", "", (messages(sent[rank], awaited[rank]),)) for rank in ALL}
    assert blocked(answers) is is_blocked


def messages(sent: int, awaited: int) -> GroupTrace:
    counts = MessageCounts("gradients", ALL, "exchange")
    counts.sent, counts.awaited = sent, awaited
    counts.close()
    return counts.trace()


def test_messages_and_collectives_block_each_other() -> None:
    first = Diagnosis("", "", "", "", (GATHERS, messages(2, 0)))
    second = Diagnosis("", "", "", "", (group({1: "barrier"}), messages(3, 3)))
    assert blocked({0: first, 1: second})  # rank 1 will gather when it has received a message, which rank 0 never sends
    assert not blocked({0: Diagnosis("", "", "", "", (GATHERS, messages(3, 0))), 1: second})


def test_a_deadlock_needs_two_equal_answers_and_progress_resets_it() -> None:
    detector = DeadlockDetector()
    answers: dict[int, Diagnosis | None] = {0: answer(GATHERS), 1: answer(REDUCES)}
    assert not detector.due(AFTER_S - 1)
    assert detector.due(AFTER_S)
    assert not detector.found(answers)
    assert not detector.due(AFTER_S + 1)
    assert detector.due(AFTER_S + AGAIN_S)
    assert detector.found(answers)
    assert not detector.due(1.0)  # a rank continued
    assert detector.due(AFTER_S)
    assert not detector.found(answers)


@pytest.mark.parametrize(
    "second",
    [
        {0: answer(GATHERS), 1: answer(REDUCES, cpu_s=1.5)},  # rank 1 computes
        {0: answer(GATHERS, cpu_s=None), 1: answer(REDUCES)},  # not reported by the system
        {0: answer(group({1: "barrier", 2: "all_gather", 3: "all_gather"}, 3)), 1: answer(REDUCES)},
        {0: answer(GATHERS), 1: None},
        {0: answer(GATHERS), 1: answer(GATHERS)},
    ],
)
def test_a_rank_with_progress_between_two_answers_is_not_blocked(second: dict[int, Diagnosis | None]) -> None:
    detector = DeadlockDetector()
    detector.due(AFTER_S)
    assert not detector.found({0: answer(GATHERS), 1: answer(REDUCES)})
    assert detector.due(AFTER_S + AGAIN_S)
    assert not detector.found(second)


def test_queries_without_a_deadlock_become_less_frequent() -> None:
    detector = DeadlockDetector()
    asked = []
    for waited_s in range(100):
        if detector.due(float(waited_s)):
            asked.append(waited_s)
            detector.found({0: answer(GATHERS), 1: None})
    assert asked == [10, 20, 40, 80]


def test_the_message_has_the_collective_and_the_line_of_each_rank() -> None:
    text = explanation({0: answer(GATHERS), 1: answer(REDUCES)})
    assert "rank 0 waits in all_gather #2, rank 1 waits in all_reduce #2" in text
    assert text.count("train.py:5 in validation_step") == 2
    assert "call the module on all ranks" in text
