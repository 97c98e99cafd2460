"""Computation of sharded layers: each rank computes with its shard of the weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fabricx.core.module_state.placeholder import is_placeholder
from fabricx.model_parallel.placement import Placement, share
from fabricx.model_parallel.tensor.collectives import copied, scattered_sum, summed
from fabricx.model_parallel.tensor.parallel_layers import Layer
from fabricx.model_parallel.tensor.sharded_activations import Activations
from fabricx.model_parallel.tensor.sharded_attention import HEADS, attend, local_mask
from fabricx.model_parallel.tensor.sharded_tensor import ShardedTensor


@dataclass(frozen=True)
class Weight:
    """A sharded parameter.

    Attributes:
        name: name of the parameter in the root module.
        layer: sharding of the layer that has the weight.
        placement: placement of the parameter.
    """

    name: str
    layer: Layer
    placement: Placement


@final
class LayerFunctions:
    """Functions of sharded layers on whole or sharded inputs.

    Args:
        activations: activations of the group.

    Attributes:
        sequence: whether the residual stream is sharded along the sequence (dim 1) at this point of the step.
    """

    def __init__(self, activations: Activations) -> None:
        self._activations, self._world = activations, activations.world
        self._input: tuple[Any, int, bool] = (None, 0, False)
        self._copy: Tensor | None = None
        self.sequence = False

    def forget(self) -> None:
        """Release the tensors of the step."""
        self._input, self._copy = (None, 0, False), None

    def linear(self, weight: Weight, input: Any, local: Tensor, bias: Tensor | None = None) -> Any:
        """Do what `F.linear` does.

        Args:
            weight: the sharded weight.
            input: ordinary or sharded, shape [..., features].
            local: shard of the weight on this rank.
            bias: shard of the bias; the whole bias of a rowwise layer; or None.
        """
        if weight.layer.style == "rowwise":
            return self._rowwise(F.linear(self._shard(input), local), bias)
        return self._outputs(weight, F.linear(self.whole_input(input), local, bias))

    def addmm(self, weight: Weight, bias: Tensor, input: Any, local: Tensor) -> Any:
        """Compute `torch.addmm` for the linear layer of GPT-2, which has a weight of shape [inputs, outputs].

        Args:
            weight: the sharded weight.
            bias: shard of the bias; the whole bias of a rowwise layer.
            input: ordinary or sharded, shape [rows, features].
            local: shard of the weight on this rank.
        """
        if weight.layer.style == "rowwise":
            return self._rowwise(self._shard(input) @ local, bias)
        return self._outputs(weight, torch.addmm(bias, self.whole_input(input), local))

    def embedding(
        self, weight: Weight, input: Any, local: Tensor, padding_idx: int | None = None,
        max_norm: float | None = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
    ) -> Tensor:  # fmt: skip
        """Do what `F.embedding` does: a rank looks up the ids of its rows, and the sum over ranks is the result.

        Args:
            weight: the sharded weight.
            input: ids, equal on all ranks.
            local: shard of the weight on this rank.
            padding_idx: as in torch.
            max_norm: None.
            norm_type: not used.
            scale_grad_by_freq: False.
            sparse: False.

        Raises:
            IndexError: an id is not in the table.
            ValueError: an option changes the weight or needs all of its rows.
        """
        if max_norm is not None or scale_grad_by_freq or sparse:
            raise ValueError(
                f"{weight.name}: an embedding with max_norm, scale_grad_by_freq or sparse gradients can't be sharded "
                "by rows; keep it whole: set plan={'LAYER': 'replicate'} with the name of the embedding"
            )
        ids = self._activations.whole(input)
        rows = weight.placement.shape[0]
        begin, end = share(rows, self._world.rank, self._world.size)
        if is_placeholder(local):  # of another stage: only the shape of the result is used
            return local.new_zeros((*ids.shape, local.shape[1])) + local[:1, :1].sum()
        known = (ids >= 0) & (ids < rows)  # on a GPU, the lookup of another id is an error
        if ids.device.type == "cpu" and not bool(known.all()):
            raise IndexError(f"{weight.name.rpartition('.')[0]}: index {int(ids[~known][0])} of {rows} is out of range")
        if begin == end:  # more ranks than blocks of rows
            return summed(local.new_zeros((*ids.shape, local.shape[1])) + local.sum() * 0, self._world)
        padding = -1 if padding_idx is None else padding_idx % rows - begin
        inside = (ids >= begin) & (ids < end)
        embedded = F.embedding(
            (ids - begin).masked_fill(known & ~inside, 0), local, padding if 0 <= padding < end - begin else None
        )
        return summed(embedded.masked_fill(~inside.unsqueeze(-1), 0), self._world)

    def whole_input(self, input: Any) -> Tensor:
        """Return the input of sharded layers; layers that follow each other on the same input share a backward sum.

        Args:
            input: ordinary or sharded.
        """
        changed = input.local if isinstance(input, ShardedTensor) else input  # by functions in place
        if changed.is_inference():  # torch counts no changes
            return self._activations.input_of(input)
        key = (input, changed._version, torch.is_grad_enabled())
        if self._copy is None or self._input[0] is not input or self._input[1:] != key[1:]:
            self._input = key
            self._copy = self._activations.input_of(input)
        return self._copy

    def _shard(self, input: Any) -> Tensor:
        return self._activations.shard_of(input, input.dim() - 1)

    def _outputs(self, weight: Weight, output: Tensor) -> Any:
        if weight.layer.style == "colwise":
            return self._activations.sharded(output, output.dim() - 1, weight.layer.parts)
        classes = weight.placement.shape[weight.placement.dim]
        return self._activations.sharded(output, output.dim() - 1, (classes,), (*output.shape[:-1], classes))

    def _rowwise(self, output: Tensor, bias: Tensor | None) -> Any:
        bias = None if bias is None else bias.to(output.dtype)  # of autocast
        if self.sequence and output.dim() > 2:
            local = scattered_sum(output, self._world, 1)
            local = local if bias is None else local + copied(bias, self._world)
            return self._activations.sharded(local, 1, (), output.shape)
        total = summed(output, self._world)
        return total if bias is None else total + bias

    # -- nn.MultiheadAttention ----------------------------------------------------------------------------------

    def multi_head_attention(
        self, weight: Weight, query: Any, key: Any, value: Any, embed_dim_to_check: int, num_heads: int,
        in_proj_weight: Tensor | None, in_proj_bias: Tensor | None, bias_k: Any, bias_v: Any, add_zero_attn: bool,
        dropout_p: float, out_proj_weight: Tensor, out_proj_bias: Tensor | None, training: bool = True,
        key_padding_mask: Any = None, need_weights: bool = True, attn_mask: Any = None,
        use_separate_proj_weight: bool = False, q_proj_weight: Tensor | None = None,
        k_proj_weight: Tensor | None = None, v_proj_weight: Tensor | None = None, static_k: Any = None,
        static_v: Any = None, average_attn_weights: bool = True, is_causal: bool = False,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Do what `F.multi_head_attention_forward` does, with this rank's heads.

        Args:
            weight: a sharded weight of the layer.
            query: shape [length, batch, features], or without batch.
            key: see `query`.
            value: see `query`.
            embed_dim_to_check: features.
            num_heads: of all ranks.
            in_proj_weight: shards of q, k and v; None with separate weights.
            in_proj_bias: shards of q, k and v; or None.
            bias_k: None.
            bias_v: None.
            add_zero_attn: False.
            dropout_p: probability.
            out_proj_weight: shard.
            out_proj_bias: whole; or None.
            training: whether dropout is active.
            key_padding_mask: as in torch.
            need_weights: as in torch.
            attn_mask: as in torch.
            use_separate_proj_weight: as in torch.
            q_proj_weight: shard.
            k_proj_weight: shard.
            v_proj_weight: shard.
            static_k: None.
            static_v: None.
            average_attn_weights: as in torch.
            is_causal: as in torch.
        """
        batched = query.dim() == 3
        weights: Sequence[Tensor | None] = (q_proj_weight, k_proj_weight, v_proj_weight)
        if not use_separate_proj_weight:
            assert in_proj_weight is not None
            weights = in_proj_weight.chunk(3)
        biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
        heads = num_heads // self._world.size
        projected = []
        for tensor, local, bias in zip((query, key, value), weights, biases, strict=True):
            assert local is not None
            output = F.linear(self.whole_input(tensor), local, bias)
            output = output if batched else output.unsqueeze(1)
            projected.append(output.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3))
        batch, length, keys = projected[0].shape[0], projected[0].shape[2], projected[1].shape[2]
        mask = self._mask(attn_mask, key_padding_mask, (batch, num_heads, length, keys), query.dtype)
        q, k, v = projected
        dropout, causal = dropout_p if training else 0.0, is_causal and mask is None
        attended, dropped = attend(self._activations, q, k, v, mask, dropout, causal, with_weights=need_weights)
        attended = attended.permute(2, 0, 1, 3).flatten(-2)
        output = self._rowwise(F.linear(attended if batched else attended.squeeze(1), out_proj_weight), out_proj_bias)
        if dropped is None:
            return output, None
        if average_attn_weights:
            shown: Any = summed(dropped.sum(1), self._world) / num_heads
        else:
            shown = self._activations.sharded(dropped, 1)
        if not batched:
            shown = self._activations.whole(shown).squeeze(0)
        return output, shown

    def _mask(self, attention: Any, padding: Any, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Return the sum of the masks of torch's layer (True: do not attend) for this rank's heads."""
        total = None
        if attention is not None:
            attention = self._activations.whole(attention)
            if attention.dim() == 3:
                attention = attention.view(shape[0], -1, *shape[2:])
            total = local_mask(self._activations, _added(attention, dtype), shape[HEADS])
        if padding is not None:
            padding = _added(self._activations.whole(padding), dtype).view(-1, 1, 1, shape[-1])
            total = padding if total is None else total + padding
        return total


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask that is added to attention scores."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
