"""Logits that are sharded over the classes, and their cross-entropy without a gather.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3 (parallel cross-entropy).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fabricx.model_parallel.placement import share
from fabricx.model_parallel.tensor.collectives import summed
from fabricx.model_parallel.tensor.feature_dims import indices
from fabricx.model_parallel.tensor.feature_trace import VIEWS
from fabricx.model_parallel.tensor.local_rules import ELEMENTWISE, basic_index
from fabricx.model_parallel.tensor.sharded_activations import Activations
from fabricx.model_parallel.tensor.sharded_tensor import ShardedTensor


def logits_output(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Apply a function to sharded logits without a gather.

    Args:
        activations: activations of the group.
        func: function of torch.
        args: its arguments, the logits first.
        options: its named arguments.

    Returns:
        the result; NotImplemented if the function needs all classes.
    """
    logits: ShardedTensor = args[0]
    classes, local = logits.shape[-1], logits.local
    if func is F.cross_entropy:
        return cross_entropy(activations, *args, **options)
    if func in VIEWS:
        shape = func(torch.empty(logits.shape, device="meta"), *args[1:], **options).shape
        if shape[-1] != classes:
            return NotImplemented
        return _logits(activations, local.reshape(*shape[:-1], local.shape[-1]), shape)
    if func in ELEMENTWISE and not any(isinstance(arg, Tensor) for arg in (*args[1:], *options.values())):
        return _logits(activations, func(local, *args[1:], **options), logits.shape)
    if func is Tensor.__getitem__:
        entries = indices(logits.shape, args[1])
        if not entries or entries[-1].dim != logits.dim() - 1 or (entries[-1].begin, entries[-1].end) != (0, classes):
            return NotImplemented
        if entries[-1].drops or entries[-1].step != 1:
            return NotImplemented
        shape = torch.empty(logits.shape, device="meta")[args[1]].shape
        index = [basic_index(entry) for entry in entries[:-1]]
        return _logits(activations, local[tuple(index)], shape)
    return NotImplemented


def _logits(activations: Activations, local: Tensor, shape: Sequence[int]) -> ShardedTensor:
    return activations.sharded(local, len(shape) - 1, (shape[-1],), tuple(shape))


def cross_entropy(
    activations: Activations, input: ShardedTensor, target: Tensor, weight: Tensor | None = None,
    size_average: Any = None, ignore_index: int = -100, reduce: Any = None, reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """Compute the cross-entropy of sharded logits; ranks exchange three numbers for each row.

    Args:
        activations: activations of the group.
        input: logits, shape [rows, classes] or [classes].
        target: classes, equal on all ranks.
        weight: as in torch.
        size_average: as in torch.
        ignore_index: as in torch.
        reduce: as in torch.
        reduction: as in torch.
        label_smoothing: as in torch.

    Returns:
        the loss, equal on all ranks; NotImplemented for options that need all classes.

    Raises:
        IndexError: a target is no class.
    """
    special = weight is not None or size_average is not None or reduce is not None or label_smoothing
    if special or input.dim() > 2 or target.dim() != input.dim() - 1 or isinstance(target, ShardedTensor):
        return NotImplemented
    world, local = activations.world, input.local
    if torch.is_autocast_enabled(local.device.type):
        local = local.float()
    computed = local if local.dtype in (torch.float32, torch.float64) else local.float()
    begin, end = share(input.shape[-1], world.rank, world.size)
    valid = target != ignore_index
    inside, known = (target >= begin) & (target < end), (target >= 0) & (target < input.shape[-1])
    if target.device.type == "cpu" and bool((wrong := valid & ~known).any()):
        raise IndexError(f"Target {int(target[wrong][0])} is out of bounds.")  # as in torch
    with torch.no_grad():
        lowest = torch.finfo(computed.dtype).min
        largest = computed.amax(-1) if end > begin else computed.new_full(computed.shape[:-1], lowest)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=world.group)
    shifted = computed - largest.unsqueeze(-1)
    total = summed(shifted.exp().sum(-1), world)
    if end > begin:
        number = (target - begin).masked_fill(~valid | (known & ~inside), 0)  # others are an error on a GPU
        chosen = shifted.gather(-1, number.unsqueeze(-1)).squeeze(-1)
    else:
        chosen = shifted.sum(-1)
    losses = total.log() - summed(chosen.masked_fill(~inside, 0), world)
    losses = losses.masked_fill(~valid, 0).to(local.dtype)
    if reduction == "none":
        return losses
    return losses.sum() / valid.sum() if reduction == "mean" else losses.sum()
