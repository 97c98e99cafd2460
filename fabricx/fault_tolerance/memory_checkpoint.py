"""In-memory checkpoints: copies of each rank's local state in memory files that outlive its process.

The supervisor keeps the files open; under torchrun, a process of `memory_holder` does, and links them in a folder.
Nothing is written to disk.
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

from fabricx import by_value
from fabricx.checkpoint import tree
from fabricx.distributed.sharding.fsdp_internals import own_block

# Bytes of the tensors; bytes of the pickled part behind them; CRC-32 of the pickled part; checksum of the tensors.
HEADER: Final = struct.Struct("<QQIq")
ALIGN: Final = 64
NEWEST: Final = 2  # copies of each rank: while a copy is being written, the other is complete
Target = Callable[[str, torch.Size, torch.dtype], Tensor]


def path_of(folder: str, slot: int, number: int) -> Path:
    """Return the path of a memory file.

    Args:
        folder: the run's folder.
        slot: the worker's slot.
        number: number of the copy, below `NEWEST`.
    """
    return Path(folder) / f"copy-{slot}-{number}"


def free() -> float:
    """Return the free bytes of memory of this machine or of this process's control group; infinity if unknown."""
    limits = []
    with contextlib.suppress(OSError, ValueError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        limits.append(1024.0 * int(lines["MemAvailable"].split()[0]))
    with contextlib.suppress(OSError, ValueError):  # without a limit, or with another layout of control groups
        group = Path("/sys/fs/cgroup") / Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2].lstrip("/")
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(stat["inactive_file"])
        limits.append(float(int((group / "memory.max").read_text()) - used))
    return min(limits, default=math.inf)


def bytes_of(state: Any) -> int:
    """Return the bytes of a copy of a state's tensors on this rank.

    Args:
        state: nested plain data and tensors.
    """
    return sum(own_block(tensor)[0].nbytes for tensor in tree.split(state)[1].values())


@dataclass(frozen=True)
class Piece:
    """Position of a tensor, or of this rank's block (shard) of a tensor, in a copy.

    Attributes:
        begin: first byte.
        shape: shape of the stored tensor or block.
        dtype: data type of its elements.
        offsets: offsets of a block in the whole tensor; None without sharding.
        whole: shape of the whole tensor; None without sharding.
    """

    begin: int
    shape: torch.Size
    dtype: torch.dtype
    offsets: tuple[int, ...] | None = None
    whole: torch.Size | None = None


@dataclass(frozen=True)
class Copy:
    """A rank's part of a state.

    Attributes:
        key: equal on all ranks; increases from state to state.
        members: workers of all parts, by rank.
        worker: worker of this part.
        rest: the state without its tensors.
        pieces: positions of the tensors in `memory`, by name.
        memory: bytes of the tensors.
        total: checksum of `memory`.
    """

    key: Any
    members: tuple[int, ...]
    worker: int
    rest: Any
    pieces: dict[str, Piece]
    memory: Tensor
    total: int

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, or this rank's block of it, as a view.

        Args:
            name: name of the tensor in the state.
        """
        return _view(self.memory, self.pieces[name])

    def whole(self) -> bool:
        """Return whether the checksum of the tensors is correct."""
        return _sum(self.memory) == self.total


@final
class Copies:
    """Writes a worker's copies to memory files, or stores copies of another worker.

    Args:
        folder: folder of the files.
        worker: number of the worker whose copies are written.
        slot: number of the files; by default the worker.
    """

    def __init__(self, folder: str, worker: int, slot: int | None = None) -> None:
        slot = worker if slot is None else slot
        self._worker = worker
        self._members: tuple[int, ...] = ()
        self._files = [_MemoryFile(path_of(folder, slot, number)) for number in range(NEWEST)]
        self._newest = 0

    def make(self, key: Any, members: Sequence[int], state: Any) -> None:
        """Copy a state over the older copy.

        Args:
            key: equal on all ranks; increases from state to state.
            members: workers of all parts, by rank.
            state: nested plain data and tensors; of a DTensor, this rank's shard is copied.
        """
        self._newest, self._members = 1 - self._newest, tuple(members)
        rest, tensors = tree.split(state)
        self._files[self._newest].write((key, self._members, self._worker, rest), tensors)

    def protect_older(self) -> None:
        """Make the next copy over the newest, if there is an older copy."""
        if _read(self._files[1 - self._newest].path) is not None:
            self._newest = 1 - self._newest

    def content(self) -> tuple[bytes, Tensor]:
        """Return the newest copy as in its file: header, and the bytes behind it."""
        return self._files[self._newest].content()

    def without_tensors(self, rest: Any) -> tuple[bytes, Tensor]:
        """Return a copy of plain data only, with the key and the members of the newest copy, in the form of `content`.

        Args:
            rest: plain data.
        """
        data = by_value.dumps_for_peer((self.newest, self._members, self._worker, rest, {}))
        return HEADER.pack(0, len(data), zlib.crc32(data), 0), torch.frombuffer(bytearray(data), dtype=torch.uint8)

    @contextlib.contextmanager
    def taking(self, header: bytes) -> Iterator[Tensor]:
        """Receive a copy over the older copy; it is valid after the context has ended.

        Args:
            header: header of the sender's `content`.

        Yields:
            memory for the bytes behind the header.
        """
        self._newest = 1 - self._newest
        with self._files[self._newest].taking(header) as room:
            yield room

    @property
    def newest(self) -> Any:
        """Return the key of the newest copy."""
        return self._files[self._newest].key

    def forget(self) -> None:
        """Invalidate all copies."""
        for file in self._files:
            file.forget()

    @property
    def room(self) -> int:
        """Return the bytes that this process has allocated for copies."""
        return sum(file.room for file in self._files)

    def keep(self, key: Any) -> None:
        """Protect a copy, also of an earlier process, from being overwritten by the next copy.

        Args:
            key: key of the copy.
        """
        for number, file in enumerate(self._files):
            if file.key == key or file.holds(key):
                self._newest = number


class _MemoryFile:
    """Memory file of a single copy."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.key: Any = None
        self._memory: mmap.mmap | None = None
        self._pieces: dict[str, Piece] = {}
        self._views: list[Tensor] = []
        self._tensors = torch.empty(0, dtype=torch.uint8)

    def write(self, head: tuple[Any, ...], tensors: Mapping[str, Tensor]) -> None:
        blocks, pieces, size = _lay_out(tensors)
        data = by_value.dumps_for_peer((*head, pieces))
        self._take_room(ALIGN + size + len(data), spare=len(data))
        if pieces != self._pieces:
            self._tensors = torch.frombuffer(self._memory, dtype=torch.uint8, offset=ALIGN)[:size]
            self._views = [_view(self._tensors, piece) for piece in pieces.values()]
            self._pieces = pieces
        assert self._memory is not None
        HEADER.pack_into(self._memory, 0, 0, 0, 0, 0)  # invalid until the final header is written
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
        with self.path.open("rb+") as file:
            if os.fstat(file.fileno()).st_size >= HEADER.size:
                file.write(bytes(HEADER.size))

    def holds(self, key: Any) -> bool:
        copy = _read(self.path)
        return copy is not None and copy.key == key

    def _take_room(self, size: int, spare: int = 0) -> None:
        if self._memory is None or size > len(self._memory):
            with self.path.open("rb+") as file:
                os.ftruncate(file.fileno(), size + spare)
                self._memory = mmap.mmap(file.fileno(), size + spare)
            self._pieces = {}


