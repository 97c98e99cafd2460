"""Vectors in memory that several processes map; the memory has no name, so no file can outlive the processes."""

from __future__ import annotations

import mmap
import os
import tempfile

import torch
from torch import Tensor


def anonymous_file(size: int) -> int:
    """Create a file in memory without a name, which is deleted when the last process closes it.

    Args:
        size: size in bytes.

    Returns:
        File descriptor.
    """
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("fabricx", os.MFD_CLOEXEC)
    else:
        file, path = tempfile.mkstemp(prefix="fabricx-")
        os.unlink(path)
    os.ftruncate(file, max(1, size))
    return file


def map_vector(file: int, dtype: torch.dtype, elements: int) -> Tensor:
    """Map a file as a vector and close the file; the memory lives as long as the vector.

    Args:
        file: file descriptor.
        dtype: data type of the vector.
        elements: length of the vector.
    """
    memory = mmap.mmap(file, max(1, elements * dtype.itemsize))
    os.close(file)
    return torch.frombuffer(memory, dtype=dtype, count=elements) if elements else torch.empty(0, dtype=dtype)
