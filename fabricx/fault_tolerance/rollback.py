"""Rollback to in-memory checkpoints when state existed only on a lost rank.

Each rank copies its part, with its random numbers and sums, every so many steps; all at the same ones. What makes the
copies of one moment a state is that those of all ranks are there.

Where fabricx starts the workers, those that are left go back to them at once, if each holds something that no other
has. torchrun ends all processes of all machines when one dies; there the copies are in memory that outlives those, of
each rank on its own machine and on another one, its buddy, should a machine be lost (Wang et al., "Gemini", SOSP 2023).
Where a replica on another machine has the same tensors, the buddy keeps but what is the rank's own beside them.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import pickle
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import torch

from fabricx.checkpoint import read_manifest, tree
from fabricx.checkpoint.rank_state import RankState, of_word
from fabricx.distributed.authentication import TAG_BYTES, sign, tag, verify
from fabricx.distributed.generations import membership
from fabricx.distributed.world import World
from fabricx.fault_tolerance import memory_checkpoint
from fabricx.fault_tolerance.progress import progress, standing, take_over

if TYPE_CHECKING:
    from fabricx.trainer.trainer import Trainer

Replicas = Callable[[int, int], list[int]]
COST: Final = 0.01  # the part of the time that copies may take
LOOK: Final = 20  # steps after which that is reckoned again, at least
CHUNK: Final = 1 << 26  # bytes that go between machines at once
_OWN: Final = ("word", "state")  # of a copy, what no replica has, and how far that is


@final
class MemoryCheckpointer:
    """Copies what this rank holds, when it is time to.

    Args:
        world: whose part.
        replicas: which ranks, of how many, hold the same tensors as one of them.
        every: weight updates between two copies; None for so many that copies take a hundredth of the time.

    Attributes:
        seconds: how long all copies took.
    """

    def __init__(self, world: World, replicas: Replicas, every: int | None = None) -> None:
        own = membership()
        self.copies = memory_checkpoint.Copies(own.folder, own.worker, own.slot)
        self._buddy = _buddy(world, replicas)
        self._members: Sequence[int] = ()
        self._every = every
        self._steps = every or 1
        self._next = self._look_at = 0  # steps
        self._began = (0, 0.0)  # step and time from which it is reckoned
        self._took = 0.0  # seconds of copies by then
        self._fits = True  # into memory
        self.reached = None if own.changes else _Reached(Path(own.folder) / f"reached-{own.slot}")
        self.seconds = 0.0

    def begin(self, t: Trainer, members: Sequence[int]) -> None:
        """Copy now; these are the members from now on."""
        self._members = members
        self._fits = self._look_for_room(t)
        if not self._fits:
            return
        self._copy(t)
        step = t.state.step
        self._steps = self._every or 1
        # Until optimizers have stepped, and both places have room for that, none says how long one takes.
        self._next, self._look_at = step + self._steps, step + 3
        self._began, self._took = (step, time.monotonic()), self.seconds

    def after_step(self, t: Trainer) -> None:
        """Copy if it is due; all ranks do at the same steps."""
        step = t.state.step
        if self.reached is not None:
            self.reached.note(step)
        if step < self._next or not self._fits:
            return
        began = time.monotonic()
        if not t.strategy.traits.synchronous:  # else one that is far ahead would overwrite what others haven't made yet
            t.world.barrier()
        waited = time.monotonic() - began
        self.seconds += waited
        took = waited + self._copy(t)
        if self._every is None and step >= self._look_at:
            before, since = self._began
            each = (time.monotonic() - since - self.seconds + self._took) / max(1, step - before)
            steps = torch.tensor(max(1, math.ceil(took / (COST * max(each, 1e-6)))), device=t.world.device)
            self._steps = int(t.world.broadcast(steps))
            self._look_at = step + max(LOOK, self._steps)
            self._began, self._took = (step, time.monotonic()), self.seconds
        self._next = step + self._steps

    def before_change(self, t: Trainer) -> None:
        """Copy what the newest step has left, in the middle of the next; all members are there, and can do the same."""
        if t.torn or t.world.silent:  # what is there may not be what that step has left
            return
        if self.copies.newest != (progress(t), t.world.generation):
            with contextlib.suppress(RuntimeError):  # of a collective that was under way when the links were shut
                self._copy(t, t.rank_state)

    def keep(self, key: Any) -> None:
        """Let the next copies not take the places of these."""
        self.copies.keep(key)
        if self._buddy is not None:
            self._buddy.copies.keep(key)

    def forget(self) -> None:
        """Let nobody go back to these copies; every rank calls it."""
        self.copies.forget()
        if self._buddy is not None:
            self._buddy.copies.forget()

    def _copy(self, t: Trainer, point: RankState | None = None) -> float:
        began = time.monotonic()
        if point is None:
            t.world.settle()
        point = point or RankState(t)
        state = {**_tensors(t), "word": pickle.dumps(point.word()), **standing(t)}
        if "strategy" in state:
            state["strategy"]["module"].update(point.buffers)
        self.copies.make((progress(t), t.world.generation), self._members, state)
        if self._buddy is not None:
            self._buddy.exchange(self.copies, {name: state[name] for name in _OWN})
        took = time.monotonic() - began
        self.seconds += took
        return took

    def _look_for_room(self, t: Trainer) -> bool:
        """Return whether each machine has memory for the copies; all ranks come to the same."""
        need = float(memory_checkpoint.NEWEST * memory_checkpoint.bytes_of(_tensors(t)))
        if not any(optimizer.state for optimizer in t.optimizers):
            need *= 3  # of each weight two more numbers will be remembered
        if self._buddy is not None and not self._buddy.light:
            need *= 2
        need -= self.copies.room + (self._buddy.copies.room if self._buddy is not None else 0)
        short = _short_of_room(t.world.gather_objects((t.world.node_rank, max(0.0, need), memory_checkpoint.free())))
        if short is not None:
            t.print(f"{short}: none are made, and after a death the run goes on from the newest snapshot")
        return short is None


def _short_of_room(told: Sequence[tuple[int, float, float]]) -> str | None:
    """Return which machine has no room for copies, if any.

    Args:
        told: by rank: its machine, how many bytes its copies take, and how many that machine has left.

    >>> _short_of_room([(0, 2.0**30, 3.0 * 2**30), (0, 2.0**30, 3.0 * 2**30)])
    >>> _short_of_room([(0, 2.0**31, 3.0 * 2**30), (0, 2.0**31, 3.0 * 2**30), (1, 0.0, 2.0**30)])
    'copies in memory take 4.0 GiB of machine 0, which has 3.0 left'
    """
    for node in sorted({node for node, *_ in told}):
        needed = sum(one for other, one, _ in told if other == node)
        left = min(one for other, _, one in told if other == node)
        if needed > left:
            gib = 2.0**30
            return f"copies in memory take {needed / gib:.1f} GiB of machine {node}, which has {left / gib:.1f} left"
    return None


@final
class _Reached:
    """Which step a rank has done last, and when, where a process that comes after it finds that."""

    _FORM: Final = struct.Struct("<qd")

    def __init__(self, path: Path) -> None:
        with path.open("ab+") as file:
            file.truncate(self._FORM.size)
            self._memory = mmap.mmap(file.fileno(), self._FORM.size)

    def note(self, step: int) -> None:
        self._FORM.pack_into(self._memory, 0, step, time.time())

    def newest(self) -> tuple[int, float]:
        """Return the step, and seconds since 1970; zeros if there was none."""
        step, at = self._FORM.unpack_from(self._memory, 0)
        return int(step), float(at)


def _tensors(t: Trainer) -> dict[str, Any]:
    """Return what this rank holds; nothing if another one of its machine holds the same."""
    if t.strategy.traits.alike and t.world.local_rank:
        return {}
    return {"strategy": t.strategy.own_state(t.module, t.optimizers)}


@final
class _Buddy:
    """Gives this rank's copies to a rank of the next machine, and keeps those of one of the machine before.

    Attributes:
        light: tensors needn't be given, since a replica on another machine has them.
    """

    def __init__(self, world: World, *, light: bool) -> None:
        self._world, self.light = world, light
        self.copies = memory_checkpoint.Copies(membership().folder, -1, world.local_size + world.local_rank)

    def exchange(self, own: memory_checkpoint.Copies, rest: dict[str, Any]) -> None:
        """Let the newest copy be there twice, or what of it no replica has; every rank calls it."""
        world, by = self._world, self._world.local_size
        header, mine = own.without_tensors(rest) if self.light else own.content()
        context, giver = ["copy", world.generation], (world.rank - by) % world.size
        digest = tag(world.secret, [*context, world.rank, "pickle"], memory_checkpoint.pickled_part(header, mine))
        signed = sign(world.secret, [*context, world.rank], header + digest)
        received = torch.empty(len(signed), dtype=torch.uint8)
        world.shift(torch.frombuffer(bytearray(signed), dtype=torch.uint8), received, by)
        head = verify(world.secret, [*context, giver], bytes(received.tolist()))
        header, digest = head[:-TAG_BYTES], head[-TAG_BYTES:]
        with self.copies.taking(header) as room:
            for begin in range(0, max(len(mine), len(room)), CHUNK):
                world.shift(mine[begin : begin + CHUNK], room[begin : begin + CHUNK], by)
            verify(world.secret, [*context, giver, "pickle"], digest + memory_checkpoint.pickled_part(header, room))


def _buddy(world: World, replicas: Replicas) -> _Buddy | None:
    """Return this rank's buddy if there are several machines, with as many ranks each, in order; every rank asks."""
    if world.size == world.local_size:
        return None
    places = world.gather_objects((world.node_rank, world.local_rank, world.local_size))
    nodes, count = [node for node, *_ in places], world.local_size
    in_order = all((place, size) == (rank % count, count) for rank, (_, place, size) in enumerate(places))
    if not in_order or len(set(nodes)) * count != world.size:
        return None
    elsewhere = [any(nodes[one] != nodes[rank] for one in replicas(rank, world.size)) for rank in range(world.size)]
    return _Buddy(world, light=all(elsewhere))


