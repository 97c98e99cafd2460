"""Detect changes by users to weights that FSDP has gathered, which FSDP discards when it shards them again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from fabricx.distributed.sharding.fsdp_internals import units_of

_Memory = tuple[bool, int]
_WORDS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # compared as integers, NaN equals NaN


@final
class GatheredWeights:
    """Copies `requires_grad` from gathered weights to their shards; refuses changes of gathered values.

    A module has gathered weights in place of its shards while a unit computes; the outermost unit is gathered from the
    start of a step to the end of its backward. torch copies `requires_grad` from shards to gathered weights only.

    Args:
        module: sharded with `fully_shard`, as are some submodules.
        freed: called with the bytes of gathered weights that were just freed.

    Attributes:
        unfrozen: names of shards that were unfrozen while their gathered weights were in use, since `settle_step`.
    """

    def __init__(self, module: nn.Module, freed: Callable[[int], None]) -> None:
        self._units, self._freed = units_of(module), freed
        self._sizes = [  # bytes of gathered weights
            unit.mesh_info.shard_mesh_size * sum(param._sharded_param_data.nbytes for param in unit.fsdp_params)
            for unit in self._units
        ]
        self.unfrozen: list[str] = []
        self._known: list[dict[int, tuple[bool, _Memory]]] = [{} for _ in self._units]  # (requires_grad, ...) by index
        for number, unit in enumerate(self._units):
            unit._to_unsharded = functools.partial(self._gather, number)
            for name in ("_to_sharded", "_to_sharded_post_forward"):
                setattr(unit, name, functools.partial(self._shard, number, name))

    def settle(self) -> None:
        """Set `requires_grad` of gathered weights and of their shards to the value that was changed last."""
        for number, known in enumerate(self._known):
            for index in known:
                self._settle(number, index)

    def _settle(self, number: int, index: int) -> None:
        known, param = self._known[number], self._units[number].fsdp_params[index]
        trained, memory = known[index]
        whole, shard = param._unsharded_param, param.sharded_param
        if whole.requires_grad != shard.requires_grad:
            changed, other = (whole, shard) if whole.requires_grad != trained else (shard, whole)
            other.requires_grad_(changed.requires_grad)
            if changed is shard and shard.requires_grad:
                self.unfrozen.append(param._param_fqn or "a parameter")
        known[index] = shard.requires_grad, memory

    def register_hooks(self) -> list[Any]:
        """Make each submodule settle its own parameters before its forward; returns the handles of the hooks.

        Otherwise a shard that is frozen before a forward and released after it would be trained by this forward.
        """
        owned: dict[nn.Module, list[tuple[int, int]]] = {}
        for number, unit in enumerate(self._units):
            for index, param in enumerate(unit.fsdp_params):
                for owner in {param._module_info.module, *param._module_info.shared_modules}:
                    owned.setdefault(owner, []).append((number, index))
        return [
            owner.register_forward_pre_hook(functools.partial(self._before_forward, places))
            for owner, places in owned.items()
        ]

    def _before_forward(self, places: list[tuple[int, int]], module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():  # a change of requires_grad would split the graph
            return
        for number, index in places:
            if index in self._known[number]:
                self._settle(number, index)

    @contextlib.contextmanager
    def settle_step(self) -> Iterator[None]:
        """Refuse a training step that unfreezes shards whose weights are already gathered.

        The gathered weights would compute without a gradient in this step. A frozen shard needs no check:
        it receives no gradient, because torch checks `requires_grad` again when a gradient arrives.

        Raises:
            ValueError: the step has unfrozen such shards; the message names the first shard.
        """
        self.settle()
        self.unfrozen.clear()
        yield
        self.settle()
        if self.unfrozen:
            raise ValueError(
                f"training_step has set requires_grad=True on the optimizer's {self.unfrozen[0]} after strategy=fsdp "
                "had gathered the weights of this step, so the parameter would be trained from the next step on "
                "only. Set it on the module's own parameters (self.parameters()), or in on_train_batch_start"
            )

    def shard(self) -> None:
        """Shard weights that were gathered for a forward without a backward, as in a validation."""
        for unit in self._units:
            if unit.is_unsharded:
                unit.reshard()

    def _gather(self, number: int) -> None:
        unit = self._units[number]
        if unit.is_unsharded:
            return
        for param in unit.fsdp_params:
            _check_kept(param)
        type(unit)._to_unsharded(unit)
        self._known[number] = {
            index: (param._unsharded_param.requires_grad, _memory(param))
            for index, param in enumerate(unit.fsdp_params)
        }

    def _shard(self, number: int, name: str) -> None:
        unit, known = self._units[number], self._known[number]
        if known:
            self.settle()
        changed = [
            param._param_fqn
            for param, (_, memory) in zip(unit.fsdp_params, known.values(), strict=False)
            if _is_changed(param, memory)
        ]
        self._known[number] = {}
        getattr(type(unit), name)(unit)
        if known:
            self._freed(self._sizes[number])
        if changed:
            raise ValueError(
                f"{changed[0] or 'a parameter'} was changed or replaced while strategy=fsdp had gathered it, where a "
                "change is lost: change weights in on_train_batch_start, on_after_backward, on_before_optimizer_step "
                "or on_train_batch_end, where each rank has its shard, or use strategy=ddp"
            )


def _check_kept(param: Any) -> None:
    """Refuse a module that has another object in the place of an FSDP parameter, which FSDP would overwrite.

    Raises:
        ValueError: the parameter was replaced.
    """
    owner = param._module_info
    if owner.module._parameters.get(owner.param_name) is not param.sharded_param:
        raise ValueError(
            f"{param._param_fqn or owner.param_name} was replaced by another parameter, or removed, after "
            "strategy=fsdp had sharded it: change its elements instead, for example by `with torch.no_grad(): "
            "weight.copy_(new)`; replace parameters in __init__ or configure_model; or use strategy=ddp"
        )


def _memory(param: Any) -> _Memory:
    """Return whether a gathered weight has the memory that it was gathered to, and its version."""
    whole: Tensor = param._unsharded_param
    with torch._C.DisableTorchFunction():  # a step of tensor parallelism would gather the weight
        memory = whole.untyped_storage()._cdata
        gathered = any(memory == part.untyped_storage()._cdata for part in param.all_gather_outputs)
        return gathered, 0 if whole.is_inference() else whole._version


def _is_changed(param: Any, memory: _Memory) -> bool:
    """Return whether the gathered weights of an FSDP parameter were changed or replaced since they were gathered.

    Writes to `.data` do not increase the version. On a CPU, this rank's part is compared with its shard; on a GPU that
    comparison would synchronise the device.
    """
    owner = param._module_info
    if owner.module._parameters.get(owner.param_name) is not param._unsharded_param:
        return True
    if _memory(param) != memory:
        return True
    whole, shard = param.all_gather_outputs[0], param._sharded_param_data
    if whole.device.type != "cpu":
        return False
    part = whole.view(-1, shard.numel())[param.mesh_info.shard_mesh_rank]
    words = _WORDS.get(part.itemsize, torch.uint8)
    return not torch.equal(part.view(words), shard.to(part.dtype).view(words))
