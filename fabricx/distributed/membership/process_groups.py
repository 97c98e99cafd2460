"""Opens, destroys and releases process groups of torch.distributed; `World` chooses their ranks and store."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fabricx.distributed.membership.generations import membership

# A forked process, such as a worker of a DataLoader, must not collect a group that was garbage in its parent: the
# destructor of a gloo group waits for threads that do not exist in the forked process.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=gc.freeze)

_DESTROYED: list[Any] = []  # process groups of earlier generations, to which strategies may still refer


def survive_failed_operations() -> None:
    """Keep the process alive when an operation of NCCL fails: surviving ranks continue without the lost peer.

    By default torch ends the process. Call this before the first group is opened.
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
    # The store's keys contain the number of the group in its process. After a failed attempt this number would differ
    # between ranks, which would then wait for each other's keys.
    dist.distributed_c10d._world.group_count = 0
    with membership().opening():
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def set_loader_rank(rank: int, size: int) -> None:
    """Make `torch.distributed.get_rank` return the rank of the parent in a loader process without a process group.

    Collectives of the loader process raise an error.

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
    """Open a group for each part of the ranks; collective over all ranks.

    Args:
        parts: ranks of each group; every rank is in exactly one part.
        rank: number of this process.
        timeout: timeout of the rendezvous and, until changed, of collectives.

    Returns:
        the ranks of this rank's part, and their group.
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
        timeout: limit for each later collective.
        group: None for the group of all ranks.
    """
    dist.distributed_c10d._set_pg_timeout(timeout, group)  # type: ignore[attr-defined]


def destroy_all() -> None:
    """Destroy all groups, if any; call `release_destroyed` afterwards."""
    if dist.is_initialized():
        _DESTROYED.extend(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()


def release_destroyed() -> None:
    """Wait until no operation of a destroyed group is pending; none can write to a tensor afterwards.

    The destructor of a group waits for pending operations, which may need the interpreter's lock to end. Called from a
    C++ object of a strategy, such as DDP's reducer, it would hold that lock: a deadlock. This module therefore keeps a
    Python reference to each destroyed group. Dropping the last Python reference releases the lock during the wait.
    """
    _DESTROYED.clear()
    membership().release()
