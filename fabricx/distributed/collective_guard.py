"""Raise an error for collectives that the other ranks would not join and that would therefore hang."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any, Final, final

from torch.distributed import distributed_c10d

from fabricx.errors import RanksApart

_HARMLESS: Final = {"rank", "size", "name", "group_name", "bound_device_id", "_get_backend_name"}
_QUERIES: Final = {"get_rank", "get_world_size", "get_backend", "get_backend_config"}  # nothing is sent

_c10d: Any = distributed_c10d
_members: Any = distributed_c10d.GroupMember
_is_outside: Final = _c10d._rank_not_in_group


@final
class _NoGroup:
    """Replacement for the default process group that raises `RanksApart` when a collective uses it."""

    def __init__(self, group: Any, why: str) -> None:
        self._group, self._why = group, why

    def __eq__(self, other: object) -> bool:
        return other is self._group  # torch compares groups while it formats its error message

    def __hash__(self) -> int:
        return hash(self._group)

    def __getattr__(self, name: str) -> Any:
        if name in _HARMLESS:
            return getattr(self._group, name)
        raise RanksApart(self._why)


@final
class RefuseCollectives:
    """Reentrant context in which a collective with other ranks raises `RanksApart`.

    It applies to the default group, and to groups of `torch.distributed.new_group` that have several ranks, in calls of
    `torch.distributed`: each of its collectives first looks whether this rank is outside of its group. Functional
    collectives (`torch.distributed._functional_collectives`) are not refused on such groups.

    Args:
        reason: message of the error.
    """

    def __init__(self, reason: str) -> None:
        self._reason = reason
        self._before: list[Any] = []

    def __enter__(self) -> None:
        group = _members.WORLD
        self._before.append((group, _c10d._rank_not_in_group))
        _members.WORLD = group if group is None else _NoGroup(group, self._reason)
        _c10d._rank_not_in_group = self._check

    def __exit__(self, *_: object) -> None:
        _members.WORLD, _c10d._rank_not_in_group = self._before.pop()

    def _check(self, group: Any) -> bool:
        """Return whether this rank is outside of a group, as torch's function does.

        Raises:
            RanksApart: the group has other ranks, and the caller is a collective.
        """
        outside: bool = _is_outside(group)
        if group is None or outside or isinstance(group, _NoGroup) or group.size() == 1:
            return outside
        if sys._getframe(1).f_code.co_name not in _QUERIES:
            raise RanksApart(self._reason)
        return outside


ALL_JOIN: Final = threading.RLock()  # context that allows collectives; entered without a Python call
OWN_PACE: Final = RefuseCollectives(
    "a collective in training_step, or in a hook of a batch: each rank takes its batches at its own pace, so the "
    "other ranks would not join it. self.log needs no collective (values are reduced over ranks at the epoch's end); "
    "compute other values in on_train_epoch_end, or use strategy=ddp"
)
NO_SAMPLE: Final = RefuseCollectives(
    "a collective at a batch of which some ranks have no sample: they don't call training_step and the hooks of this "
    "batch, so they would not join it. Call it in on_before_optimizer_step or on_train_epoch_end, which all ranks "
    "call, or let each global batch be whole (drop_last=True). self.log needs no collective"
)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Allow collectives over all ranks inside `RefuseCollectives`; only for code that all ranks run."""
    group = _members.WORLD
    while isinstance(group, _NoGroup):
        group = group._group
    before = _members.WORLD, _c10d._rank_not_in_group
    _members.WORLD, _c10d._rank_not_in_group = group, _is_outside
    try:
        yield
    finally:
        _members.WORLD, _c10d._rank_not_in_group = before
