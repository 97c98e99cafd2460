"""Rollback to in-memory checkpoints when state existed only on a lost rank.

All ranks periodically copy their part of the state, with random states and metric sums, at the same steps. The copies
of a step form a state if the copies of all ranks exist.

Under fabricx's supervisor, the surviving workers roll back at once if each rank has unreplicated state. torchrun ends
all processes of all machines when a process dies; then the copies are in memory that outlives the processes: those of
each rank on its machine and on a buddy machine, in case a machine is lost (Wang et al., "Gemini", SOSP 2023). If a
replica on another machine has the same tensors, the buddy stores only the per-rank state without tensors.
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
from fabricx.checkpoint.rank_state import RankState, from_record
from fabricx.distributed.authentication import TAG_BYTES, sign, tag, verify
from fabricx.distributed.generations import membership
from fabricx.distributed.world import World
from fabricx.errors import CopiesLost
from fabricx.fault_tolerance import memory_checkpoint
from fabricx.fault_tolerance.progress import progress, standing, take_over

if TYPE_CHECKING:
    from fabricx.trainer.trainer import Trainer

Replicas = Callable[[int, int], list[int]]
COST: Final = 0.01  # largest fraction of the time that is spent on copies
LOOK: Final = 20  # fewest steps between two adaptations of the interval
CHUNK: Final = 1 << 26  # bytes of a transfer between machines
_OWN: Final = ("word", "state")  # keys of a copy's per-rank state, which no replica has, and of its position


@final
class MemoryCheckpointer:
    """Copies this rank's part of the state periodically.

    Args:
        world: ranks of the run.
        replicas: `Strategy.replicas_of`.
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
        self.reached = None if member.changes else _Reached(Path(member.folder) / f"reached-{member.slot}")
        self.seconds = 0.0

    def begin(self, trainer: Trainer, members: Sequence[int]) -> None:
        """Start to copy for a generation, with a first copy; collective.

        Args:
            trainer: has the state.
            members: workers of the generation, by rank.
        """
        self._members = members
        self._fits = self._check_room(trainer)
        if not self._fits:
            return
        self._copy(trainer)
        step = trainer.state.step
        self._steps = self._every or 1
        # The first copies are not typical: optimizer states do not exist yet, and memory is being allocated.
        self._next, self._adapt_at = step + self._steps, step + 3
        self._began, self._took = (step, time.monotonic()), self.seconds

    def after_step(self, trainer: Trainer) -> None:
        """Copy if a copy is due; all ranks copy at the same steps.

        Args:
            trainer: has made a weight update.
        """
        step = trainer.state.step
        if self.reached is not None:
            self.reached.note(step)
        if step < self._next or not self._fits:
            return
        began = time.monotonic()
        # A rank that is far ahead would overwrite its older copy before other ranks have made the newer one.
        if not trainer.strategy.traits.synchronous:
            trainer.world.barrier()
        waited = time.monotonic() - began
        self.seconds += waited
        took = waited + self._copy(trainer)
        if self._every is None and step >= self._adapt_at:
            before, since = self._began
            step_s = (time.monotonic() - since - self.seconds + self._took) / max(1, step - before)
            steps = torch.tensor(max(1, math.ceil(took / (COST * max(step_s, 1e-6)))), device=trainer.world.device)
            self._steps = int(trainer.world.broadcast(steps))
            self._adapt_at = step + max(LOOK, self._steps)
            self._began, self._took = (step, time.monotonic()), self.seconds
        self._next = step + self._steps

    def before_change(self, trainer: Trainer) -> None:
        """Copy the state of the newest step before a planned change of members, which interrupts the next step.

        Args:
            trainer: interrupted; all members are alive and do the same.
        """
        if trainer.fault_tolerance.torn or trainer.world.silent:  # the state may differ from that of the newest step
            return
        if self.copies.newest != (progress(trainer), trainer.world.generation):
            with contextlib.suppress(RuntimeError):  # a collective was pending when the connections were closed
                self._copy(trainer, trainer.fault_tolerance.resume_point)

    def keep(self, key: Any) -> None:
        """Protect copies from being overwritten by the next copies.

        Args:
            key: of the copies.
        """
        self.copies.keep(key)
        if self._buddy is not None:
            self._buddy.copies.keep(key)

    def forget(self) -> None:
        """Invalidate all copies; every rank calls it."""
        self.copies.forget()
        if self._buddy is not None:
            self._buddy.copies.forget()

    def _copy(self, trainer: Trainer, point: RankState | None = None) -> float:
        began = time.monotonic()
        if point is None:
            trainer.world.settle()
        point = point or RankState(trainer)
        state = {**_tensors(trainer), "word": pickle.dumps(point.record()), **standing(trainer)}
        if "strategy" in state:
            state["strategy"]["module"].update(point.buffers)
        self.copies.make((progress(trainer), trainer.world.generation), self._members, state)
        if self._buddy is not None:
            self._buddy.exchange(self.copies, {name: state[name] for name in _OWN})
        took = time.monotonic() - began
        self.seconds += took
        return took

    def _check_room(self, trainer: Trainer) -> bool:
        """Return whether each machine has memory for the copies; collective, with the same result on all ranks."""
        need = float(memory_checkpoint.NEWEST * memory_checkpoint.bytes_of(_tensors(trainer)))
        if not any(optimizer.state for optimizer in trainer.optimizers):
            need *= 3  # optimizers will add up to two moments per weight
        if self._buddy is not None and not self._buddy.light:
            need *= 2
        need -= self.copies.room + (self._buddy.copies.room if self._buddy is not None else 0)
        short = _short_of_room(
            trainer.world.gather_objects((trainer.world.node_rank, max(0.0, need), memory_checkpoint.free()))
        )
        if short is not None:
            trainer.print(
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

    _FORM: Final = struct.Struct("<qd")

    def __init__(self, path: Path) -> None:
        with path.open("ab+") as file:
            file.truncate(self._FORM.size)
            self._memory = mmap.mmap(file.fileno(), self._FORM.size)

    def note(self, step: int) -> None:
        self._FORM.pack_into(self._memory, 0, step, time.time())

    def newest(self) -> tuple[int, float]:
        """Return the step and its time in seconds since 1970; zeros without a step."""
        step, at = self._FORM.unpack_from(self._memory, 0)
        return int(step), float(at)


def _tensors(trainer: Trainer) -> dict[str, Any]:
    """Return this rank's part of the state; empty if another rank of its machine has the same."""
    if trainer.strategy.traits.alike and trainer.world.local_rank:
        return {}
    return {"strategy": trainer.strategy.own_state(trainer.module, trainer.optimizers)}


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


@dataclass(frozen=True)
class _Source:
    """A complete state, distributed over machines. A part is the state of a rank at the time of the copies.

    Attributes:
        key: of its copies.
        step: weight updates.
        here: copies on this machine, by part.
        holders: ranks that have verified a copy with tensors, by part.
        words: ranks that have a copy of the per-rank state, by part.
        same: existing parts with the same tensors, by part; itself first.
        nodes: machines, by rank.
    """

    key: Any
    step: int
    here: dict[int, memory_checkpoint.Copy]
    holders: list[list[int]]
    words: list[list[int]]
    same: list[list[int]]
    nodes: list[int]

    def has(self, rank: int, part: int) -> bool:
        """Return whether the machine of a rank has a part."""
        return any(self.nodes[holder] == self.nodes[rank] for holder in self.holders[part])

    def parts(self, world: World) -> Iterator[memory_checkpoint.Copy]:
        """Yield the parts that this rank needs, in order; collective, and every rank must exhaust it.

        These are its part or a replica's on its machine; after a change of the number of ranks, all different parts.
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
    """Broadcast a copy of the rank `holder`, and verify it; collective."""
    empty = torch.empty(0, dtype=torch.uint8)
    description = (replace(copy, memory=empty), len(copy.memory)) if copy is not None else None
    received, length = world.broadcast_object(description, holder)
    room = torch.empty(length, dtype=torch.uint8) if copy is None else copy.memory
    for begin in range(0, length, CHUNK):
        chunk = room[begin : begin + CHUNK]
        chunk.copy_(world.broadcast(chunk.to(world.device), holder))
    complete: memory_checkpoint.Copy = replace(received, memory=room)
    if not complete.whole():
        raise RuntimeError(
            f"an in-memory checkpoint of rank {holder} was corrupted in the transfer between two machines; resume "
            "from a checkpoint on disk, and check the network and the memory of the machines"
        )
    return complete


def roll_back(trainer: Trainer, *, came: bool) -> int:
    """Restore all members from the newest complete in-memory checkpoint; collective.

    Args:
        trainer: its world has the members.
        came: this rank is a replacement or newcomer.

    Returns:
        the number of failures that were recorded at the time of the checkpoint.

    Raises:
        CopiesLost: there is no complete in-memory checkpoint.
    """
    source = _newest(trainer.world, trainer.strategy.replicas_of)
    if source is None:
        raise CopiesLost("no in-memory checkpoint has valid parts of all ranks; resume from a checkpoint on disk")
    return _take(trainer, source, came=came)


def restore_newest(trainer: Trainer) -> bool:
    """Restore in-memory checkpoints of earlier processes, if they are newer than the selected checkpoint; collective.

    Args:
        trainer: before training.

    Returns:
        whether they were restored; the same on all ranks.
    """
    assert trainer.fault_tolerance.memory is not None
    assert trainer.fault_tolerance.memory.reached is not None
    trainer.step_reached, trainer.failed_at = max(
        trainer.world.gather_objects(trainer.fault_tolerance.memory.reached.newest())
    )
    source, path = _newest(trainer.world, trainer.strategy.replicas_of), trainer.overridden.ckpt_path
    if source is None:
        return False
    saved = trainer.world.broadcast_object(
        read_manifest(path)["step"] if path is not None and trainer.world.main_rank else -1
    )
    if source.step < saved:
        return False
    _take(trainer, source, came=True)
    trainer.state.attempt += 1
    trainer.logger_dispatcher.rewind(trainer.state.step)
    return True


def _take(trainer: Trainer, source: _Source, *, came: bool) -> int:
    assert trainer.fault_tolerance.memory is not None
    world, sharded, size = trainer.world, trainer.strategy.traits.sharded, len(source.holders)
    part_index = world.rank if size == world.size else None
    room = tree.like(trainer.strategy.sharded_parameters(), world.device)
    parts = source.parts(world)
    states = (
        [memory_checkpoint.join(parts, room)] if sharded else [memory_checkpoint.join([copy], room) for copy in parts]
    )
    words = {part: copy.rest["word"] for part, copy in source.here.items() if world.rank in source.words[part]}
    words = {part: word for by_part in world.gather_objects(words) for part, word in by_part.items()}
    trainer.strategy.load_own_states(
        [state["strategy"] for state in states], trainer.module, trainer.optimizers, own=part_index is not None
    )
    state = states[0]
    state["ranks"] = [from_record(pickle.loads(words[part])) for part in range(size)]
    take_over(trainer, state, part_index, came=came)
    trainer.fault_tolerance.memory.keep(source.key)
    known: int = state["failures"]
    return known


def _newest(world: World, replicas: Replicas) -> _Source | None:
    """Return the newest complete state, the same on all ranks; the ranks of a machine share the verification."""
    states = memory_checkpoint.read(membership().folder)
    verified = {
        (key, members, int(copy.rest["state"]["step"]), part, "strategy" in copy.rest)
        for (key, members), copies in states.items()
        for part, copy in copies.items()
        if part % world.local_size == world.local_rank and copy.whole()
    }
    by_rank = world.gather_objects((world.node_rank, verified))
    nodes = [node for node, _ in by_rank]
    for key, members, step in sorted({entry[:3] for _, entries in by_rank for entry in entries}, reverse=True):
        size = len(members)
        wanted = [[(key, members, step, part, tensors) for tensors in (True, False)] for part in range(size)]
        holders = [[rank for rank, (_, entries) in enumerate(by_rank) if full in entries] for full, _ in wanted]
        words = [[rank for rank, (_, entries) in enumerate(by_rank) if entries.intersection(both)] for both in wanted]
        same = [[peer for peer in replicas(part, size) if holders[peer]] for part in range(size)]
        if all(words) and all(same):
            return _Source(key, step, states.get((key, members), {}), holders, words, same, nodes)
    return None
