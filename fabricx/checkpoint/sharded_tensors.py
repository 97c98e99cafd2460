"""Tensors on disk: each rank writes its shards, planned by torch.distributed.checkpoint, and reads the chunks it needs.

Files have the safetensors format (https://github.com/huggingface/safetensors): a header in JSON, then bytes. Unlike
torch's `.metadata` and `.distcp` files, they contain no pickles.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    StorageReader,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fabricx.checkpoint.direct_io import DirectFile
from fabricx.checkpoint.files import BLOCK, member
from fabricx.checkpoint.index import AS_PAIRS, DTYPES, Chunk, Index
from fabricx.checkpoint.storage import is_local, local_copy
from fabricx.distributed.messages.tensor_bytes import as_bytes
from fabricx.distributed.world import World
from fabricx.errors import CheckpointError

WRITERS: Final = 64  # most ranks that share the writing of tensors that all of them have


@dataclass
class Part:
    """The part of a checkpoint that a rank writes.

    Attributes:
        file: name of the rank's file.
        tensors: tensors by name in the file; copies on the CPU, which training does not change.
        index: chunks of all tensors of all ranks.
        items: chunks of this rank, in the order of `tensors`.
        layout: digest of the tensors' shapes and divisions, by rank.
    """

    file: str
    tensors: dict[str, Tensor]
    index: Index
    items: list[WriteItem]
    layout: list[list[int]]


def plan(tensors: Mapping[str, Tensor], world: World, earlier: Part | None = None) -> Part:
    """Assign tensors to ranks, and copy this rank's part to the CPU; every rank calls it.

    Replicated tensors are distributed over the ranks, at most `WRITERS`; of a DTensor, each rank writes its shard.

    Args:
        tensors: tensors by name.
        world: the ranks.
        earlier: part that has been written. Its memory is reused, which takes a fraction of the time, and its plan, if
            the tensors have the same layout.

    Raises:
        ValueError: a tensor has a layout or a dtype that files of safetensors do not have.
    """
    for name, tensor in tensors.items():
        _check(name, tensor)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(tensors), is_coordinator=world.main_rank)
    entries = [_entry(item) for item in planner.create_local_plan().items]
    digest = hashlib.blake2b(repr(entries).encode(), digest_size=16).digest()
    halves = torch.frombuffer(bytearray(digest), dtype=torch.int64).to(world.device)
    layout: list[list[int]] = world.all_gather(halves).tolist()
    if earlier is not None and earlier.layout == layout:
        index, items = earlier.index, earlier.items
    else:
        index, items = _divide(planner, _gathered(entries, layout, world), world.rank)
    room = {} if earlier is None else earlier.tensors
    copies = {_name(item): _copy(planner.resolve_data(item), room.get(_name(item))) for item in items}
    return Part(_file(world.rank), copies, index, items, layout)


def _gathered(
    entries: list[tuple[Any, ...]], layout: Sequence[Sequence[int]], world: World
) -> dict[int, list[tuple[Any, ...]]]:  # fmt: skip
    """Return the local plans of the ranks that write, by rank; equal plans are sent once. Collective."""
    equal: dict[tuple[int, ...], list[int]] = {}
    for rank, digest in enumerate(layout):
        equal.setdefault(tuple(digest), []).append(rank)
    if len(equal) == world.size:
        return dict(enumerate(world.gather_objects(entries)))
    plans: dict[int, list[tuple[Any, ...]]] = {}
    for ranks in equal.values():
        sent: list[tuple[Any, ...]] = world.broadcast_object(entries if world.rank == ranks[0] else None, ranks[0])
        plans |= dict.fromkeys(ranks[: max(1, WRITERS // len(equal))], sent)
    return dict(sorted(plans.items()))


def _divide(
    planner: DefaultSavePlanner, local_plans: Mapping[int, list[tuple[Any, ...]]], rank: int
) -> tuple[Index, list[WriteItem]]:  # fmt: skip
    """Return the index of all chunks, and the chunks of a rank; each rank computes them from all local plans."""
    plans, _ = planner.create_global_plan(
        [SavePlan([_item(*entry) for entry in entries]) for entries in local_plans.values()]
    )
    index: Index = {}
    items: list[WriteItem] = []
    for other, rank_plan in zip(local_plans, plans, strict=True):
        for item in rank_plan.items:
            _enter(index, item, _file(other))
        if other == rank:
            items = planner.finish_plan(rank_plan).items
    return index, items


def _entry(item: WriteItem) -> tuple[Any, ...]:
    """Return an item of a plan as plain data: the arguments of `_item`."""
    data, index = item.tensor_data, item.index
    assert data is not None
    return (
        index.fqn,
        index.offset,
        index.index,
        item.type.name,
        data.chunk.offsets,
        data.chunk.sizes,
        data.size,
        data.properties.dtype,
    )


def _item(
    name: str, offset: torch.Size | None, index: int | None, kind: str, offsets: torch.Size, sizes: torch.Size,
    size: torch.Size, dtype: torch.dtype,
) -> WriteItem:  # fmt: skip
    data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype), size)
    return WriteItem(MetadataIndex(name, offset, index), WriteItemType[kind], tensor_data=data)


def _file(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"


def _name(item: WriteItem) -> str:
    """Return the name of a chunk in its file: the tensor's name, with the offset of a partial chunk."""
    data = item.tensor_data
    assert data is not None
    if data.chunk.sizes == data.size:
        return item.index.fqn
    return f"{item.index.fqn}@{','.join(map(str, data.chunk.offsets))}"