@dataclass(frozen=True)
class _Source:
    """A state of which all parts are somewhere.

    Attributes:
        key: of its copies.
        step: of the run.
        here: the copies that this machine has, by the rank whose part each is.
        holders: by part, the ranks that have found it to be what it was when it was made.
        words: by part, the ranks that have what is its rank's own beside tensors.
        same: by part, those that hold its tensors, itself first, of which somebody has one.
        nodes: of all ranks.
    """

    key: Any
    step: int
    here: dict[int, memory_checkpoint.Copy]
    holders: list[list[int]]
    words: list[list[int]]
    same: list[list[int]]
    nodes: list[int]

    def has(self, rank: int, part: int) -> bool:
        """Return whether a rank's machine has a part."""
        return any(self.nodes[holder] == self.nodes[rank] for holder in self.holders[part])

    def parts(self, world: World) -> Iterator[memory_checkpoint.Copy]:
        """Yield the parts that this rank needs, in order; every rank takes all of them.

        Its own, or a replica's that its machine has; all of them if there are other ranks than there were.
        """
        if len(self.holders) == world.size:
            wanted = [{max(same, key=lambda part: self.has(rank, part))} for rank, same in enumerate(self.same)]
        else:
            wanted = [{min(same) for same in self.same}] * world.size
        for part, holders in enumerate(self.holders):
            copy = self.here.get(part)
            if any(part in wants and not self.has(rank, part) for rank, wants in enumerate(wanted)):
                copy = _send(world, copy if world.rank == holders[0] else None, holders[0])
            if part in wanted[world.rank]:
                assert copy is not None
                yield copy


