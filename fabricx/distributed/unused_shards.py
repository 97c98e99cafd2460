"""Parameters of a sharded module without a gradient in a backward on this rank."""

from __future__ import annotations

import functools
from typing import Any, final

import torch
from torch import nn

from fabricx.distributed.fsdp_internals import units_of
from fabricx.distributed.grad_hooks import no_hook
from fabricx.distributed.world import World


@final
class UnusedShards:
    """Lets ranks that use different parameters of a unit reduce the same gradients.

    FSDP reduces the gradients that a rank has, so ranks with gradients for different parameters of a unit would mix
    them. Here a missing gradient is zero. A parameter that has no gradient on any rank has none afterwards, as in one
    process: weight decay and momentum leave it alone.

    A rank with missing gradients writes them to the store before it reduces a unit. When the backward has ended, all
    ranks have reduced all units; a rank that has not written has all gradients. So no collective is needed, and ranks
    without missing gradients do nothing.

    Args:
        world: the ranks.
        module: sharded, as are some of its parts.
        unreached: reduce units too that a backward does not reach, since it may reach them on another rank. Not where
            a step may leave units out on all ranks, and does so in most steps (manual optimization).
    """

    def __init__(self, world: World, module: nn.Module, *, unreached: bool) -> None:
        self._world = world
        self._skipped = {"POST_BACKWARD"} if unreached else {"POST_BACKWARD", "IDLE"}  # the first is called once more
        self._units = units_of(module)
        self._missing: dict[int, set[int]] = {}  # by unit, numbers of parameters, in this backward
        self._reductions = 0  # backwards that have reduced, the same on all ranks
        self._reduced = False
        self._written: list[str] = []  # keys of this backward
        self._read: list[str] = []  # keys of the one before, which all ranks have read before they reduce again
        for number, unit in enumerate(self._units):
            unit.post_backward = functools.partial(self._post_backward, number, unit)

    def _post_backward(self, number: int, unit: Any, *args: Any) -> Any:
        if unit.reduce_grads and unit._training_state.name not in self._skipped:
            self._reduced = True
            self._complete(number, unit)
        return type(unit).post_backward(unit, *args)

    def check_hooks(self) -> None:
        """Refuse hooks of shards that are never called; some may be new.

        Raises:
            ValueError: a shard has one; the message names it.
        """
        for unit in self._units:
            for each in unit.fsdp_params:
                if each.sharded_param._backward_hooks:
                    raise ValueError(no_hook(each._param_fqn or "a parameter"))

    def _complete(self, number: int, unit: Any) -> None:
        """Give each parameter of a unit a gradient, and tell the other ranks which had none."""
        missing, kept = set(), set()
        for place, each in enumerate(unit.fsdp_params):
            whole = getattr(each, "_unsharded_param", None)
            if whole is None or not whole.requires_grad:
                continue
            if whole.grad is None and getattr(each, "unsharded_accumulated_grad", None) is None:
                whole.grad = torch.zeros_like(whole)
                missing.add(place)
                if each.sharded_param.grad is not None:  # of a backward before
                    kept.add(place)
        before = self._missing.get(number)  # a unit that is called twice in a step is reduced twice
        missing = missing - kept if before is None else missing & before
        self._missing[number] = missing
        if missing or before:
            assert self._world.store is not None
            key = self._key(number, self._world.rank)
            self._world.store.set(key, " ".join(map(str, missing)))
            self._written.append(key)

    def end(self) -> None:
        """Take the gradients of zero away that no rank has computed; a backward has ended."""
        if not self._reduced:
            return
        if any(self._missing.values()) and self._world.device.type == "cuda":
            torch.cuda.current_stream(self._world.device).synchronize()  # until all ranks have reduced
        for number, missing in self._missing.items():
            for place in self._missing_everywhere(number, missing):
                self._units[number].fsdp_params[place].sharded_param.grad = None
        for key in set(self._read):
            assert self._world.store is not None
            self._world.store.delete_key(key)
        self._read, self._written = self._written, []
        self._missing, self._reduced = {}, False
        self._reductions += 1

    def forget(self) -> None:
        """Forget the gradients of microbatches whose window isn't closed: FSDP keeps them where zero_grad can't see."""
        for each in (each for unit in self._units for each in unit.fsdp_params):
            each.unsharded_accumulated_grad = None
            if (whole := getattr(each, "_unsharded_param", None)) is not None:
                whole.grad = None

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
