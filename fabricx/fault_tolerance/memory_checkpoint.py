"""In-memory checkpoints: copies of each rank's own state in memory that outlives its process.

The files belong to the supervisor, or to a keeper under torchrun, which has them open and names them in a folder; they
are on no disk.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import pickle
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor

from fabricx.checkpoint import tree
from fabricx.distributed.fsdp_internals import own_block

HEADER: Final = struct.Struct("<QQIq")  # bytes of the tensors and of the head behind them, its checksum, their sum
ALIGN: Final = 64
NEWEST: Final = 2  # copies that are kept of each rank: while one is being made, the other is whole
Target = Callable[[str, torch.Size, torch.dtype], Tensor]


def path_of(folder: str, slot: int, place: int) -> Path:
    """Return the name of a file for one of the copies of whoever has that slot."""
    return Path(folder) / f"copy-{slot}-{place}"


def free() -> float:
    """Return how many bytes of memory this machine has left, or this process's control group; infinity if unknown."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(1024.0 * int(lines["MemAvailable"].split()[0]))
    with contextlib.suppress(OSError, ValueError):  # there is no limit, or it is kept elsewhere
        group = Path("/sys/fs/cgroup") / Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2].lstrip("/")
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(stat["inactive_file"])
        found.append(float(int((group / "memory.max").read_text()) - used))
    return min(found, default=math.inf)


def bytes_of(state: Any) -> int:
    """Return how much a copy of a state takes, but for its plain data."""
    return sum(own_block(tensor)[0].nbytes for tensor in tree.split(state)[1].values())


@dataclass(frozen=True)
class Piece:
    """Where a tensor lies in a copy.

    Attributes:
        begin: byte.
        shape, dtype: of what is there.
        offsets, whole: of which larger tensor that is a block, and where in it; None if it is no block.
    """

    begin: int
    shape: torch.Size
    dtype: torch.dtype
    offsets: tuple[int, ...] | None = None
    whole: torch.Size | None = None


@dataclass(frozen=True)
class Copy:
    """One rank's part of a state.

    Attributes:
        key: greater for a later state; the same on all ranks.
        members: the workers that have the other parts, by rank.
        worker: whose part this is.
        rest: the state without its tensors.
        pieces: where those are in `memory`, by name.
    """

    key: Any
    members: tuple[int, ...]
    worker: int
    rest: Any
    pieces: dict[str, Piece]
    memory: Tensor
    total: int

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, or this rank's block of it, without copying."""
        return _view(self.memory, self.pieces[name])

    def whole(self) -> bool:
        """Return whether no bit of the tensors has changed."""
        return _sum(self.memory) == self.total


@final
class Copies:
    """Makes one worker's copies, or takes those of another.

    Args:
        folder: where the files are.
        worker: whose copies are made.
        slot: whose files they are in; the worker's own if not given.
    """

    def __init__(self, folder: str, worker: int, slot: int | None = None) -> None:
        slot = worker if slot is None else slot
        self._worker = worker
        self._members: tuple[int, ...] = ()
        self._places = [_Place(path_of(folder, slot, number)) for number in range(NEWEST)]
        self._newest = 0

    def make(self, key: Any, members: Sequence[int], state: Any) -> None:
        """Copy a state of nested plain data and tensors, of a DTensor this rank's shard, in the place of the older."""
        self._newest, self._members = 1 - self._newest, tuple(members)
        rest, tensors = tree.split(state)
        self._places[self._newest].write((key, self._members, self._worker, rest), tensors)

    def content(self) -> tuple[bytes, Tensor]:
        """Return the newest copy as it lies in its file: its header, and what comes behind that."""
        return self._places[self._newest].content()

    def without_tensors(self, rest: Any) -> tuple[bytes, Tensor]:
        """Return a copy of the newest one's key and members that has this plain data only, as `content` does."""
        data = pickle.dumps((self.newest, self._members, self._worker, rest, {}), pickle.HIGHEST_PROTOCOL)
        return HEADER.pack(0, len(data), zlib.crc32(data), 0), torch.frombuffer(bytearray(data), dtype=torch.uint8)

    @contextlib.contextmanager
    def taking(self, header: bytes) -> Iterator[Tensor]:
        """Let another's copy be written in the place of the older, as its `content` is; whole when the context ends."""
        self._newest = 1 - self._newest
        with self._places[self._newest].taking(header) as room:
            yield room

    @property
    def newest(self) -> Any:
        """Return the key of the newest copy."""
        return self._places[self._newest].key

    def forget(self) -> None:
        """Let there be none."""
        for place in self._places:
            place.forget()

    @property
    def room(self) -> int:
        """Return how many bytes this process has taken for copies."""
        return sum(place.room for place in self._places)

    def keep(self, key: Any) -> None:
        """Let the next copy not take the place of this one, if it is there; an earlier process may have made it."""
        for number, place in enumerate(self._places):
            if place.key == key or place.holds(key):
                self._newest = number


