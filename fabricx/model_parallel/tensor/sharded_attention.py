"""Attention on the heads of a rank."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fabricx.model_parallel.tensor.sharded_activations import Activations
from fabricx.model_parallel.tensor.sharded_tensor import ShardedTensor

HEADS: Final = -3  # dim of heads in [..., heads, length, features of a head]


def attend(
    activations: Activations, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None,
    dropout: float = 0.0, causal: bool = False, scale: float | None = None, grouped: bool = False,
    with_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute scaled dot-product attention of this rank's heads.

    Dropout equals that of a single process on a CPU: each rank draws the mask of all heads. On other devices, whose
    kernels draw inside of the attention, and if the sequence is divided, too, each rank uses a stream of its own, and
    the ranks' common stream advances equally on all of them.

    Args:
        activations: activations of the group.
        query: shape [..., heads of this rank, length, features].
        key: shape [..., heads, length of keys, features].
        value: see `key`.
        mask: mask for this rank's heads; floating-point or boolean (True: attend).
        dropout: probability.
        causal: whether a position attends to earlier positions and itself only.
        scale: scale of the products; None for 1 / sqrt(features).
        grouped: whether several heads of the query share a head of the key.
        with_weights: whether the attention weights are returned, too.

    Returns:
        the attention, and the weights after dropout or None.
    """
    options: Any = {"is_causal": causal, "scale": scale, "enable_gqa": grouped}
    if not with_weights and dropout == 0.0:
        return F.scaled_dot_product_attention(query, key, value, mask, **options), None
    if not with_weights and (query.device.type != "cpu" or activations.own_streams):
        seed = int(torch.randint(2**31, ()))
        devices = [] if query.device.type == "cpu" else [query.device]
        kind: Any = {"device_type": query.device.type} if devices else {}
        with torch.random.fork_rng(devices=devices, **kind):
            torch.manual_seed(seed + activations.world.rank)
            return F.scaled_dot_product_attention(query, key, value, mask, dropout, **options), None
    if grouped:
        repeats = query.shape[HEADS] // key.shape[HEADS]
        key, value = key.repeat_interleave(repeats, HEADS), value.repeat_interleave(repeats, HEADS)
    scores = query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale) @ key.transpose(-2, -1)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    if mask is None or with_weights:
        weights = scores.softmax(-1)
    else:  # 0 for a query whose keys are all masked, as in torch; layers that return weights have NaN
        empty = (scores == -math.inf).all(-1, keepdim=True)
        weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    if dropout > 0.0:
        weights = weights * _dropout_mask(activations, weights, dropout)
    return weights @ value, weights


def _dropout_mask(activations: Activations, weights: Tensor, dropout: float) -> Tensor:
    """Return this rank's part of the mask of all heads, which every rank draws."""
    heads, rank = weights.shape[HEADS], activations.world.rank
    shape = list(weights.shape)
    shape[HEADS] = heads * activations.world.size
    return F.dropout(weights.new_ones(shape), dropout).narrow(HEADS, rank * heads, heads)


def local_mask(activations: Activations, mask: Any, heads: int) -> Any:
    """Return the part of an attention mask for this rank's heads.

    Args:
        activations: activations of the group.
        mask: mask for all heads, or with a single head for all of them; ordinary or sharded; None without.
        heads: number of all heads.
    """
    if mask is None:
        return None
    by_head = mask.dim() >= -HEADS and mask.shape[HEADS] == heads and heads > 1
    if by_head:
        return activations.shard_of(mask, mask.dim() + HEADS)
    return activations.input_of(mask)


def scaled_dot_product_attention(
    activations: Activations, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Compute `F.scaled_dot_product_attention` of tensors that are sharded by heads.

    Args:
        activations: activations of the group.
        query: as in torch, with global shapes.
        key: as in torch.
        value: as in torch.
        attn_mask: as in torch.
        dropout_p: as in torch.
        is_causal: as in torch.
        scale: as in torch.
        enable_gqa: as in torch.

    Returns:
        the attention of all heads, sharded by heads; NotImplemented if the tensors are sharded in another way.
    """
    if not isinstance(query, ShardedTensor) or query.sharded_dim != query.dim() + HEADS:
        return NotImplemented
    if not activations.is_even(query):
        return NotImplemented
    heads = query.shape[HEADS]
    if key.dim() != query.dim() or value.dim() != query.dim():
        return NotImplemented
    if enable_gqa and key.shape[HEADS] == value.shape[HEADS] == 1:
        key, value = activations.input_of(key), activations.input_of(value)  # all heads read the same keys
    elif key.shape[HEADS] % activations.world.size or value.shape[HEADS] % activations.world.size:
        return NotImplemented
    else:
        key, value = (activations.shard_of(tensor, tensor.dim() + HEADS) for tensor in (key, value))
    mask = local_mask(activations, attn_mask, heads)
    output, _ = attend(
        activations, query.local, key, value, mask, dropout_p, is_causal, scale, grouped=enable_gqa
    )  # fmt: skip
    return activations.sharded(output, output.dim() + HEADS)
