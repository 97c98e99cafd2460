"""Refuses collectives that other ranks would not join, in place of an endless wait."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Final, final

from torch.distributed import distributed_c10d

from fabricx.errors import RanksApart

OWN_PACE: Final = (
    "a collective in training_step: each rank takes its batches at its own pace here, so the others would not join it. "
    "self.log needs none (ranks' values are joined when the epoch ends); compute other things in on_train_epoch_end, "
    "or take strategy=ddp"
)
NO_SAMPLE: Final = (
    "a collective at a batch of which some ranks have no sample: they don't call training_step and the hooks of this "
    "batch, so they would not join it. Call it in on_before_optimizer_step or on_train_epoch_end, which all ranks "
    "call, or let each global batch be whole (drop_last=True). self.log needs none"
)
ALL_JOIN: Final = threading.RLock()  # a context that allows collectives, and that is entered without a Python call
_HARMLESS: Final = {"rank", "size", "name", "group_name", "bound_device_id", "_get_backend_name"}

_members: Any = distributed_c10d.GroupMember


@final
class _NoGroup:
    """Stands where the default process group is, and refuses to be used."""

    def __init__(self, group: Any, why: str) -> None:
        self._group, self._why = group, why

    def __eq__(self, other: object) -> bool:
        return other is self._group  # torch looks it up as it describes the error

    def __hash__(self) -> int:
        return hash(self._group)

    def __getattr__(self, name: str) -> Any:
        if name in _HARMLESS:
            return getattr(self._group, name)
        raise RanksApart(self._why)


@contextlib.contextmanager
def apart(why: str) -> Iterator[None]:
    """Refuse collectives over all ranks.

    Args:
        why: the error.
    """
    group = _members.WORLD
    with _instead(group if group is None else _NoGroup(group, why)):
        yield


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Allow collectives over all ranks again, within `apart`: the others join these."""
    group = _members.WORLD
    while isinstance(group, _NoGroup):
        group = group._group
    with _instead(group):
        yield


@contextlib.contextmanager
def _instead(group: Any) -> Iterator[None]:
    before, _members.WORLD = _members.WORLD, group
    try:
        yield
    finally:
        _members.WORLD = before