class _Place:
    """Room for one copy."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.key: Any = None
        self._memory: mmap.mmap | None = None
        self._pieces: dict[str, Piece] = {}
        self._views: list[Tensor] = []
        self._tensors = torch.empty(0, dtype=torch.uint8)

    def write(self, head: tuple[Any, ...], tensors: Mapping[str, Tensor]) -> None:
        blocks, pieces, size = _lay_out(tensors)
        data = pickle.dumps((*head, pieces), pickle.HIGHEST_PROTOCOL)
        self._take_room(ALIGN + size + len(data), spare=len(data))
        if pieces != self._pieces:
            self._tensors = torch.frombuffer(self._memory, dtype=torch.uint8, offset=ALIGN)[:size]
            self._views = [_view(self._tensors, piece) for piece in pieces.values()]
            self._pieces = pieces
        assert self._memory is not None
        HEADER.pack_into(self._memory, 0, 0, 0, 0, 0)  # nothing is whole from here on
        self.key = None
        if blocks:
            torch._foreach_copy_(self._views, blocks)
        self._memory[ALIGN + size : ALIGN + size + len(data)] = data
        HEADER.pack_into(self._memory, 0, size, len(data), zlib.crc32(data), _sum(self._tensors))
        self.key = head[0]

    @property
    def room(self) -> int:
        return 0 if self._memory is None else len(self._memory)

    def content(self) -> tuple[bytes, Tensor]:
        assert self._memory is not None
        header = self._memory[: HEADER.size]
        return header, torch.frombuffer(self._memory, dtype=torch.uint8, offset=ALIGN, count=_length(header))

    @contextlib.contextmanager
    def taking(self, header: bytes) -> Iterator[Tensor]:
        self._take_room(ALIGN + _length(header))
        assert self._memory is not None
        HEADER.pack_into(self._memory, 0, 0, 0, 0, 0)
        yield torch.frombuffer(self._memory, dtype=torch.uint8, offset=ALIGN, count=_length(header))
        self._memory[: HEADER.size] = header

    def forget(self) -> None:
        self.key = None
        with self._path.open("rb+") as file:
            if os.fstat(file.fileno()).st_size >= HEADER.size:
                file.write(bytes(HEADER.size))

    def holds(self, key: Any) -> bool:
        copy = _read(self._path)
        return copy is not None and copy.key == key

    def _take_room(self, size: int, spare: int = 0) -> None:
        if self._memory is None or size > len(self._memory):
            with self._path.open("rb+") as file:
                os.ftruncate(file.fileno(), size + spare)
                self._memory = mmap.mmap(file.fileno(), size + spare)
            self._pieces = {}


def pickled_part(header: bytes, content: Tensor) -> bytes:
    """Return what will be unpickled of a copy's content, which has to come from a process of the run."""
    size, length, *_ = HEADER.unpack(header)
    return content[size : size + length].numpy().tobytes()


def _length(header: bytes) -> int:
    """Return how many bytes come behind a header."""
    size, length, *_ = HEADER.unpack(header)
    return int(size + length)


