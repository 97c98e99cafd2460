"""Copies this rank's part of the state to memory at regular steps, and to the memory of a buddy machine."""

from __future__ import annotations

import contextlib
import math
import mmap
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import torch

from fabricx import by_value
from fabricx.core.strategy_parts import KeepsLocalState, ModelParallel, as_part
from fabricx.distributed.membership.generations import membership
from fabricx.distributed.messages.authentication import TAG_BYTES, sign, tag, verify
from fabricx.distributed.world import World
from fabricx.fault_tolerance import memory_checkpoint
from fabricx.fault_tolerance.common_state import common_state
from fabricx.fault_tolerance.hook_entries import hook_entries
from fabricx.fault_tolerance.progress import progress
from fabricx.fault_tolerance.rank_record import allocate
from fabricx.session.rank_state import RankState

if TYPE_CHECKING:
    from fabricx.core.strategy import Strategy
    from fabricx.session.session import Session

Replicas = Callable[[int, int], list[int]]
COST: Final = 0.01  # largest fraction of the time that is spent on copies
CHUNK: Final = 1 << 26  # bytes of a transfer between machines
LOOK: Final = 20  # fewest steps between two adaptations of the interval
_REACHED: Final = struct.Struct("<qd")  # step of a rank, and its time in seconds since 1970
# Keys of a copy's per-rank state, which no replica has, of its position, and of the division of the model.
_OWN: Final = ("record", "state", "layout")