def pickled_part(header: bytes, content: Tensor) -> bytes:
    """Return the part of a copy that is unpickled, which must be authenticated as sent by a process of the run.

    Args:
        header: header of the copy.
        content: bytes behind the header.
    """
    size, length, *_ = HEADER.unpack(header)
    return content[size : size + length].numpy().tobytes()


def _length(header: bytes) -> int:
    """Return the number of bytes behind a header."""
    size, length, *_ = HEADER.unpack(header)
    return int(size + length)


def _lay_out(tensors: Mapping[str, Tensor]) -> tuple[list[Tensor], dict[str, Piece], int]:
    """Return a rank's blocks of tensors, their positions, and the total bytes."""
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
    """Return a checksum, which any single changed bit changes; about as fast as reading."""
    return int(memory.view(torch.int64).sum())


def read(folder: str) -> dict[tuple[Any, tuple[int, ...]], dict[int, Copy]]:
    """Return the copies in a folder, by (key, members) of the state and by rank.

    Args:
        folder: the run's folder.
    """
    states: dict[Any, dict[int, Copy]] = {}
    for path in Path(folder).glob("copy-*"):
        copy = _read(path)
        if copy is not None:
            states.setdefault((copy.key, copy.members), {})[copy.members.index(copy.worker)] = copy
    return states


def _read(path: Path) -> Copy | None:
    try:
        with path.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError):  # the file is empty
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
    """Assemble a state from the copies of ranks.

    Args:
        copies: each is read once and may be freed then; the first determines plain data and unsharded tensors.
        target: returns an uninitialised tensor by name, global shape and dtype: a whole tensor or a DTensor.

    Returns:
        the nested state.

    Raises:
        RuntimeError: a part of a tensor is missing in all copies.
    """
    leading: Copy | None = None
    rooms: dict[str, _Room] = {}
    for copy in copies:
        if leading is None:
            leading = copy
            for name, piece in copy.pieces.items():
                rooms[name] = _Room(target(name, piece.whole or piece.shape, piece.dtype))
        for name, room in rooms.items():
            if copy is leading or leading.pieces[name].whole is not None:
                room.fill(copy.pieces[name], copy.tensor(name))
    assert leading is not None
    for name, room in rooms.items():
        if not room.full():
            raise RuntimeError(f"a part of {name} is in no in-memory checkpoint; resume from a checkpoint on disk")
    return tree.join(leading.rest, {name: room.tensor for name, room in rooms.items()})


class _Room:
    """This rank's block of a tensor, which is filled from blocks of other divisions."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._block, offsets = own_block(tensor)
        self._begin = offsets or (0,) * self._block.dim()
        self._filled: dict[tuple[int, ...], int] = {}

    def fill(self, piece: Piece, block: Tensor) -> None:
        """Copy the intersection with another block."""
        room, begin = self._block, self._begin
        offsets = piece.offsets or (0,) * room.dim()
        first = [max(a, b) for a, b in zip(begin, offsets, strict=True)]
        last = [min(a + n, b + m) for a, n, b, m in zip(begin, room.shape, offsets, block.shape, strict=True)]
        if any(a >= b for a, b in zip(first, last, strict=True)):
            return
        target = tuple(slice(a - o, b - o) for a, b, o in zip(first, last, begin, strict=True))
        source = tuple(slice(a - o, b - o) for a, b, o in zip(first, last, offsets, strict=True))
        room[target].copy_(block[source])
        self._filled[tuple(first)] = room[target].numel()

    def full(self) -> bool:
        return sum(self._filled.values()) == self._block.numel()
