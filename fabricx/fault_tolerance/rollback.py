"""Rollback to in-memory checkpoints when state existed only on a lost rank.

All ranks periodically copy their part of the state, with random states and metric sums, at the same steps. The copies
of a step form a state if the copies of all ranks exist.

Under fabricx's supervisor, the surviving workers roll back at once if each rank has unreplicated state. torchrun ends
all processes of all machines when a process dies; then the copies are in memory that outlives the processes: those of
each rank on its machine and on a buddy machine, in case a machine is lost (Wang et al., "Gemini", SOSP 2023). If a
replica on another machine has the same tensors, the buddy stores only the per-rank state without tensors.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

import torch

from fabricx.checkpoint import read_manifest, tree
from fabricx.core.module_state.packed_attributes import unpacked
from fabricx.core.strategy_parts import KeepsLocalState
from fabricx.distributed.membership.generations import Generation, membership
from fabricx.distributed.world import World
from fabricx.errors import CopiesLost
from fabricx.fault_tolerance import memory_checkpoint
from fabricx.fault_tolerance.common_state import load_common_state
from fabricx.fault_tolerance.memory_checkpointer import CHUNK, layout_of
from fabricx.session.callback_states import with_shards
from fabricx.session.rank_state import from_record

if TYPE_CHECKING:
    from fabricx.core.strategy import Strategy, Traits
    from fabricx.fault_tolerance.records import RankRecords
    from fabricx.session.session import Session


@dataclass(frozen=True)
class _Source:
    """A complete state, distributed over machines. A part is the state of a rank at the time of the copies.

    Attributes:
        key: key of its copies.
        step: weight updates.
        here: copies on this machine, by part.
        holders: ranks that have verified a copy with tensors, by part.
        records: ranks that have a copy of the per-rank state, by part.
        same: existing parts with the same tensors, by part; itself first.
        nodes: machines, by rank.
    """

    key: Any
    step: int
    here: dict[int, memory_checkpoint.Copy]
    holders: list[list[int]]
    records: list[list[int]]
    same: list[list[int]]
    nodes: list[int]

    def has(self, rank: int, part: int) -> bool:
        """Return whether the machine of a rank has a part.

        Args:
            rank: any rank.
            part: number of the part.
        """
        return any(self.nodes[holder] == self.nodes[rank] for holder in self.holders[part])

    def parts(self, world: World, traits: Traits) -> Iterator[memory_checkpoint.Copy]:
        """Yield the parts that this rank needs, in order; collective, and every rank must exhaust it.

        These are its part or a replica's on its machine; after a change of the number of ranks, all different parts
        of the same part of the model.

        Args:
            world: all ranks.
            traits: of the strategy.
        """
        if len(self.holders) == world.size:
            wanted = [{max(same, key=lambda part: self.has(rank, part))} for rank, same in enumerate(self.same)]
        else:
            model = [traits.model_part(rank) for rank in range(max(world.size, len(self.same)))]
            wanted = [
                {min(same) for part, same in enumerate(self.same) if model[part] == model[rank]}
                for rank in range(world.size)
            ]
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


@final
class Rollback:
    """Restores all members of a generation from the newest complete in-memory checkpoint.

    Args:
        session: this rank's session.
        ft: fault tolerance of the session.
        survivor: this rank was a member before; False for a replacement.
    """

    def __init__(self, session: Session, ft: RankRecords, *, survivor: bool) -> None:
        self._session, self._ft, self._survivor = session, ft, survivor
        self.incomplete: dict[str, bool] = {}  # as in `MemberStates`: all ranks repeat all hooks since the copies
        self._unchanged = survivor  # no generation was tried since the interrupted batch

    def prepare(self, generation: Generation) -> None:
        """Copy the present state, if the interruption was planned and no worker has died.

        Args:
            generation: generation that this rank will join.
        """
        assert self._ft.memory is not None
        if self._unchanged and generation.whole:
            self._ft.memory.before_change(self._session, torn=self._ft.torn)
        self._unchanged = False

    def load(self, generation: Generation) -> int:
        """Restore the checkpoint; collective.

        Args:
            generation: generation that this rank has joined.

        Returns:
            number of failures that the checkpoint includes.

        Raises:
            CopiesLost: there is no complete in-memory checkpoint.
        """
        source = _newest(self._session.world, self._session.strategy)
        if source is None:
            raise CopiesLost("no in-memory checkpoint has valid parts of all ranks; resume from a checkpoint on disk")
        return _take(self._session, self._ft, source, newcomer=not self._survivor)

    def record(self) -> None:
        """Do nothing: `MemoryCheckpointer.begin` makes the first copy of the generation."""


def restore_newest(session: Session, ft: RankRecords) -> bool:
    """Restore in-memory checkpoints of earlier processes, if they are newer than the selected checkpoint; collective.

    Args:
        session: this rank's session, before training.
        ft: fault tolerance of the session, with in-memory checkpoints.

    Returns:
        whether they were restored; the same on all ranks.
    """
    assert ft.memory is not None
    assert ft.memory.reached is not None
    session.failures.step_reached, session.failures.newest_at = max(
        session.world.gather_objects(ft.memory.reached.newest())
    )
    source, path = _newest(session.world, session.strategy), session.checkpoints.ckpt_path
    if source is None:
        return False
    saved = session.world.broadcast_object(
        read_manifest(path)["step"] if path is not None and session.world.main_rank else -1
    )
    if source.step < saved:
        return False
    _take(session, ft, source, newcomer=True)
    session.state.attempt += 1
    session.print(f"continues from the in-memory checkpoints of step {source.step}")
    session.metrics.loggers.rewind(session.state.step)
    return True


def former_layout(world: World) -> dict[str, Any]:
    """Return how earlier processes of the run divided the model; {} without in-memory checkpoints of them. Collective.

    Args:
        world: all ranks.
    """
    folder = membership().folder
    copies = (
        [copy for by_part in memory_checkpoint.read(folder).values() for copy in by_part.values()] if folder else []
    )
    newest = max(copies, key=lambda copy: copy.key, default=None)
    layouts = [entry for entry in world.gather_objects(newest and (newest.key, newest.rest["layout"][1])) if entry]
    return max(layouts, key=lambda entry: entry[0])[1] if layouts else {}


def _take(session: Session, ft: RankRecords, source: _Source, *, newcomer: bool) -> int:
    assert ft.memory is not None
    world, traits, size = session.world, session.strategy.traits, len(source.holders)
    part_index = world.rank if size == world.size else None
    room = tree.like(session.sharding.sharded_parameters(), world.device, with_shards(session.callbacks))
    parts = source.parts(world, traits)
    states = (
        [memory_checkpoint.join(parts, room)]
        if traits.sharded
        else [memory_checkpoint.join([copy], room) for copy in parts]
    )
    on_rank = {part: copy.rest["record"] for part, copy in source.here.items() if world.rank in source.records[part]}
    records = {part: record for by_part in world.gather_objects(on_rank) for part, record in by_part.items()}
    strategy, local_states = session.strategy, [state["strategy"] for state in states]
    if isinstance(strategy, KeepsLocalState):
        strategy.load_local_states(local_states, session.module, session.optimizers, own=part_index is not None)
    else:
        strategy.load_state_dict(local_states[0], session.module, session.optimizers)
    state = states[0]
    saved = [record for part, record in sorted(records.items()) if part_index is not None or traits.represents(part)]
    state["ranks"] = [from_record(pickle.loads(record)) for record in saved]
    ft.torn = False
    ft.load_attributes(unpacked(state["ranks"][min(world.rank, len(saved) - 1)]["attributes"]))
    load_common_state(session, state, part_index, newcomer=newcomer, behind=newcomer, goes_back=True)
    ft.memory.keep(source.key)
    known: int = state["failures"]
    return known


def _newest(world: World, strategy: Strategy) -> _Source | None:
    """Return the newest complete state that the ranks can load, the same on all ranks.

    The ranks of a machine share the verification.
    """
    states, traits, layout = memory_checkpoint.read(membership().folder), strategy.traits, layout_of(strategy)
    verified = {
        (key, members, int(copy.rest["state"]["step"]), part, "strategy" in copy.rest)
        for (key, members), copies in states.items()
        for part, copy in copies.items()
        if part % world.local_size == world.local_rank and copy.rest["layout"] == layout
        if (len(members) == world.size or traits.resizable) and copy.whole()
    }
    by_rank = world.gather_objects((world.node_rank, verified))
    nodes = [node for node, _ in by_rank]
    for key, members, step in sorted({entry[:3] for _, entries in by_rank for entry in entries}, reverse=True):
        size = len(members)
        wanted = [[(key, members, step, part, tensors) for tensors in (True, False)] for part in range(size)]
        holders = [[rank for rank, (_, entries) in enumerate(by_rank) if full in entries] for full, _ in wanted]
        records = [[rank for rank, (_, entries) in enumerate(by_rank) if entries.intersection(both)] for both in wanted]
        same = [[peer for peer in traits.replicas_of(part, size) if holders[peer]] for part in range(size)]
        if all(records) and all(same):
            return _Source(key, step, states.get((key, members), {}), holders, records, same, nodes)
    return None