@final
class MemoryCheckpointer:
    """Copies this rank's part of the state periodically.

    Args:
        world: ranks of the run.
        replicas: `Traits.replicas_of`.
        every: weight updates between two copies; None adapts the interval, so that copies take 1 % of the time.

    Attributes:
        copies: files of this rank's copies.
        reached: step and time that outlive the process; None under fabricx's supervisor.
        seconds: total time spent on copies.
    """

    def __init__(self, world: World, replicas: Replicas, every: int | None = None) -> None:
        member = membership()
        self.copies = memory_checkpoint.Copies(member.folder, member.worker, member.slot)
        self._buddy = _buddy(world, replicas)
        self._members: Sequence[int] = ()
        self._every = every
        self._steps = every or 1
        self._next = self._adapt_at = 0  # steps of the next copy, and of the next adaptation of the interval
        self._began = (0, 0.0)  # step and time at which the measurement began
        self._took = 0.0  # seconds of copies at that time
        self._fits = True  # whether the copies fit into memory
        self._complete = False  # whether all ranks certainly have the newest copy
        self.reached = None if member.changes else _Reached(Path(member.folder) / f"reached-{member.slot}")
        self.seconds = 0.0

    def begin(self, session: Session, members: Sequence[int]) -> None:
        """Start to copy for a generation, with a first copy; collective.

        Args:
            session: has the state.
            members: workers of the generation, by rank.
        """
        self._members = members
        self._fits = self._check_room(session)
        if not self._fits:
            return
        self._copy(session)
        self._complete = True  # after a change of members, all ranks meet again before they train
        step = session.state.step
        self._steps = self._every or 1
        # The first copies are not typical: optimizer states do not exist yet, and memory is being allocated.
        self._next, self._adapt_at = step + self._steps, step + 3
        self._began, self._took = (step, time.monotonic()), self.seconds

    def after_step(self, session: Session) -> None:
        """Copy if a copy is due; all ranks copy at the same steps.

        Args:
            session: has made a weight update.
        """
        step = session.state.step
        if self.reached is not None:
            self.reached.note(step)
        self._complete |= session.strategy.traits.synchronous  # no rank ends a step before all have begun it
        if step < self._next or not self._fits:
            return
        began = time.monotonic()
        # A rank that is far ahead would overwrite its older copy before other ranks have made the newer one.
        if not session.strategy.traits.synchronous:
            session.world.barrier()
        waited = time.monotonic() - began
        self.seconds += waited
        took = waited + self._copy(session)
        if self._every is None and step >= self._adapt_at:
            before, since = self._began
            step_s = (time.monotonic() - since - self.seconds + self._took) / max(1, step - before)
            steps = torch.tensor(max(1, math.ceil(took / (COST * max(step_s, 1e-6)))), device=session.world.device)
            self._steps = int(session.world.broadcast(steps))
            self._adapt_at = step + max(LOOK, self._steps)
            self._began, self._took = (step, time.monotonic()), self.seconds
        self._next = step + self._steps

    def before_change(self, session: Session, *, torn: bool) -> None:
        """Copy the state of the newest step before a planned change of members, which interrupts the next step.

        Args:
            session: interrupted; all members are alive and do the same.
            torn: see `Recovery`.
        """
        if torn or session.world.silent:  # the state may differ from that of the newest step
            return
        if self.copies.newest != (progress(session), session.world.generation):
            if not self._complete:  # other ranks may have the older copy only, and fail to copy now
                self.copies.protect_older()
            with contextlib.suppress(RuntimeError):  # a collective was pending when the connections were closed
                self._copy(session, session.fault_tolerance.resume_point)

    def keep(self, key: Any) -> None:
        """Protect copies from being overwritten by the next copies.

        Args:
            key: key of the copies.
        """
        self.copies.keep(key)
        if self._buddy is not None:
            self._buddy.copies.keep(key)

    def forget(self) -> None:
        """Invalidate all copies; every rank calls it."""
        self.copies.forget()
        if self._buddy is not None:
            self._buddy.copies.forget()

    def _copy(self, session: Session, point: RankState | None = None) -> float:
        began = time.monotonic()
        if point is None:
            session.world.settle()
        point = point or session.rank_state()
        state = {**_tensors(session), "record": by_value.dumps_for_peer(point.record()), **common_state(session)}
        state["hook_entries"] = hook_entries(session)
        state["layout"] = layout_of(session.strategy)
        if "strategy" in state:
            state["strategy"]["module"].update(point.buffers)
        self.copies.make((progress(session), session.world.generation), self._members, state)
        self._complete = False
        if self._buddy is not None:
            self._buddy.exchange(self.copies, {name: state[name] for name in _OWN})
        took = time.monotonic() - began
        self.seconds += took
        return took

    def _check_room(self, session: Session) -> bool:
        """Return whether each machine has memory for the copies; collective, with the same result on all ranks."""
        need = float(memory_checkpoint.NEWEST * memory_checkpoint.bytes_of(_tensors(session)))
        if not any(optimizer.state for optimizer in session.optimizers):
            need *= 3  # optimizers will add up to two moments per weight
        if self._buddy is not None and not self._buddy.light:
            need *= 2
        need -= self.copies.room + (self._buddy.copies.room if self._buddy is not None else 0)
        short = _short_of_room(
            session.world.gather_objects((session.world.node_rank, max(0.0, need), memory_checkpoint.free()))
        )
        if short is not None:
            session.print(
                f"{short}: in-memory checkpoints are off, and after a death the run resumes from the newest checkpoint "
                "on disk; free memory, or use more machines"
            )
        return short is None


def _short_of_room(needs: Sequence[tuple[int, float, float]]) -> str | None:
    """Return a sentence about a machine without memory for the copies; None if all machines have enough.

    Args:
        needs: (machine, bytes of the copies, free bytes of the machine) by rank.

    >>> _short_of_room([(0, 2.0**30, 3.0 * 2**30), (0, 2.0**30, 3.0 * 2**30)])
    >>> _short_of_room([(0, 2.0**31, 3.0 * 2**30), (0, 2.0**31, 3.0 * 2**30), (1, 0.0, 2.0**30)])
    'in-memory checkpoints need 4.0 GiB of machine 0, which has 3.0 GiB free'
    """
    for node in sorted({node for node, *_ in needs}):
        needed = sum(need for other, need, _ in needs if other == node)
        free = min(available for other, _, available in needs if other == node)
        if needed > free:
            gib = 2.0**30
            return (
                f"in-memory checkpoints need {needed / gib:.1f} GiB of machine {node}, which has {free / gib:.1f} GiB "
                "free"
            )
    return None


