"""Division of a chain of blocks into chunks of about equal time, and the memory that the stages need."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from fabricx.model_parallel.pipeline.schedule import held, schedule, simulate

if TYPE_CHECKING:
    from fabricx.model_parallel.pipeline.chain import Chain

Cuts = list[tuple[int, int]]
UNEVEN: Final = 1.5  # time of the slowest stage, in parts of the mean, from which a note is printed
STATE: Final = 4  # copies of a weight: itself, its gradient and two moments


def divide(costs: Sequence[float], chunks: int, joined: Mapping[int, str] | None = None) -> Cuts:
    """Divide blocks into consecutive chunks, so that the slowest chunk is as fast as possible.

    Args:
        costs: before the blocks, of each block, after the blocks.
        chunks: number of chunks; each has a block or more.
        joined: boundaries without a cut, with the reason.

    Returns:
        (begin, end) of the blocks of each chunk.

    Raises:
        ValueError: the blocks can't be divided into this number of chunks.

    >>> divide([0, 1, 1, 1, 1, 2], 2)
    [(0, 3), (3, 4)]
    """
    inner, reasons = costs[1:-1], joined or {}
    possible = len(inner) - len([boundary for boundary in reasons if 0 < boundary < len(inner)])
    if possible < chunks:
        why = next(iter(reasons.values()), "")
        raise ValueError(
            f"{len(inner)} blocks can be divided into at most {possible} chunks, and the pipeline needs {chunks}"
            + (f": {why}" if why else "")
            + ". Set fewer stages (pipeline=...), virtual=1, or other blocks (blocks=...)"
        )
    sums = [0.0]
    for cost in inner:
        sums.append(sums[-1] + cost)
    best: dict[int, tuple[float, Cuts]] = {0: (0.0, [])}
    for number in range(1, chunks + 1):
        last = number == chunks
        ends = [len(inner)] if last else [end for end in range(number, len(inner)) if end not in reasons]
        begins, following = list(best), dict[int, tuple[float, Cuts]]()
        for end in ends:
            cut: tuple[float, int] | None = None
            for begin in reversed(begins[: bisect.bisect_left(begins, end)]):
                cost = sums[end] - sums[begin] + costs[0] * (number == 1) + costs[-1] * last
                if cut is not None and cost > cut[0]:
                    break  # with earlier begins, this chunk would be still longer
                slowest = max(best[begin][0], cost)
                if cut is None or slowest <= cut[0]:
                    cut = slowest, begin
            if cut is not None:
                following[end] = cut[0], [*best[cut[1]][1], (cut[1], end)]
        best = following
    return best[len(inner)][1]


class Measured(Protocol):
    """Times, weights and activations of a module: before the blocks, of each block, after the blocks.

    Attributes:
        costs: relative times.
        sizes: bytes of the weights.
        saved: bytes of the activations that a sample stores.
    """

    @property
    def costs(self) -> Sequence[float]: ...
    @property
    def sizes(self) -> Sequence[float]: ...
    @property
    def saved(self) -> Sequence[float]: ...


@dataclass(frozen=True)
class Stage:
    """The blocks that a rank of the pipeline holds and computes, with their time and memory.

    Attributes:
        blocks: numbers of the first and last block of each chunk.
        cost: part of the time of a step.
        parameters: bytes of weights.
        activations: predicted bytes of stored activations.
    """

    blocks: tuple[tuple[int, int], ...]
    cost: float
    parameters: float
    activations: float

    @property
    def memory(self) -> float:
        """Return the predicted bytes of weights, gradients, two moments and stored activations."""
        return STATE * self.parameters + self.activations


def stages_of(
    chain: Measured, cuts: Cuts, stages: int, kind: str, virtual: int, microbatches: int, rows: int
) -> list[Stage]:  # fmt: skip
    """Return the blocks, relative time and predicted memory of each rank of a pipeline.

    Args:
        chain: `Chain` of the module, or a prediction of it.
        cuts: result of `divide`.
        stages: ranks along the pipeline.
        kind: schedule.
        virtual: chunks of each rank.
        microbatches: microbatches of a batch.
        rows: samples of a batch.
    """
    total, last, loads = sum(chain.costs) or 1.0, len(chain.costs) - 1, []
    for rank in range(stages):
        chunks = [cuts[chunk * stages + rank] for chunk in range(virtual)]
        places = {block + 1 for begin, end in chunks for block in range(begin, end)}  # places in the lists of the chain
        places |= ({0} if rank == 0 else set()) | ({last} if rank == stages - 1 else set())
        stored = _held(kind, rank, stages, virtual, microbatches)
        loads.append(
            Stage(
                tuple((begin, end - 1) for begin, end in chunks),
                sum(chain.costs[position] for position in places) / total,
                sum(chain.sizes[position] for position in places),
                sum(chain.saved[position] for position in places) * rows / microbatches * stored / virtual,
            )
        )
    return loads


@functools.lru_cache(4096)
def _held(kind: str, rank: int, stages: int, virtual: int, microbatches: int) -> int:
    return held(schedule(kind, rank, stages, virtual, microbatches))


def describe(
    chain: Chain, cuts: Cuts, stages: int, kind: str, virtual: int, microbatches: int, rows: int
) -> Iterator[str]:  # fmt: skip
    """Yield the lines about a pipeline that the main rank prints.

    Args:
        chain, cuts, stages, kind, virtual, microbatches, rows: see `stages_of`.
    """
    idle = simulate(kind, stages, virtual, microbatches, costs=times_of(chain, cuts)).idle
    name = f"interleaved {kind}" if virtual > 1 else kind
    yield f"pipeline: {stages} stages, {name}, {microbatches} microbatches, predicted idle time {idle:.0%}"
    loads = stages_of(chain, cuts, stages, kind, virtual, microbatches, rows)
    for rank, stage in enumerate(loads):
        blocks = ", ".join(
            chain.blocks[first] if first == last else f"{chain.blocks[first]} to {chain.blocks[last]}"
            for first, last in stage.blocks
        )
        yield (
            f"  stage {rank}: {blocks}; {stage.cost:.0%} of the time, weights {stage.parameters / 2**20:.1f} MiB, "
            f"memory about {stage.memory / 2**20:.1f} MiB"
        )
    slowest = max(range(stages), key=lambda rank: loads[rank].cost)
    if loads[slowest].cost * stages > UNEVEN:
        within = {block for first, last in loads[slowest].blocks for block in range(first + 1, last + 1)}
        why = next((reason for boundary, reason in chain.joined.items() if boundary in within), "")
        yield (
            f"  note: stage {slowest} has {loads[slowest].cost:.0%} of the time{f', because {why}' * bool(why)}; if "
            "other modules are called one after another, name them by blocks=CLASS or a list of names"
        )
    if microbatches > 1:
        yield from (f"  note: {note}" for note in chain.notes)


def times_of(chain: Measured, cuts: Cuts) -> list[float]:
    """Return the time of each chunk; equal times if one is 0.

    Args:
        chain: see `stages_of`.
        cuts: result of `divide`.
    """
    times = [sum(chain.costs[begin + 1 : end + 1]) for begin, end in cuts]
    times[0] += chain.costs[0]
    times[-1] += chain.costs[-1]
    return times if all(times) else [1.0] * len(times)
