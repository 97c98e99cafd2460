"""While each rank goes at its own pace, a collective would wait for ever: it is refused at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final, final

from torch.distributed import distributed_c10d

from fabricx.errors import RanksApart

_HARMLESS: Final = {"rank", "size", "name", "group_name", "bound_device_id", "_get_backend_name"}


@final
class _NoGroup:
    """Stands where the default process group is, and refuses to be used."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        if name in _HARMLESS:
            return getattr(self._group, name)
        raise RanksApart(
            "a collective in training_step: each rank takes its batches at its own pace here, so the others would not "
            "join it. self.log needs none (ranks' values are joined when the epoch ends); compute other things in "
            "on_train_epoch_end, or take strategy=ddp"
        )


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Refuse collectives over all ranks."""
    members: Any = distributed_c10d.GroupMember
    group = members.WORLD
    if group is None:
        yield
        return
    members.WORLD = _NoGroup(group)
    try:
        yield
    finally:
        members.WORLD = group
