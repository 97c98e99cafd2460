"""Process groups of torch.distributed: opened, left and released. Their ranks and keys are those of `World`."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fabricx.distributed.generations import membership

# A forked process, such as one of a DataLoader, must not collect a group that was garbage in its parent: the end of a
# group of gloo waits for threads, which do not exist in the forked process.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=gc.freeze)

_LEFT: list[Any] = []  # destroyed process groups of earlier generations, which strategies may still refer to


def survive_failed_operations() -> None:
    """Keep the process alive when an operation of NCCL fails: surviving ranks continue without the lost peer.

    By default torch ends the process. Call before a group is opened.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")


def open_main(backend: str, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
    """Open the group of all ranks; returns when all ranks have joined.

    Args:
        backend: backend of torch.distributed.
        store: rendezvous store, with a prefix for this group.
        rank, size: number of this process and number of processes.
        timeout: timeout of the rendezvous and, until changed, of collectives.
    """
    # Names of groups are parts of the store's keys, and a failed attempt of this process leaves its number behind.
    dist.distributed_c10d._world.group_count = 0
    with membership().opening():
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def state_rank(rank: int, size: int) -> None:
    """Give `torch.distributed` the rank of the parent in a loader process without a process group.

    Collectives raise an error there.

    Args:
        rank, size: rank of the parent, and number of ranks.
    """
    if not dist.is_initialized():  # a fork of a rank has the group of its parent
        dist.Backend.register_backend("rank_only", _without_backend, devices=["cpu"])
        dist.init_process_group("rank_only", store=dist.HashStore(), rank=rank, world_size=size)


def _without_backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    return dist.ProcessGroup(store, rank, size)


def open_parts(
    parts: Sequence[Sequence[int]], rank: int, timeout: timedelta
) -> tuple[Sequence[int], dist.ProcessGroup]:
    """Open a group for each part of the ranks; all ranks call it.

    Args:
        parts: the ranks of each group; every rank is in exactly one part.
        rank: number of this process.
        timeout: timeout of the rendezvous and, until changed, of collectives.

    Returns:
        ranks and group of the part with this rank.
    """
    groups: list[tuple[Sequence[int], Any]] = []
    with membership().opening():
        for ranks in parts:
            group = dist.new_group(list(ranks), timeout=timeout)
            if rank in ranks:
                groups.append((ranks, group))
    return groups[0]


def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Set the timeout of a group's collectives.

    Args:
        timeout: of each collective that follows.
        group: None for the group of all ranks.
    """
    dist.distributed_c10d._set_pg_timeout(timeout, group)  # type: ignore[attr-defined]


def leave_all() -> None:
    """Destroy all groups, if any; call `release_left` afterwards."""
    if dist.is_initialized():
        _LEFT.extend(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()


def release_left() -> None:
    """Wait until destroyed groups have ended; afterwards none of their operations can write to a tensor.

    The end of an operation may need the interpreter's lock. A C++ object that a strategy has built on a group (DDP's
    reducer) would wait for it while it holds that lock, which is a deadlock. The last Python reference, which this
    module keeps, releases the lock first.
    """
    _LEFT.clear()
    membership().release()
