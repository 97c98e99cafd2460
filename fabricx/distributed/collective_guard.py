"""Raise an error for collectives that the other ranks would not join and that would therefore hang."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Collection, Iterator
from typing import Any, Final, final

from torch.distributed import ProcessGroup, _functional_collectives, distributed_c10d

from fabricx.errors import RanksApart

_HARMLESS: Final = {"rank", "size", "name", "group_name", "bound_device_id", "_get_backend_name"}
_QUERIES: Final = {"get_rank", "get_world_size", "get_backend", "get_backend_config"}  # nothing is sent

_c10d: Any = distributed_c10d
_members: Any = distributed_c10d.GroupMember
_funcol: Any = _functional_collectives
_is_outside: Final = _c10d._rank_not_in_group
_RESOLVER: Final = "_resolve_group" if hasattr(_funcol, "_resolve_group") else "_resolve_group_name"  # torch 2.11
_resolve: Final = getattr(_funcol, _RESOLVER)


def _install(group: Any, is_outside: Any, resolve: Any) -> tuple[Any, Any, Any]:
    """Set torch's default group and the functions in which collectives look at their group; returns those before."""
    before = _members.WORLD, _c10d._rank_not_in_group, getattr(_funcol, _RESOLVER)
    _members.WORLD, _c10d._rank_not_in_group = group, is_outside
    setattr(_funcol, _RESOLVER, resolve)
    return before


@final
class _NoGroup:
    """Replacement for the default process group that raises `RanksApart` when a collective uses it."""

    def __init__(self, group: Any, why: str) -> None:
        self._group, self._why = group, why

    def __eq__(self, other: object) -> bool:
        return other is self._group  # torch compares groups while it formats its error message

    def __hash__(self) -> int:
        return hash(self._group)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # torch warns of groups that are no `ProcessGroup`
        return type(self._group)

    def __getattr__(self, name: str) -> Any:
        if name in _HARMLESS:
            return getattr(self._group, name)
        raise RanksApart(self._why)


def _real(group: Any) -> Any:
    """Return the process group for which a `_NoGroup` stands, or the group itself."""
    return group._group if isinstance(group, _NoGroup) else group


@final
class RefuseCollectives:
    """Reentrant context in which a collective with ranks that would not join it raises `RanksApart`.

    It applies to the default group and to groups of `torch.distributed.new_group`: each collective of
    `torch.distributed` first looks whether this rank is outside of its group, and each functional collective
    (`torch.distributed._functional_collectives`) resolves its group. Methods of a group and operators of `torch.ops`
    are not refused.

    Args:
        reason: message of the error.
        absent: ranks that do not join; None for all other ranks.
    """

    def __init__(self, reason: str, absent: Collection[int] | None = None) -> None:
        self._reason, self._absent = reason, absent
        self._before: list[Any] = []

    def __enter__(self) -> None:
        group = _members.WORLD
        refusing = group if group is None else _NoGroup(_real(group), self._reason)
        self._before.append(_install(refusing, self._check, self._resolve))

    def __exit__(self, *_: object) -> None:
        _install(*self._before.pop())

    def _check(self, group: Any) -> bool:
        """Return whether this rank is outside of a group, as torch's function does.

        Raises:
            RanksApart: a rank of the group would not join, and the caller is a collective.
        """
        outside: bool = _is_outside(group)
        if group is None or outside or isinstance(group, _NoGroup):
            return outside
        if sys._getframe(1).f_code.co_name not in _QUERIES:
            self._refuse(group)
        return outside

    def _resolve(self, group: Any, *tag: Any, **named: Any) -> Any:
        """Return the group of a functional collective, as torch's function does.

        Raises:
            RanksApart: a rank of the group would not join.
        """
        if isinstance(group, _NoGroup):
            raise RanksApart(self._reason)
        resolved = _resolve(group, *tag, **named)
        found = _c10d._resolve_process_group(resolved) if isinstance(resolved, str) else resolved
        if isinstance(found, ProcessGroup):
            self._refuse(found)
        return resolved

    def _refuse(self, group: Any) -> None:
        if group.size() == 1:
            return
        if self._absent is None or not set(self._absent).isdisjoint(_c10d.get_process_group_ranks(group)):
            raise RanksApart(self._reason)


ALL_JOIN: Final = threading.RLock()  # context that allows collectives; entered without a Python call
OWN_PACE: Final = RefuseCollectives(
    "a collective in training_step, or in a hook of a batch: each rank takes its batches at its own pace, so the "
    "other ranks would not join it. self.log needs no collective (values are reduced over ranks at the epoch's end); "
    "compute other values in on_train_epoch_end, or use strategy=ddp"
)


def without_sample(ranks: Collection[int]) -> RefuseCollectives:
    """Return a context for `training_step` and hooks of a batch that some ranks do not call.

    Args:
        ranks: ranks without a sample of the batch; collectives of groups without these ranks are allowed.
    """
    return RefuseCollectives(
        "a collective at a batch of which some ranks have no sample: ranks "
        f"{', '.join(map(str, ranks))} don't call training_step and the hooks of this batch, so they would not join "
        "it. Call it in on_before_optimizer_step or on_train_epoch_end, which all ranks call, or let each global "
        "batch be whole (drop_last=True). self.log needs no collective",
        ranks,
    )


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Allow collectives over all ranks inside `RefuseCollectives`; only for code that all ranks run."""
    before = _install(_real(_members.WORLD), _is_outside, _resolve)
    try:
        yield
    finally:
        _install(*before)