@final
class _Reached:
    """Newest step of a rank and its time, in memory that outlives the process."""

    def __init__(self, path: Path) -> None:
        with path.open("ab+") as file:
            allocate(file, _REACHED.size)
            self._memory = mmap.mmap(file.fileno(), _REACHED.size)

    def note(self, step: int) -> None:
        _REACHED.pack_into(self._memory, 0, step, time.time())

    def newest(self) -> tuple[int, float]:
        """Return the step and its time in seconds since 1970; zeros without a step."""
        step, at = _REACHED.unpack_from(self._memory, 0)
        return int(step), float(at)


def newest_step(folder: Path) -> int:
    """Return the newest step of the ranks that have in-memory checkpoints in a folder; -1 without.

    Args:
        folder: folder of the files.
    """
    records = [path.read_bytes() for path in folder.glob("reached-*")]
    return max((int(_REACHED.unpack(record)[0]) for record in records if len(record) == _REACHED.size), default=-1)


def layout_of(strategy: Strategy) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return how a strategy divides the model, as plain data that is equal on all ranks.

    Args:
        strategy: set up.
    """
    return strategy.traits.model_axes, as_part(strategy, ModelParallel).layout


def _tensors(session: Session) -> dict[str, Any]:
    """Return this rank's part of the state; empty if another rank of its machine has the same."""
    if session.strategy.traits.replicated and session.world.local_rank:
        return {}
    strategy = session.strategy
    local = strategy.local_state_dict if isinstance(strategy, KeepsLocalState) else strategy.state_dict
    return {"strategy": local(session.module, session.optimizers)}


@final
class _Buddy:
    """Sends this rank's copies to a rank of the next machine, and stores the copies of a rank of the previous machine.

    Attributes:
        light: omit tensors, because a replica on another machine has them.
    """

    def __init__(self, world: World, *, light: bool) -> None:
        self._world, self.light = world, light
        self.copies = memory_checkpoint.Copies(membership().folder, -1, world.local_size + world.local_rank)

    def exchange(self, copies: memory_checkpoint.Copies, rest: dict[str, Any]) -> None:
        """Send the newest copy, or only its per-rank state (`light`), and receive that of another rank; collective."""
        world, by = self._world, self._world.local_size
        header, content = copies.without_tensors(rest) if self.light else copies.content()
        context, giver = ["copy", world.generation], (world.rank - by) % world.size
        digest = tag(world.secret, [*context, world.rank, "pickle"], memory_checkpoint.pickled_part(header, content))
        signed = sign(world.secret, [*context, world.rank], header + digest)
        received = torch.empty(len(signed), dtype=torch.uint8)
        world.shift(torch.frombuffer(bytearray(signed), dtype=torch.uint8), received, by)
        head = verify(world.secret, [*context, giver], bytes(received.tolist()))
        header, digest = head[:-TAG_BYTES], head[-TAG_BYTES:]
        with self.copies.taking(header) as room:
            for begin in range(0, max(len(content), len(room)), CHUNK):
                world.shift(content[begin : begin + CHUNK], room[begin : begin + CHUNK], by)
            verify(world.secret, [*context, giver, "pickle"], digest + memory_checkpoint.pickled_part(header, room))


def _buddy(world: World, replicas: Replicas) -> _Buddy | None:
    """Return this rank's buddy; None without several machines with equally many ranks in order. Collective."""
    if world.size == world.local_size:
        return None
    positions = world.gather_objects((world.node_rank, world.local_rank, world.local_size))
    nodes, count = [node for node, *_ in positions], world.local_size
    in_order = all((local, size) == (rank % count, count) for rank, (_, local, size) in enumerate(positions))
    if not in_order or len(set(nodes)) * count != world.size:
        return None
    elsewhere = [any(nodes[peer] != nodes[rank] for peer in replicas(rank, world.size)) for rank in range(world.size)]
    return _Buddy(world, light=all(elsewhere))
