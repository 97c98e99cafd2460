"""Schedules of a pipeline: the order in which a rank computes its chunks of each microbatch; and their simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from fabricx.errors import check_choice

Kind = Literal["forward", "backward", "input_gradient", "weight_gradient"]
SCHEDULES: Final = ("1f1b", "gpipe", "zero_bubble")


class Action(NamedTuple):
    """One computation of a rank.

    Attributes:
        kind: "backward" computes all gradients; "input_gradient" and "weight_gradient" are its two halves.
        chunk: number of the chunk among those of the rank; the chunk of the pipeline is `chunk * stages + rank`.
        microbatch: number of the microbatch.
    """

    kind: Kind
    chunk: int
    microbatch: int


def check_schedule(kind: str, stages: int, virtual: int, microbatches: int) -> None:
    """Check the options of a schedule.

    Args:
        kind: a name of `SCHEDULES`.
        stages: ranks along the pipeline.
        virtual: chunks of each rank.
        microbatches: microbatches of a batch.

    Raises:
        LookupError: there is no such schedule.
        ValueError: a number is less than 1, or they don't fit together.
    """
    check_choice("pipeline", "schedule", kind, SCHEDULES)
    for name, value in (("pipeline", stages), ("virtual", virtual), ("microbatches", microbatches)):
        if value < 1:
            raise ValueError(f"{name}={value}: must be 1 or more")
    if virtual > 1 and kind == "zero_bubble":
        raise ValueError(f"virtual={virtual} with schedule=zero_bubble: use schedule=1f1b, or virtual=1")
    if virtual > 1 and microbatches % stages:
        nearest = (microbatches // stages + 1) * stages
        raise ValueError(
            f"virtual={virtual} needs a number of microbatches that is a multiple of the {stages} stages, and "
            f"microbatches={microbatches}: set microbatches={nearest}, or virtual=1"
        )


def schedule(kind: str, rank: int, stages: int, virtual: int, microbatches: int) -> list[Action]:
    """Return the computations of a rank, in their order.

    All ranks compute the forwards in the same order of (chunk, microbatch), and the backwards, too, so that messages
    between two ranks arrive in the order in which they are used.

    - "gpipe": all forwards, then all backwards (Huang et al., 2019).
    - "1f1b": rank r holds at most `stages - r` microbatches (Narayanan et al., "PipeDream", 2019). With `virtual` > 1
      it is interleaved: the idle time is divided by `virtual` (Narayanan et al., 2021, section 2.2).
    - "zero_bubble": ZB-H1 (Qi et al., 2023): gradients of weights are computed later, where a rank would be idle. Each
      rank holds as many microbatches as rank 0 under "1f1b".

    Args:
        kind: a name of `SCHEDULES`.
        rank: stage of this rank.
        stages: ranks along the pipeline.
        virtual: chunks of each rank.
        microbatches: microbatches of this batch; any number, as the last batch of an epoch may have fewer rows.
    """
    if kind == "zero_bubble":
        return _zero_bubble(rank, stages, microbatches)
    groups = _groups(microbatches, stages) if virtual > 1 else [range(microbatches)]
    order = [(chunk, microbatch) for group in groups for chunk in range(virtual) for microbatch in group]
    back = [(virtual - 1 - chunk, microbatch) for chunk, microbatch in order]
    count = len(order)
    if kind == "gpipe":
        ahead = count
    elif virtual == 1:
        ahead = min(count, stages - rank - 1)
    else:
        ahead = min(count, 2 * (stages - rank - 1) + (virtual - 1) * len(groups[0]))
    forwards = [Action("forward", *entry) for entry in order]
    backwards = [Action("backward", *entry) for entry in back]
    steady = [action for pair in zip(forwards[ahead:], backwards, strict=False) for action in pair]
    return [*forwards[:ahead], *steady, *backwards[count - ahead :]]


def _groups(microbatches: int, stages: int) -> list[range]:
    """Return the groups of microbatches that a rank computes chunk by chunk: of `stages` microbatches or a few more.

    A group with fewer microbatches than stages after others would be a deadlock.
    """
    number = max(1, microbatches // stages)
    ends = [microbatches * (group + 1) // number for group in range(number)]
    sizes = sorted((end - begin for begin, end in zip([0, *ends], ends, strict=False)), reverse=True)
    begins = [sum(sizes[:group]) for group in range(number)]
    return [range(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)]


def _zero_bubble(rank: int, stages: int, microbatches: int) -> list[Action]:
    """Return the actions of ZB-H1: those of 1F1B, with the gradients of weights `rank` microbatches later."""
    actions: list[Action] = []
    for action in schedule("1f1b", rank, stages, 1, microbatches):
        if action.kind == "forward":
            actions.append(action)
            continue
        actions.append(Action("input_gradient", 0, action.microbatch))
        if action.microbatch >= rank:
            actions.append(Action("weight_gradient", 0, action.microbatch - rank))
    return [*actions, *(Action("weight_gradient", 0, n) for n in range(max(0, microbatches - rank), microbatches))]


@dataclass(frozen=True)
class Simulation:
    """Result of a simulated batch.

    Attributes:
        idle: part of the total time in which a rank computes nothing; mean over ranks.
        held: by rank, the largest number of pairs (chunk, microbatch) whose activations are stored at a time.
        time: time of the batch, in units of the arguments of `simulate`.
    """

    idle: float
    held: tuple[int, ...]
    time: float


def simulate(
    kind: str, stages: int, virtual: int, microbatches: int, *, forward: float = 1.0, input_gradient: float = 1.0,
    weight_gradient: float = 1.0, costs: Sequence[float] = (), transfer: float = 0.0,
) -> Simulation:  # fmt: skip
    """Simulate the schedules of all ranks, with sends that don't wait.

    Args:
        kind: a name of `SCHEDULES`.
        stages: ranks along the pipeline.
        virtual: chunks of each rank.
        microbatches: microbatches of a batch.
        forward, input_gradient, weight_gradient: time of a microbatch on a whole rank.
        costs: relative times of the chunks of the pipeline; equal if empty.
        transfer: time of a message between two stages.

    Raises:
        RuntimeError: the ranks wait for each other.
    """
    lists = [schedule(kind, rank, stages, virtual, microbatches) for rank in range(stages)]
    times = (forward, input_gradient, weight_gradient)
    return replay(lists, virtual, times=times, costs=costs, transfer=transfer)


def replay(
    lists: Sequence[Sequence[Action]], virtual: int, *, times: tuple[float, float, float] = (1.0, 1.0, 1.0),
    costs: Sequence[float] = (), transfer: float = 0.0,
) -> Simulation:  # fmt: skip
    """Simulate ranks that compute given actions in their order.

    Args:
        lists: actions by rank, of a schedule or as a run has recorded them.
        virtual: chunks of each rank.
        times: durations of forward, input gradient and weight gradient of a microbatch on a whole rank.
        costs: relative times of the chunks of the pipeline; equal if empty.
        transfer: time of a message between two stages.

    Raises:
        RuntimeError: the ranks wait for each other.
    """
    stages = len(lists)
    chunks = stages * virtual
    weights = [cost * chunks / sum(costs) for cost in costs] or [1.0] * chunks
    duration: dict[Kind, float] = {
        "forward": times[0], "backward": times[1] + times[2], "input_gradient": times[1], "weight_gradient": times[2],
    }  # fmt: skip
    done: dict[tuple[str, int, int], float] = {}
    clock, position, busy = [0.0] * stages, [0] * stages, 0.0
    while any(position[rank] < len(lists[rank]) for rank in range(stages)):
        moved = False
        for rank in range(stages):
            while position[rank] < len(lists[rank]):
                action = lists[rank][position[rank]]
                chunk = action.chunk * stages + rank
                ready = _ready(action, chunk, chunks, done, transfer)
                if ready is None:
                    break
                spent = duration[action.kind] * weights[chunk] / virtual
                busy += spent
                clock[rank] = max(clock[rank], ready) + spent
                done[_direction(action.kind), chunk, action.microbatch] = clock[rank]
                position[rank] += 1
                moved = True
        if not moved:
            raise RuntimeError(f"a schedule with {stages} stages and {virtual} chunks of each is a deadlock")
    return Simulation(1.0 - busy / stages / max(clock), tuple(held(actions) for actions in lists), max(clock))


def held(actions: Sequence[Action]) -> int:
    """Return the largest number of pairs (chunk, microbatch) whose activations a rank stores at a time.

    Args:
        actions: actions of the rank.

    >>> held(schedule("1f1b", 0, 4, 1, 8))
    4
    """
    stored = most = 0
    for action in actions:
        stored += {"forward": 1, "input_gradient": 0}.get(action.kind, -1)
        most = max(most, stored)
    return most


def _direction(kind: Kind) -> str:
    return kind if kind in ("forward", "weight_gradient") else "backward"


def _ready(
    action: Action, chunk: int, chunks: int, done: dict[tuple[str, int, int], float], transfer: float
) -> float | None:  # fmt: skip
    """Return the time at which the inputs of an action are available; None if they are not computed yet."""
    if action.kind == "weight_gradient":
        return done.get(("backward", chunk, action.microbatch))
    if action.kind == "forward":
        needed = [("forward", chunk - 1, transfer)] if chunk else []
    else:
        needed = [("forward", chunk, 0.0)] + ([("backward", chunk + 1, transfer)] if chunk + 1 < chunks else [])
    ready = 0.0
    for direction, other, later in needed:
        at = done.get((direction, other, action.microbatch))
        if at is None:
            return None
        ready = max(ready, at + later)
    return ready
