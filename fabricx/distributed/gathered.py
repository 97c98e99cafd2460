"""What users change of weights that FSDP has gathered, and would forget as it shards these again."""

from __future__ import annotations

import functools
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from fabricx.distributed.fsdp_internals import units_of

_WORDS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # NaN is equal to itself as a word


@final
class Gathered:
    """Lets shards be trained, or frozen, as their gathered weights are; refuses values that are changed there.

    The module has gathered weights in the place of its shards while a unit computes; the outermost unit has them from
    the begin of a step to the end of its backward. torch gives a shard's `requires_grad` to the gathered weights, never
    the other way round.

    Args:
        module: sharded, as are some of its parts.
    """

    def __init__(self, module: nn.Module) -> None:
        self._units = units_of(module)
        self._known: list[dict[int, tuple[bool, int]]] = [{} for _ in self._units]  # of each gathered parameter
        for number, unit in enumerate(self._units):
            unit._to_unsharded = functools.partial(self._gather, number)
            for name in ("_to_sharded", "_to_sharded_post_forward"):
                setattr(unit, name, functools.partial(self._shard, number, name))

    def settle(self) -> None:
        """Let gathered weights and their shards require a gradient alike: as what was changed of them last."""
        for unit, known in zip(self._units, self._known, strict=True):
            for place, (trained, version) in known.items():
                each = unit.fsdp_params[place]
                whole, shard = each._unsharded_param, each.sharded_param
                if whole.requires_grad != shard.requires_grad:
                    changed, other = (whole, shard) if whole.requires_grad != trained else (shard, whole)
                    other.requires_grad_(changed.requires_grad)
                known[place] = shard.requires_grad, version

    def shard(self) -> None:
        """Shard what was gathered for a forward without a backward, as in a validation."""
        for unit in self._units:
            if unit.is_unsharded:
                unit.reshard()

    def _gather(self, number: int) -> None:
        unit = self._units[number]
        if unit.is_unsharded:
            return
        type(unit)._to_unsharded(unit)
        self._known[number] = {
            place: (each._unsharded_param.requires_grad, _version(each._unsharded_param))
            for place, each in enumerate(unit.fsdp_params)
        }

    def _shard(self, number: int, name: str) -> None:
        unit, known = self._units[number], self._known[number]
        if known:
            self.settle()
        changed = [
            each._param_fqn
            for each, (_, version) in zip(unit.fsdp_params, known.values(), strict=False)
            if _is_changed(each, version)
        ]
        self._known[number] = {}
        getattr(type(unit), name)(unit)
        if changed:
            raise ValueError(
                f"{changed[0] or 'a parameter'} was changed while strategy=fsdp had gathered it, where a change is "
                "lost: change weights in on_train_batch_start, on_after_backward, on_before_optimizer_step or "
                "on_train_batch_end, where each rank has its shard, or take strategy=ddp"
            )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_changed(each: Any, version: int) -> bool:
    """Return whether gathered weights are others than those that were gathered.

    What is written to `.data` isn't counted; on a CPU this rank's part is compared. A GPU would have to be waited for.
    """
    if _version(each._unsharded_param) != version:
        return True
    whole, shard = each.all_gather_outputs[0], each._sharded_param_data
    if whole.device.type != "cpu":
        return False
    part = whole.view(-1, shard.numel())[each.mesh_info.shard_mesh_rank]
    words = _WORDS.get(part.itemsize, torch.uint8)
    return not torch.equal(part.view(words), shard.to(part.dtype).view(words))
