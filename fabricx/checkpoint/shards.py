"""Tensors on disk: each rank writes a part, planned by torch.distributed.checkpoint, and reads what it needs.

A file is in the safetensors format (https://github.com/huggingface/safetensors): a header in JSON, then bytes. Unlike
torch's own `.metadata` and `.distcp` files, nothing in it is a pickle.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypedDict

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadPlan,
    LoadPlanner,
    Metadata,
    StorageReader,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from fabricx.checkpoint.direct import DirectFile
from fabricx.checkpoint.files import BLOCK
from fabricx.checkpoint.places import at_hand, is_local
from fabricx.comm.world import World

_DTYPES: Final = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.uint16: "U16",
    torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


class Chunk(TypedDict):
    """A block of a tensor: where it lies in the tensor, and where in the files."""

    offsets: list[int]
    sizes: list[int]
    file: str
    name: str


class Entry(TypedDict):
    """A whole tensor: `dtype` as torch calls it, `size`, and the chunks that it is made of."""

    dtype: str
    size: list[int]
    chunks: list[Chunk]


Index = dict[str, Entry]


@dataclass
class Part:
    """What one rank writes of a checkpoint.

    Attributes:
        file: the name of its file.
        tensors: by name in the file; copies in main memory, which training doesn't change any more.
        index: where every tensor of all ranks will be.
    """

    file: str
    tensors: dict[str, Tensor]
    index: Index


def plan(tensors: Mapping[str, Tensor], world: World, room: Mapping[str, Tensor] | None = None) -> Part:
    """Decide which rank writes what, and copy this rank's part; every rank calls it.

    What all ranks hold is divided among them; of a DTensor each writes its own shard.

    Args:
        tensors: by name.
        world: the ranks.
        room: tensors of an earlier part that are needed no more: to copy into memory that is there already takes a
            fraction of the time.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(tensors), is_coordinator=world.main_rank)
    # Each rank works out the whole plan from the same local ones, so that none has to be sent back.
    plans, _ = planner.create_global_plan(world.gather_objects(planner.create_local_plan()))
    index: Index = {}
    for rank, one in enumerate(plans):
        for item in one.items:
            _enter(index, item, _file(rank))
    mine = planner.finish_plan(plans[world.rank])
    copies = {_name(item): _copy(planner.resolve_data(item), (room or {}).get(_name(item))) for item in mine.items}
    return Part(_file(world.rank), copies, index)


def _file(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"


def _name(item: WriteItem) -> str:
    """Return the name of a chunk in its file: the tensor's, with the offset behind it if it isn't all of it."""
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


def _copy(tensor: Any, room: Tensor | None) -> Tensor:
    if tensor.layout is not torch.strided:
        raise ValueError(f"a checkpoint can't hold a tensor with layout {tensor.layout}; make it dense first")
    if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
        room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return room.copy_(tensor, non_blocking=True)


def write(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Write a safetensors file, to the disk itself; returns its size and checksum.

    Written here rather than by the library so that no second copy is made of the tensors, and the checksum is that of
    what was given to the disk, not of what can be read back.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in tensors.items():
        end = position + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
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
        raw = memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data) if tensor.numel() else memoryview(b"")
        for start in range(0, len(raw), BLOCK):
            yield raw[start : start + BLOCK]


def read(folder: Path, index: Index, target: Callable[[str, torch.Size, torch.dtype], Tensor]) -> dict[str, Tensor]:
    """Read all tensors, each into what `target(name, size, dtype)` returns; of a DTensor, this rank's shard."""
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
    """Reads the chunks that a plan asks for."""

    def __init__(self, folder: Path, index: Index) -> None:
        self._folder = folder
        self._metadata = _metadata(index)
        self._chunks = {(n, tuple(c["offsets"])): c for n, entry in index.items() for c in entry["chunks"]}

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            chunk = self._chunks[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
            by_file.setdefault(chunk["file"], []).append((item, chunk["name"]))
        for file, items in by_file.items():
            with at_hand(self._folder / file) as here, safe_open(here, framework="pt") as opened:
                for item, name in items:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_slice(opened, name, item))
                    planner.commit_tensor(item, target)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from one read to the next."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata: Metadata = self._metadata
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Everything is known from the index."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _slice(opened: Any, name: str, item: Any) -> Tensor:
    if not item.lengths:
        found: Tensor = opened.get_tensor(name)
        return found
    begin_end = zip(item.storage_offsets, item.lengths, strict=True)
    part: Tensor = opened.get_slice(name)[tuple(slice(begin, begin + length) for begin, length in begin_end)]
    return part