def _enter(index: Index, item: WriteItem, file: str) -> None:
    data = item.tensor_data
    assert data is not None
    dtype = str(data.properties.dtype).removeprefix("torch.")
    entry = index.setdefault(item.index.fqn, {"dtype": dtype, "size": list(data.size), "chunks": []})
    chunk = data.chunk
    entry["chunks"].append(
        {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), "file": file, "name": _name(item)}
    )


def _check(name: str, tensor: Tensor) -> None:
    reason = f"layout {tensor.layout}" if tensor.layout is not torch.strided else ""
    if tensor.dtype not in DTYPES:
        reason = f"dtype {tensor.dtype}"
    if reason:
        raise ValueError(
            f"a checkpoint can't hold {name} with {reason}; convert it, or register a buffer with persistent=False"
        )


def _copy(tensor: Any, room: Tensor | None) -> Tensor:
    if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
        room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return room.copy_(tensor, non_blocking=tensor.is_cuda)  # `Writer` waits for copies of CUDA only


def write(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Write a safetensors file; returns its size and checksum.

    Unlike the safetensors library, this function does not copy the tensors a second time, and computes the checksum of
    the bytes that are written, not of bytes read back.

    Args:
        path: path of the file.
        tensors: contiguous, on the CPU.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in tensors.items():
        end = position + tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": [*tensor.shape, 2] if tensor.dtype == AS_PAIRS else list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    checksum = 0
    with DirectFile(path) if is_local(path) else path.open("wb") as file:
        for block in _blocks(len(text).to_bytes(8, "little") + text, tensors):
            checksum = zlib.crc32(block, checksum)
            file.write(block)
    return {"bytes": 8 + len(text) + position, "crc32": checksum}


def _blocks(head: bytes, tensors: Mapping[str, Tensor]) -> Any:
    yield memoryview(head)
    for tensor in tensors.values():
        raw = memoryview(as_bytes(tensor).numpy().data) if tensor.numel() else memoryview(b"")
        for start in range(0, len(raw), BLOCK):
            yield raw[start : start + BLOCK]


def read(folder: Path, index: Index, target: Callable[[str, torch.Size, torch.dtype], Tensor]) -> dict[str, Tensor]:
    """Read all tensors; of a DTensor, this rank's shard.

    Args:
        folder: folder of the checkpoint.
        index: index of the tensors.
        target: returns the tensor to write to, for a name, a size and a dtype.
    """
    metadata = _metadata(index)
    tensors = {
        name: target(name, entry.size, entry.properties.dtype) for name, entry in metadata.state_dict_metadata.items()
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader = _Reader(folder, index)
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
    return tensors


def _metadata(index: Index) -> Any:
    return Metadata({
        name: TensorStorageMetadata(
            TensorProperties(dtype=getattr(torch, entry["dtype"])),
            torch.Size(entry["size"]),
            [ChunkStorageMetadata(torch.Size(c["offsets"]), torch.Size(c["sizes"])) for c in entry["chunks"]],
        )
        for name, entry in index.items()
    })  # fmt: skip


class _Reader(StorageReader):
    """Storage reader of torch.distributed.checkpoint for the chunks of an index."""

    def __init__(self, folder: Path, index: Index) -> None:
        self._folder = folder
        self._metadata = _metadata(index)
        self._chunks = {(n, tuple(c["offsets"])): c for n, entry in index.items() for c in entry["chunks"]}

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            chunk = self._chunks[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
            by_file.setdefault(chunk["file"], []).append((item, chunk))
        for file, items in by_file.items():
            path = member(self._folder, file)
            try:
                with local_copy(path) as local, safe_open(local, framework="pt") as opened:
                    for item, chunk in items:
                        target = planner.resolve_tensor(item).detach()
                        block = _slice(opened, chunk, target.dtype, item)
                        # torch would read memory of a file as complex128 at any address, and needs multiples of 16.
                        (torch.view_as_real(target) if target.dtype == AS_PAIRS else target).copy_(block)
                        planner.commit_tensor(item, target)
            except SafetensorError as error:
                raise CheckpointError(f"{path} is damaged: it isn't a safetensors file as expected: {error}") from None
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: reads share no state."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata: Metadata = self._metadata
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the index is complete."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _slice(opened: Any, chunk: Chunk, dtype: torch.dtype, item: Any) -> Tensor:
    part = opened.get_slice(chunk["name"])
    shape = [*chunk["sizes"], 2] if dtype == AS_PAIRS else chunk["sizes"]
    if list(part.get_shape()) != shape or part.get_dtype() != DTYPES[dtype]:  # copying would broadcast
        raise SafetensorError(
            f"{chunk['name']} is {part.get_dtype()} {part.get_shape()} there, and {DTYPES[dtype]} {shape} in the index"
        )
    if not item.lengths:
        whole: Tensor = opened.get_tensor(chunk["name"])
        return whole
    begin_end = zip(item.storage_offsets, item.lengths, strict=True)
    block: Tensor = part[tuple(slice(begin, begin + length) for begin, length in begin_end)]
    return block
