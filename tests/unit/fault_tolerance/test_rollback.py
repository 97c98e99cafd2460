"""Parts of a state are restored from memory of the same or another machine after machines are lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fabricx.distributed.world import World
from fabricx.fault_tolerance import memory_checkpoint, memory_checkpointer, rollback
from fabricx.fault_tolerance.memory_checkpointer import MemoryCheckpointer, layout_of
from fabricx.strategies import FSDP


class Meeting:
    """Exchange of objects between ranks that are threads."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.sent: list[Any] = [None] * size


@dataclass(frozen=True)
class Threads(World):
    meeting: Any = None

    def gather_objects(self, obj: Any) -> list[Any]:
        self.meeting.sent[self.rank] = obj
        self.meeting.barrier.wait()
        gathered = list(self.meeting.sent)
        self.meeting.barrier.wait()
        return gathered

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        return self.gather_objects(obj)[src]

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        return tensor.copy_(self.gather_objects(tensor.clone())[src])

    def shift(self, sent: Tensor, received: Tensor, by: int) -> None:
        received.copy_(self.gather_objects(sent.clone())[self.rank - by])


def together(root: Path, nodes: list[str], work: Callable[[Threads], Any], monkeypatch: Any) -> list[Any]:
    """Run `work` on ranks of machines with equally many ranks; return the results by rank."""
    meeting, per_machine = Meeting(len(nodes)), nodes.count(nodes[0])
    thread = threading.local()
    for module in (rollback, memory_checkpointer):
        monkeypatch.setattr(module, "membership", lambda: thread.membership)

    def run(rank: int) -> Any:
        node = nodes[rank]
        folder = root / node
        folder.mkdir(exist_ok=True)
        for slot in (rank % per_machine, per_machine + rank % per_machine):
            for index in range(memory_checkpoint.NEWEST):
                memory_checkpoint.path_of(str(folder), slot, index).touch()
        thread.membership = SimpleNamespace(folder=str(folder), worker=rank, slot=rank % per_machine, changes=False)
        index = Threads(rank, len(nodes), rank % per_machine, per_machine, ord(node), meeting=meeting)
        return work(index)

    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(run, range(len(nodes))))


LAYOUT = layout_of(FSDP())


def in_groups(groups: int) -> FSDP:
    return FSDP(replicas=groups)


def state_of(step: int, shard: int) -> dict[str, Any]:
    weights = torch.full((1000,), 10.0 * step + shard)
    return {"strategy": weights, "record": f"{step} of {shard}", "state": {"step": step}, "layout": LAYOUT}


def copy_steps(*steps: int, groups: int = 1) -> Callable[[Threads], None]:
    def work(world: Threads) -> None:
        memory_checkpointer = MemoryCheckpointer(world, in_groups(groups).traits.replicas_of)
        for step in steps:
            state = state_of(step, world.rank % (world.size // groups))
            memory_checkpointer.copies.make((step,), range(world.size), state)
            assert memory_checkpointer._buddy is not None
            memory_checkpointer._buddy.exchange(
                memory_checkpointer.copies,
                {"record": f"{step} of rank {world.rank}", "state": state["state"], "layout": LAYOUT},
            )

    return work


def restored(world: Threads, groups: int = 1) -> tuple[int, list[float]] | None:
    """Return the step and the parts that this rank would restore."""
    source = rollback._newest(world, in_groups(groups))
    if source is None:
        return None
    assert all(source.records)
    return source.step, [
        float(copy.tensor("strategy").unique()) for copy in source.parts(world, in_groups(groups).traits)
    ]


@pytest.mark.parametrize("chunk", [1 << 26, 999])
def test_the_part_of_a_lost_machine_is_restored_from_another_machine(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(rollback, "CHUNK", chunk)
    monkeypatch.setattr(memory_checkpointer, "CHUNK", chunk)
    together(tmp_path, ["a", "a", "b", "b", "c", "c"], copy_steps(3, 4, 5), monkeypatch)
    same = together(tmp_path, ["a", "a", "b", "b", "c", "c"], restored, monkeypatch)
    assert same == [(5, [50.0 + rank]) for rank in range(6)]
    # b is lost; d joins, and torchrun renumbers the machines
    assert together(tmp_path, ["d", "d", "c", "c", "a", "a"], restored, monkeypatch) == same
    # Without d, four ranks have all six parts to divide.
    fewer = together(tmp_path, ["c", "c", "a", "a"], restored, monkeypatch)
    assert fewer == [(5, [50.0, 51.0, 52.0, 53.0, 54.0, 55.0])] * 4
    # A machine and its buddy are lost: some parts have no copy.
    assert together(tmp_path, ["d", "d", "e", "e", "a", "a"], restored, monkeypatch) == [None] * 6


def test_a_corrupt_part_is_restored_from_the_other_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together(tmp_path, ["a", "b"], copy_steps(1, 2), monkeypatch)
    for path in (tmp_path / "a").glob("copy-0-*"):
        content = bytearray(path.read_bytes())
        content[memory_checkpoint.ALIGN + 100] ^= 1
        path.write_bytes(content)
    assert together(tmp_path, ["a", "b"], restored, monkeypatch) == [(2, [20.0]), (2, [21.0])]
    for path in (tmp_path / "b").glob("copy-1-*"):  # and the second copy is incomplete
        path.write_bytes(bytes(len(path.read_bytes())))
    assert together(tmp_path, ["a", "b"], restored, monkeypatch) == [None, None]


def test_an_incomplete_buddy_copy_is_not_used_after_the_machine_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together(tmp_path, ["a", "b"], copy_steps(1, 2), monkeypatch)

    def die_while_copying(world: Threads) -> None:
        memory_checkpointer = MemoryCheckpointer(world, in_groups(1).traits.replicas_of)
        memory_checkpointer.keep((2,))
        memory_checkpointer.copies.make((3,), range(2), state_of(3, 0))

    together(tmp_path, ["a", "b"], die_while_copying, monkeypatch)
    assert together(tmp_path, ["a", "b"], restored, monkeypatch) == [(3, [30.0]), (3, [30.0])]
    assert together(tmp_path, ["a", "c"], restored, monkeypatch) == [(2, [20.0]), (2, [21.0])]


def test_replicated_tensors_are_restored_from_a_replica_and_rank_state_from_the_buddy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(world: Threads) -> tuple[int, list[float]] | None:
        return restored(world, groups=2)

    together(tmp_path, ["a", "a", "b", "b"], copy_steps(1, 2, groups=2), monkeypatch)
    sizes = {path.name[5]: path.stat().st_size for path in (tmp_path / "a").glob("copy-*-1")}
    assert max(sizes["2"], sizes["3"]) < 1000 < 4000 < min(sizes["0"], sizes["1"])
    same = [(2, [20.0]), (2, [21.0])] * 2
    assert together(tmp_path, ["a", "a", "b", "b"], look, monkeypatch) == same
    assert together(tmp_path, ["a", "a", "c", "c"], look, monkeypatch) == same  # b is lost; a has its tensors
    assert together(tmp_path, ["b", "b"], look, monkeypatch) == [(2, [20.0, 21.0])] * 2  # without c
    assert together(tmp_path, ["c", "c", "d", "d"], look, monkeypatch) == [None] * 4


def test_copies_of_a_different_sharding_are_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    together(tmp_path, ["a", "b"], copy_steps(1, 2), monkeypatch)
    monkeypatch.setattr(rollback, "layout_of", lambda strategy: (LAYOUT[0], {"cuts": [[0, 1], [1, 3]]}))
    assert together(tmp_path, ["a", "b"], restored, monkeypatch) == [None, None]