def _send(world: World, copy: memory_checkpoint.Copy | None, holder: int) -> memory_checkpoint.Copy:
    """Return one rank's copy on all."""
    size = torch.empty(0, dtype=torch.uint8)
    told = (replace(copy, memory=size), len(copy.memory)) if copy is not None else None
    came, length = world.broadcast_object(told, holder)
    room = torch.empty(length, dtype=torch.uint8) if copy is None else copy.memory
    for begin in range(0, length, CHUNK):
        chunk = room[begin : begin + CHUNK]
        chunk.copy_(world.broadcast(chunk.to(world.device), holder))
    found: memory_checkpoint.Copy = replace(came, memory=room)
    if not found.whole():
        raise RuntimeError("a copy has changed on its way between two machines")
    return found


def go_back(t: Trainer, *, came: bool) -> int:
    """Bring all members to the newest state of which all parts are there; returns how many failures were known then.

    Args:
        t: the trainer; its world has the members.
        came: this rank wasn't there before.

    Raises:
        RuntimeError: there is no such state.
    """
    source = _newest(t.world, t.strategy.replicas_of)
    if source is None:
        raise RuntimeError("there is no state in memory of which each rank's part is whole")
    return _take(t, source, came=came)


def come_back(t: Trainer) -> bool:
    """Go on from copies that processes before these have left, if those are newer than the checkpoint that was chosen.

    Returns:
        whether there were such; the same on all ranks.
    """
    assert t.memory_checkpointer is not None
    assert t.memory_checkpointer.reached is not None
    t.step_reached, t.failed_at = max(t.world.gather_objects(t.memory_checkpointer.reached.newest()))
    source, path = _newest(t.world, t.strategy.replicas_of), t.overridden.ckpt_path
    if source is None:
        return False
    saved = t.world.broadcast_object(read_manifest(path)["step"] if path is not None and t.world.main_rank else -1)
    if source.step < saved:
        return False
    _take(t, source, came=True)
    t.state.attempt += 1
    t.logger_dispatcher.rewind(t.state.step)
    return True