def _lay_out(tensors: Mapping[str, Tensor]) -> tuple[list[Tensor], dict[str, Piece], int]:
    """Return what a rank has of tensors, where it is to lie, and how many bytes that takes."""
    blocks, pieces, size = [], {}, 0
    for name, tensor in tensors.items():
        block, offsets = own_block(tensor)
        whole = None if offsets is None else tensor.shape
        pieces[name] = Piece(size, block.shape, block.dtype, offsets, whole)
        blocks.append(block)
        size += -(-block.nbytes // ALIGN) * ALIGN
    return blocks, pieces, size


def _view(memory: Tensor, piece: Piece) -> Tensor:
    size = piece.shape.numel() * piece.dtype.itemsize
    return memory[piece.begin : piece.begin + size].view(piece.dtype).view(piece.shape)


def _sum(memory: Tensor) -> int:
    """Return a number that any changed bit changes; about as quick as reading."""
    return int(memory.view(torch.int64).sum())


def read(folder: str) -> dict[tuple[Any, tuple[int, ...]], dict[int, Copy]]:
    """Return what is there of states, by key and members: copies, by the rank whose part each is."""
    found: dict[Any, dict[int, Copy]] = {}
    for path in Path(folder).glob("copy-*"):
        copy = _read(path)
        if copy is not None:
            found.setdefault((copy.key, copy.members), {})[copy.members.index(copy.worker)] = copy
    return found


def _read(path: Path) -> Copy | None:
    try:
        with path.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError):  # nothing was ever written
        return None
    if len(memory) < HEADER.size:
        return None
    size, length, checksum, total = HEADER.unpack_from(memory, 0)
    data = memory[ALIGN + size : ALIGN + size + length]
    if not length or zlib.crc32(data) != checksum:
        return None
    tensors = torch.frombuffer(memory, dtype=torch.uint8, offset=ALIGN, count=max(1, size))[:size]
    key, members, worker, rest, pieces = pickle.loads(data)
    return Copy(key, members, worker, rest, pieces, tensors, total)


def join(copies: Iterable[Copy], target: Target) -> Any:
    """Return the state of which ranks have copies; each copy is looked at once, and may be gone after that.

    Args:
        copies: the first is the one whose plain data to take, and those tensors that aren't blocks.
        target: gives room for a tensor by name, shape and dtype: all of it, or a shard.

    Raises:
        RuntimeError: a part of a tensor is nowhere.
    """
    mine: Copy | None = None
    rooms: dict[str, _Room] = {}
    for copy in copies:
        if mine is None:
            mine = copy
            for name, piece in copy.pieces.items():
                rooms[name] = _Room(target(name, piece.whole or piece.shape, piece.dtype))
        for name, room in rooms.items():
            if copy is mine or mine.pieces[name].whole is not None:
                room.fill(copy.pieces[name], copy.tensor(name))
    assert mine is not None
    for name, room in rooms.items():
        if not room.full():
            raise RuntimeError(f"a part of {name} is in no copy")
    return tree.join(mine.rest, {name: room.tensor for name, room in rooms.items()})


class _Room:
    """This rank's part of a tensor, as blocks of it come."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._own, found = own_block(tensor)
        self._begin = found or (0,) * self._own.dim()
        self._filled: dict[tuple[int, ...], int] = {}

    def fill(self, piece: Piece, block: Tensor) -> None:
        """Take what a block has of it."""
        own, begin = self._own, self._begin
        offsets = piece.offsets or (0,) * own.dim()
        first = [max(a, b) for a, b in zip(begin, offsets, strict=True)]
        last = [min(a + n, b + m) for a, n, b, m in zip(begin, own.shape, offsets, block.shape, strict=True)]
        if any(a >= b for a, b in zip(first, last, strict=True)):
            return
        here = tuple(slice(a - o, b - o) for a, b, o in zip(first, last, begin, strict=True))
        there = tuple(slice(a - o, b - o) for a, b, o in zip(first, last, offsets, strict=True))
        own[here].copy_(block[there])
        self._filled[tuple(first)] = own[here].numel()

    def full(self) -> bool:
        return sum(self._filled.values()) == self._own.numel()
