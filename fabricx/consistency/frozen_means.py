"""Means over ranks of frozen parameters that user code changes, such as the moving average of a teacher."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, final

import torch
from torch import Tensor

from fabricx.consistency.weight_changes import digest
from fabricx.core.module_state.placeholder import is_placeholder
from fabricx.distributed.sharding.dtensors import is_dtensor, own_part, with_part
from fabricx.distributed.world import World

_READ_FIRST: Final = 4  # joins in which values are compared, and then each of these:
_READ_EVERY: Final = 32  # torch's counters of changes miss writes to `.data`


@final
class FrozenMeans:
    """Averages the frozen parameters that have ever been changed on some rank; others cost no communication.

    Args:
        parameters: frozen parameters, as many and in the same order on all ranks.
        former: means of the same parameters, whose changed ones are those of this object, too.
    """

    def __init__(self, parameters: Iterable[Tensor], former: FrozenMeans | None = None) -> None:
        self._parameters = [p for p in parameters if p.is_floating_point() and not is_placeholder(p)]
        self._changed = [False] * len(self._parameters)
        if former is not None and len(former._changed) == len(self._changed):
            self._changed = former._changed
        self._marks = [_mark(parameter) for parameter in self._parameters]
        self._digests = [digest([own_part(p).detach()]).clone() for p in self._parameters]
        self._joins = 0
        self._local: dict[int, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def join(self, world: World, *, read: bool = False, shown: bool = False) -> None:
        """Set the changed parameters to their means over ranks; every rank calls it.

        Args:
            world: ranks that average.
            read: find changes by values in any case.
            shown: until `restore`, which sets the values of this rank again.
        """
        if world.size == 1 or not self._parameters:
            return
        self.restore()
        read = read or self._joins < _READ_FIRST or self._joins % _READ_EVERY == 0
        self._joins += 1
        flags = [self._changed[n] or self._has_changed(n, read=read) for n in range(len(self._parameters))]
        changed = torch.tensor(flags, dtype=torch.int32, device=world.device)
        self._changed = [bool(flag) for flag in world.all_reduce(changed, "max").tolist()]
        for number, parameter in enumerate(self._parameters):
            if self._changed[number]:
                part = own_part(parameter)
                local = part.detach().clone() if shown else None
                part.copy_(world.all_reduce(part.detach().clone()).div_(world.size))
                if local is not None:
                    self._local[number] = local, part.detach().clone()

    @torch.no_grad()
    def restore(self) -> None:
        """Set the values of this rank again, except for elements that hooks have changed since they were averaged."""
        for number in self._local:
            own_part(self._parameters[number]).copy_(self._local_part(number))
        self._local = {}

    def local(self) -> dict[int, Tensor]:
        """Return the values that `restore` would set, by the `id` of the parameter."""
        parameters = {number: self._parameters[number] for number in self._local}
        return {
            id(p): with_part(p, part) if is_dtensor(p) else part
            for number, p in parameters.items()
            for part in [self._local_part(number)]
        }

    def changed(self) -> list[bool]:
        """Return, for each parameter, whether it has ever been changed on some rank."""
        return [self._changed[n] or self._has_changed(n, read=True) for n in range(len(self._parameters))]

    def add_changed(self, changed: Sequence[bool]) -> None:
        """Count parameters as changed that a former process has changed.

        Args:
            changed: result of `changed` there.
        """
        self._changed = [before or now for before, now in zip(changed, self._changed, strict=True)]

    def values(self) -> list[Tensor]:
        """Return copies of the changed parameters."""
        held = zip(self._parameters, self._changed, strict=True)
        return [own_part(parameter).detach().clone() for parameter, changed in held if changed]

    @torch.no_grad()
    def set_means(self, by_rank: Sequence[Sequence[Tensor]]) -> None:
        """Set the changed parameters to means.

        Args:
            by_rank: results of `values`.
        """
        held = [parameter for parameter, changed in zip(self._parameters, self._changed, strict=True) if changed]
        for parameter, values in zip(held, zip(*by_rank, strict=True), strict=True):
            own_part(parameter).copy_(torch.stack(values).mean(0))

    def _local_part(self, number: int) -> Tensor:
        part, (local, mean) = own_part(self._parameters[number]), self._local[number]
        return torch.where(part == mean, local, part).detach()

    def _has_changed(self, number: int, *, read: bool) -> bool:
        parameter = self._parameters[number]
        if _mark(parameter) != self._marks[number]:
            return True
        return read and not torch.equal(digest([own_part(parameter).detach()]), self._digests[number])


def _mark(parameter: Tensor) -> tuple[int, int]:
    local = own_part(parameter)
    return local.data_ptr(), 0 if local.is_inference() else local._version
