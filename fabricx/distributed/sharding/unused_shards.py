"""Complete FSDP's gradient reduction when ranks have gradients for different parameters of a unit."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import nn

from fabricx.distributed.sharding.fsdp_internals import units_of
from fabricx.distributed.sharding.grad_hooks import no_hook
from fabricx.distributed.world import World


@final
class UnusedShards:
    """Makes all ranks reduce the same gradients of a unit, also if they use different parameters of the unit.

    FSDP reduces only the gradients that a rank has, so ranks with gradients for different parameters of a unit would
    mix them. This class replaces missing gradients by zeros. A parameter without a gradient on any rank has `grad =
    None` afterwards, as in one process, so weight decay and momentum skip it. Gradients of a rank without data, which
    computes along with a loss of zero (`without_data`), count as missing.

    A rank with missing gradients writes them to the store before it reduces a unit. After the backward, all ranks have
    reduced all units; a rank that has written nothing has all gradients. Therefore no further collective is needed, and
    ranks without missing gradients do nothing.

    Args:
        world: the ranks.
        module: sharded with `fully_shard`, as are some submodules.
        unreached: also reduce units that this rank's backward does not reach, because another rank's backward may reach
            them. False where most steps skip units on all ranks (manual optimization).
    """

    def __init__(self, world: World, module: nn.Module, *, unreached: bool) -> None:
        self._world = world
        self._skipped = {"POST_BACKWARD"} if unreached else {"POST_BACKWARD", "IDLE"}  # FSDP calls POST_BACKWARD twice
        self._units = units_of(module)
        self._missing: dict[int, set[int]] = {}  # unit -> indices of parameters without a gradient in this backward
        self._of_data: set[tuple[int, int]] | None = None  # parameters with a gradient of data; None: all of them
        self._reductions = 0  # number of backwards with a reduction, the same on all ranks
        self._reduced = False
        self._written: list[str] = []  # keys of this backward
        self._read: list[str] = []  # keys of the previous backward, which all ranks read before they reduce again
        for number, unit in enumerate(self._units):
            unit.post_backward = functools.partial(self._post_backward, number, unit)

    def _post_backward(self, number: int, unit: Any, *args: Any) -> Any:
        if unit.reduce_grads and unit._training_state.name not in self._skipped:
            self._reduced = True
            self._complete(number, unit)
        return type(unit).post_backward(unit, *args)

    def check_hooks(self) -> None:
        """Refuse `register_hook` on shards, also hooks added since the last check: such hooks are never called.

        Raises:
            ValueError: a shard has such a hook; the message names the parameter.
        """
        for unit in self._units:
            for param in unit.fsdp_params:
                if param.sharded_param._backward_hooks:
                    raise ValueError(no_hook(param._param_fqn or "a parameter"))

    def _complete(self, number: int, unit: Any) -> None:
        """Set missing gradients of a unit to zero, and publish the indices of these parameters in the store."""
        missing, kept = set(), set()
        for index, param in enumerate(unit.fsdp_params):
            whole = getattr(param, "_unsharded_param", None)
            if whole is None or not whole.requires_grad:
                continue
            has_gradient = _has_gradient(param)
            if not has_gradient:
                whole.grad = torch.zeros_like(whole)
            if not has_gradient or (self._of_data is not None and (number, index) not in self._of_data):
                missing.add(index)
                if param.sharded_param.grad is not None:  # gradient of an earlier backward
                    kept.add(index)
        before = self._missing.get(number)  # a unit that is called twice in a step is reduced twice
        missing = missing - kept if before is None else missing & before
        self._missing[number] = missing
        if missing or before:
            assert self._world.store is not None
            key = self._key(number, self._world.rank)
            self._world.store.set(key, " ".join(map(str, missing)))
            self._written.append(key)

    def end(self) -> None:
        """Remove the zero gradients of parameters that no rank has used; called after a backward."""
        if not self._reduced:
            return
        if any(self._missing.values()) and self._world.device.type == "cuda":
            torch.cuda.current_stream(self._world.device).synchronize()  # until all ranks have reduced
        for number, missing in self._missing.items():
            for index in self._missing_everywhere(number, missing):
                self._units[number].fsdp_params[index].sharded_param.grad = None
        for key in set(self._read):
            assert self._world.store is not None
            self._world.store.delete_key(key)
        self._read, self._written = self._written, []
        self._missing, self._reduced = {}, False
        self._reductions += 1

    @contextlib.contextmanager
    def without_data(self) -> Iterator[None]:
        """Context of a backward with a loss of zero: a parameter that only this backward reaches has no gradient."""
        self._of_data = {place for place, param in self._parameters() if _has_gradient(param)}
        try:
            yield
            for place, param in self._parameters():
                if place not in self._of_data:  # not reduced, before the last backward of a window
                    _forget_gradient(param)
        finally:
            self._of_data = None

    def _parameters(self) -> Iterator[tuple[tuple[int, int], Any]]:
        for number, unit in enumerate(self._units):
            for index, param in enumerate(unit.fsdp_params):
                yield (number, index), param

    def forget(self) -> None:
        """Discard gradients of an incomplete accumulation window, which FSDP keeps where zero_grad does not reach."""
        for _, param in self._parameters():
            _forget_gradient(param)

    def _missing_everywhere(self, number: int, missing: set[int]) -> set[int]:
        store = self._world.store
        for rank in range(self._world.size) if missing else ():
            key = self._key(number, rank)
            assert store is not None
            missing = missing & set(map(int, store.get(key).split())) if store.check([key]) else set()
        return missing

    def _key(self, number: int, rank: int) -> str:
        world = self._world
        return world.key(f"unused/{world.generation}/{self._reductions}/{number}/{rank}")


def _has_gradient(param: Any) -> bool:
    """Return whether an FSDP parameter has a gradient that is not reduced yet."""
    whole = getattr(param, "_unsharded_param", None)
    accumulated = getattr(param, "unsharded_accumulated_grad", None)
    return accumulated is not None or (whole is not None and whole.grad is not None)


def _forget_gradient(param: Any) -> None:
    if "unsharded_accumulated_grad" in vars(param):  # from torch 2.15 on, it is `whole.grad`
        param.unsharded_accumulated_grad = None
    if (whole := getattr(param, "_unsharded_param", None)) is not None:
        whole.grad = None
