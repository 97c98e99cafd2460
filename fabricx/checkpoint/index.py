"""Index of a checkpoint: the chunks of each tensor, validated before memory is allocated."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypedDict

import torch

from fabricx.errors import CheckpointError

DTYPES: Final = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.uint16: "U16",
    torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL", torch.complex64: "C64", torch.complex128: "F64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
# safetensors has no such type: a file contains pairs of their real and imaginary parts, with a last dim of 2.
AS_PAIRS: Final = torch.complex128
_BY_NAME: Final = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


class Chunk(TypedDict):
    """A block of a tensor, with its offsets in the tensor, and its file and name in the file."""

    offsets: list[int]
    sizes: list[int]
    file: str
    name: str


class Entry(TypedDict):
    """A whole tensor: name of its torch dtype, size, and the chunks that it consists of."""

    dtype: str
    size: list[int]
    chunks: list[Chunk]


Index = dict[str, Entry]


def parse(data: bytes, files: Mapping[str, Mapping[str, int]], path: Path) -> Index:
    """Parse and validate an index: each tensor is the disjoint union of its chunks, which fit into the files.

    Args:
        data: content of the file, in JSON.
        files: list of files in the manifest; each file has the size stated in the manifest.
        path: path of the index, for the message.

    Raises:
        CheckpointError: an entry is malformed, overlaps, has a gap, or needs more bytes than its file has; or its file
            is not in the manifest and so has no checksum.
    """
    used: Counter[str] = Counter()
    reading = "the whole"
    try:
        index: Index = json.loads(data)
        for name, entry in index.items():
            reading = name
            _check_entry(entry)
            for chunk in entry["chunks"]:
                used[chunk["file"]] += math.prod(chunk["sizes"]) * _BY_NAME[entry["dtype"]].itemsize
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {reading!r}: {error}") from None
    for file, size in used.items():
        if file not in files:
            raise CheckpointError(
                f"{path} names the file {file!r}, which the manifest doesn't list: it has no checksum"
            )
        if size > files[file]["bytes"]:
            raise CheckpointError(f"{path} is damaged: {size} bytes of tensors in {file}, which has fewer")
    return index


def _check_entry(entry: Entry) -> None:
    """Raise `ValueError` unless the chunks are blocks of the tensor without overlaps and gaps."""
    size, chunks = entry["size"], entry["chunks"]
    if entry["dtype"] not in _BY_NAME or not _are_sizes(size, len(size)):
        raise ValueError(f"no tensor has the type {entry['dtype']!r} and the size {size!r}")
    for chunk in chunks:
        for field in ("file", "name"):
            if not isinstance(chunk[field], str):  # type: ignore[literal-required]
                raise ValueError(f"{field} isn't text")
        offsets, sizes = chunk["offsets"], chunk["sizes"]
        inside = _are_sizes(offsets, len(size)) and _are_sizes(sizes, len(size))
        if not inside or any(o + n > whole for o, n, whole in zip(offsets, sizes, size, strict=True)):
            raise ValueError(f"a chunk of {sizes!r} at {offsets!r} isn't in a tensor of {size!r}")
    if sum(math.prod(chunk["sizes"]) for chunk in chunks) != math.prod(size) or _overlap(chunks):
        raise ValueError("its chunks overlap, or leave a gap")


def _are_sizes(numbers: Any, dims: int) -> bool:
    return type(numbers) is list and len(numbers) == dims and all(type(n) is int and 0 <= n < 1 << 62 for n in numbers)


def _overlap(chunks: Sequence[Chunk]) -> bool:
    """Return whether two chunks share an element, by a sweep along the first dim."""
    boxes = [[(o, o + n) for o, n in zip(c["offsets"], c["sizes"], strict=True)] for c in chunks if all(c["sizes"])]
    if len(boxes) < 2:
        return False
    active: list[list[tuple[int, int]]] = []
    for box in sorted(boxes):
        active = [other for other in active if other[0][1] > box[0][0]]
        if any(all(a < d and c < b for (a, b), (c, d) in zip(box, other, strict=True)) for other in active):
            return True
        active.append(box)
    return False
