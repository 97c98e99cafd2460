"""A backend for CPUs that behaves like NCCL after the death of a peer: collectives raise no errors.

Operations run on gloo. After an error of gloo, an operation blocks until its group is aborted; its result is then
undefined.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.utils._pytree import tree_leaves

from fabricx.core.strategy import Strategy

NAME: Final = "fake_nccl"
LONG_S: Final = 60.0  # limit of the wait for an abort
OPERATIONS: Final = {  # name in torch: name in gloo
    "allgather": "allgather", "all_gather_single": "_allgather_base", "_allgather_base": "_allgather_base",
    "allreduce": "allreduce", "barrier": "barrier", "broadcast": "broadcast",
    "reduce_scatter": "reduce_scatter", "reduce_scatter_single": "_reduce_scatter_base",
    "_reduce_scatter_base": "_reduce_scatter_base",
}  # fmt: skip
SEVERAL: Final = {  # operations on several tensors
    "all_gather_single_coalesced": "_allgather_base", "allgather_into_tensor_coalesced": "_allgather_base",
    "reduce_scatter_single_coalesced": "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
}  # fmt: skip


class _Group(dist.ProcessGroup):
    """A process group of this backend."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._ended = threading.Event()

    def abort(self) -> None:
        """End all blocked operations."""
        self._ended.set()

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name


def _operation(name: str, *, several: bool) -> Callable[..., Any]:
    def operation(group: _Group, *arguments: Any, **options: Any) -> Any:
        calls = zip(*arguments[:2], strict=True) if several else [arguments]
        try:
            for call in calls:
                getattr(group._gloo, name)(*call, **({} if several else options)).wait()
        except RuntimeError:
            assert group._ended.wait(LONG_S), f"{name} hangs: the group was not aborted"
            for tensor in tree_leaves(arguments):
                if isinstance(tensor, Tensor):
                    tensor.fill_(float("nan") if tensor.is_floating_point() else 77)
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(arguments[0] if arguments else [])
        return _create_work_from_future(done)

    return operation


for _name, _gloo_name in {**OPERATIONS, **SEVERAL}.items():
    setattr(_Group, _name, _operation(_gloo_name, several=_name in SEVERAL))


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> _Group:
    return _Group(store, rank, size, timeout)


def silent(strategy: Strategy) -> Strategy:
    """Make a strategy use this backend."""
    strategy.backend = _backend  # type: ignore[method-assign]
    return strategy


def _backend(device: torch.device) -> str:
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, devices=["cpu"])
    return NAME