def _take(t: Trainer, source: _Source, *, came: bool) -> int:
    assert t.memory_checkpointer is not None
    world, sharded, size = t.world, t.strategy.traits.sharded, len(source.holders)
    place = world.rank if size == world.size else None
    room = tree.like(t.strategy.sharded_parameters(), world.device)
    parts = source.parts(world)
    states = (
        [memory_checkpoint.join(parts, room)] if sharded else [memory_checkpoint.join([copy], room) for copy in parts]
    )
    words = {part: copy.rest["word"] for part, copy in source.here.items() if world.rank in source.words[part]}
    words = {part: word for told in world.gather_objects(words) for part, word in told.items()}
    own = place is not None
    t.strategy.load_own_states([state["strategy"] for state in states], t.module, t.optimizers, own=own)
    state = states[0]
    state["ranks"] = [of_word(pickle.loads(words[part])) for part in range(size)]
    take_over(t, state, place, came=came)
    t.memory_checkpointer.keep(source.key)
    known: int = state["failures"]
    return known


def _newest(world: World, replicas: Replicas) -> _Source | None:
    """Return the newest state that is whole; all ranks choose the same. The ranks of a machine share the looking."""
    states = memory_checkpoint.read(membership().folder)
    mine = {
        (key, members, int(copy.rest["state"]["step"]), part, "strategy" in copy.rest)
        for (key, members), copies in states.items()
        for part, copy in copies.items()
        if part % world.local_size == world.local_rank and copy.whole()
    }
    told = world.gather_objects((world.node_rank, mine))
    nodes = [node for node, _ in told]
    for key, members, step in sorted({one[:3] for _, found in told for one in found}, reverse=True):
        size = len(members)
        entries = [[(key, members, step, part, tensors) for tensors in (True, False)] for part in range(size)]
        holders = [[rank for rank, (_, found) in enumerate(told) if one in found] for one, _ in entries]
        words = [[rank for rank, (_, found) in enumerate(told) if found.intersection(both)] for both in entries]
        same = [[one for one in replicas(part, size) if holders[one]] for part in range(size)]
        if all(words) and all(same):
            return _Source(key, step, states.get((key, members), {}), holders, words, same, nodes)
    return None
