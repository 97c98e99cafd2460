"""Detects ranks that wait for each other without end, from the collectives and transfers that each rank has begun."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, final

from fabricx.distributed.activity.collective_trace import GroupTrace, Route
from fabricx.distributed.activity.heartbeat import Diagnosis
from fabricx.fault_tolerance.hang_report import explain

AFTER_S: Final = 10.0  # without progress, after which the ranks are asked for the first time
AGAIN_S: Final = 4.0  # until they are asked for the second time
IDLE: Final = 0.005  # share of this time in which the main thread of a waiting rank uses the CPU, at most


@final
class DeadlockDetector:
    """Decides when to ask the ranks for their collectives, and whether two successive answers prove a deadlock."""

    def __init__(self) -> None:
        self._waited_s, self._next_s = 0.0, AFTER_S
        self._before: tuple[float, Mapping[int, Diagnosis]] | None = None  # answers of blocked ranks, and their time

    def due(self, waited_s: float) -> bool:
        """Return whether to ask the ranks now.

        Args:
            waited_s: seconds for which all ranks have waited without progress.
        """
        if waited_s < self._waited_s:  # a rank has made progress
            self._next_s, self._before = AFTER_S, None
        self._waited_s = waited_s
        return waited_s >= self._next_s

    def found(self, diagnoses: Mapping[int, Diagnosis | None]) -> bool:
        """Return whether the ranks are blocked for ever, as these and the preceding answers show.

        Args:
            diagnoses: answers by rank, after `due`; None for a rank that doesn't answer.
        """
        answers = {rank: answer for rank, answer in diagnoses.items() if answer is not None}
        before, self._before = self._before, None
        if len(answers) < len(diagnoses) or not blocked(answers):
            self._next_s = 2 * self._waited_s
            return False
        if before is not None and _unchanged(before[1], answers, IDLE * (self._waited_s - before[0])):
            return True
        self._before, self._next_s = (self._waited_s, answers), self._waited_s + AGAIN_S
        return False


def explanation(diagnoses: Mapping[int, Diagnosis | None]) -> str:
    """Return the error message of a deadlock.

    Args:
        diagnoses: answers by rank.
    """
    places = "".join(f"\n  rank {rank} is at {answer.where}" for rank, answer in sorted(diagnoses.items()) if answer)
    return (
        f"the ranks wait for each other in different collectives, without end: {explain(diagnoses)}{places}\n"
        "All ranks have to run the same collectives in the same order: call them outside of conditions that hold on "
        "some ranks only, such as `if self.trainer.is_global_zero`. If weights are divided over ranks, as by fsdp, "
        "tensor and pipeline, all ranks have to take part in each forward, and in each read of weights in a hook: call "
        "the module on all ranks, also in validation_step; read weights on all ranks, and then write them on one"
    )


def blocked(answers: Mapping[int, Diagnosis]) -> bool:
    """Return whether no rank will ever leave the collective or the transfer for which it waits.

    A collective can't end if a rank of its group has not begun it, or has begun another collective instead of it; a
    transfer can't end if the other rank has not begun it. If this holds for what each rank waits for, no rank will ever
    begin something else.

    Args:
        answers: diagnoses by rank.
    """
    of = {(rank, trace.name): trace for rank, answer in answers.items() for trace in answer.groups}
    return len(answers) > 1 and all(
        any(trace.pending for trace in answer.groups)
        and all(_cannot_end(trace, number, of) for trace in answer.groups for number in trace.pending)
        if answer.transfers.awaited is None
        else _never_begun(answer.transfers.awaited, answers)
        for answer in answers.values()
    )


def _cannot_end(trace: GroupTrace, number: int, of: Mapping[tuple[int, str], GroupTrace]) -> bool:
    """Return whether a rank of a group has not begun a collective of it, or has begun another with the same number."""
    for rank in trace.ranks:
        other = of.get((rank, trace.name))
        if other is None or number > max(other.begun) or other.begun.get(number) not in (None, trace.begun.get(number)):
            return True
    return False


def _never_begun(awaited: tuple[str, Route, int], answers: Mapping[int, Diagnosis]) -> bool:
    """Return whether the other rank of a transfer has not begun it."""
    kind, route, number = awaited
    other, opposite = (route.to, "receive") if kind == "send" else (route.source, "send")
    return other in answers and answers[other].transfers.begun.get((opposite, route), 0) < number


def _unchanged(before: Mapping[int, Diagnosis], after: Mapping[int, Diagnosis], used_s: float) -> bool:
    """Return whether ranks have begun and ended no communication, and used at most some seconds of the CPU."""
    return before.keys() == after.keys() and all(
        (before[rank].groups, before[rank].transfers) == (answer.groups, answer.transfers)
        and answer.cpu_s is not None
        and answer.cpu_s - (before[rank].cpu_s or 0.0) <= used_s
        for rank, answer in after.items()
    )
