"""Check that all ranks gather and reduce the submodules of a sharded module in the same order."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Final, Protocol, final

import torch
from torch import Tensor

from fabricx.distributed.membership.generations import membership
from fabricx.distributed.shared_memory.group import SharedMemoryGroup, detects_lost_ranks
from fabricx.distributed.world import OPERATION, World
from fabricx.errors import RanksDisagree

SLOTS: Final = 64  # number of positions that are kept; ranks are never that many collectives apart
_SLOT: Final = 256  # bytes of a position in shared memory
_POSITION: Final = struct.Struct("<q")
_DIGEST: Final = 16  # bytes


class Order(Protocol):
    """Descriptions of the collectives of all ranks, by position."""

    def differing(self, position: int, description: str) -> dict[int, str]:
        """Publish this rank's collective; returns the descriptions of ranks that differ at a position, and this rank's.

        Args:
            position: number of the collective.
            description: collective and its submodule, as text.
        """
        ...

    def close(self) -> None:
        """Close connections."""


@final
class CollectiveOrder:
    """Detects ranks that are about to communicate different submodules, which would mix the data or hang.

    Args:
        world: the ranks that run the collectives.
        one_machine: the ranks can map the same memory.
    """

    def __init__(self, world: World, *, one_machine: bool = False) -> None:
        self._count = 0  # collectives so far
        self._order: Order = _meet(world) if one_machine else OrderInStore(world)

    def note(self, description: str) -> None:
        """Compare the next collective with that of the other ranks, without waiting for them.

        Args:
            description: collective and its submodule, as text.

        Raises:
            RanksDisagree: another rank runs a different collective at this position.
        """
        if by_rank := self._order.differing(self._count, description):
            raise RanksDisagree(_explain(by_rank))
        self._count += 1

    def close(self) -> None:
        """Close connections to the other ranks."""
        self._order.close()


@final
class OrderInStore:
    """The first rank at a collective writes its description to the run's store: one request per collective.

    Args:
        world: the ranks that run the collectives.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._written = [""] * SLOTS  # per key, the description that the first rank wrote

    def differing(self, position: int, description: str) -> dict[int, str]:
        """See `Order`; of the other ranks, the result has the first at this position.

        Args:
            position: number of the collective.
            description: collective and its submodule, as text.
        """
        world, slot = self._world, position % SLOTS
        assert world.store is not None
        key = world.key(f"order/{world.generation}/{slot}")
        written = world.store.compare_set(key, self._written[slot], f"{position} {world.rank} {description}")
        self._written[slot] = written.decode()
        number, rank, other = self._written[slot].split(" ", 2)
        same = (number, other) == (str(position), description)
        return {} if same else {world.rank: description, int(rank): other}

    def close(self) -> None:
        """Do nothing: the store belongs to the run."""


@final
class OrderInMemory:
    """Each rank writes its descriptions to memory that the other ranks read: no system call, and no message.

    Two ranks that write at the same time may both read too early; each also reads the position before, at its next
    collective.

    Args:
        rank: this rank.
        vectors: memory of each rank, `SLOTS` times 256 bytes.
        group: connection to the other ranks; None for none.
    """

    def __init__(self, rank: int, vectors: Sequence[Tensor], group: SharedMemoryGroup | None = None) -> None:
        self._rank, self._group = rank, group
        memories = [memoryview(vector.numpy()) for vector in vectors]  # type: ignore[arg-type]
        self._own = memories[rank]
        self._others = {other: memory for other, memory in enumerate(memories) if other != rank}
        self._packed: dict[str, bytes] = {}
        self._before: tuple[int, str] | None = None

    def differing(self, position: int, description: str) -> dict[int, str]:
        """See `Order`.

        Args:
            position: number of the collective.
            description: collective and its submodule, as text.
        """
        content, begin = self._pack(description), position % SLOTS * _SLOT
        self._own[begin + _POSITION.size : begin + _SLOT] = content
        _POSITION.pack_into(self._own, begin, position + 1)  # last: readers look at the position first
        before, self._before = self._before, (position, description)
        earlier = self._compare(*before) if before is not None else {}
        return earlier or self._compare(position, description)

    def close(self) -> None:
        """Close the connections; the memory lives as long as this object."""
        if self._group is not None:
            self._group.close()

    def _pack(self, description: str) -> bytes:
        packed = self._packed.get(description)
        if packed is None:
            room = _SLOT - _POSITION.size - _DIGEST
            text = description.encode()
            digest = hashlib.blake2b(text, digest_size=_DIGEST).digest()
            packed = self._packed[description] = digest + text[:room].ljust(room, b"\0")
        return packed

    def _compare(self, position: int, description: str) -> dict[int, str]:
        content, begin = self._packed[description], position % SLOTS * _SLOT
        differing = {}
        for rank, memory in self._others.items():
            if _POSITION.unpack_from(memory, begin)[0] == position + 1:
                other = memory[begin + _POSITION.size : begin + _SLOT]
                if other != content:
                    differing[rank] = bytes(other[_DIGEST:]).rstrip(b"\0").decode(errors="replace")
        return {self._rank: description, **differing} if differing else {}


def _meet(ranks: World) -> OrderInMemory:
    """Map the memory of all ranks; collective."""
    assert ranks.store is not None
    # A rank may set up several times in a generation; the number is the same on all ranks.
    number = ranks.store.add(ranks.key(f"order/{ranks.generation}/rank {ranks.rank}"), 1)
    key = ranks.key(f"order/{ranks.generation}/{number}")
    with (
        membership().opening(),
        detects_lost_ranks(ranks),
    ):  # connections of the generation end when any of its ranks dies
        group = SharedMemoryGroup(
            ranks.store, key, ranks.rank, ranks.size, torch.uint8, SLOTS * _SLOT, ranks.generation, ranks.secret,
            int(OPERATION.total_seconds()), ranks.members,
        )  # fmt: skip
    return OrderInMemory(ranks.rank, group.vectors, group)


def _explain(by_rank: dict[int, str]) -> str:
    return (
        "ranks call different submodules, or in another order, and strategy=fsdp gathers the weights of a submodule on "
        "all ranks together: "
        + ", ".join(f"rank {rank} {what}" for rank, what in sorted(by_rank.items()))
        + ". Call the same submodules in the same order on all ranks (on an empty batch, or with a loss of zero "
        "weight), or use strategy=ddp"
    )
