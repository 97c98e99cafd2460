"""A tensor of which each rank of a tensor-parallel group has a shard; it has the shape of the whole tensor."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

_OUTSIDE = (
    "an activation that is sharded over tensor-parallel ranks was used outside of the module's step, or by a function "
    "that torch does not let fabricx see, such as a custom autograd function; keep the layers before and after it "
    "whole: set plan={'LAYER': 'replicate'} with their names"
)
_REENTRANT = (
    "activation checkpointing with use_reentrant=True hides activations that are sharded over tensor-parallel ranks: "
    "pass use_reentrant=False (in transformers, gradient_checkpointing_kwargs={'use_reentrant': False})"
)
_SET = (
    "set_ was called with a tensor of which each tensor-parallel rank has a part: change a weight by weight.copy_(new) "
    "in no_grad"
)


@final
class ShardedTensor(Tensor):
    """An activation between sharded layers. Functions compute with `local`; it has no other data.

    Autograd records the operations on `local`; this object has the shape, dtype and device of the whole tensor.

    Args:
        local: shard of this rank.
        dim: dimension that is sharded; 0 or more.
        shape: shape of the whole tensor.
        parts: sizes in `dim` of the parts of a fused projection, whose shards are side by side in `local`; the number
            of classes for logits; () for a shard in the order of the whole tensor.

    Attributes:
        local: shard of this rank.
        sharded_dim: dimension that is sharded.
        parts: as the argument.
    """

    local: Tensor
    sharded_dim: int
    parts: tuple[int, ...]

    @staticmethod
    def __new__(
        cls: Any, local: Tensor, dim: int, shape: tuple[int, ...], parts: tuple[int, ...] = ()
    ) -> ShardedTensor:
        """Return the tensor; see the class."""
        whole: ShardedTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, strides=_strides(local, dim, shape[dim]), dtype=local.dtype, device=local.device,
            requires_grad=local.requires_grad,
        )  # fmt: skip
        whole.local, whole.sharded_dim, whole.parts = local, dim, parts
        return whole

    def __init__(self, *_: Any) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        """Refuse operations that have no rule.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(_SET if func.__name__.startswith("set_.") else f"{func}: {_OUTSIDE}")

    def check_usable(self) -> None:
        """Refuse the output of a custom autograd function; its gradient would be lost.

        Raises:
            NotImplementedError: the tensor has a history in autograd.
        """
        if self.grad_fn is not None:
            name = self.grad_fn.name()
            raise NotImplementedError(f"{name}: {_REENTRANT if name.startswith('CheckpointFunction') else _OUTSIDE}")


def _strides(local: Tensor, dim: int, size: int) -> tuple[int, ...]:
    """Return the strides that the whole tensor has in a single process."""
    length, strides = local.shape[dim], local.stride()
    if length in (size, 0):
        return strides
    inner = strides[dim]
    return tuple(
        [
            stride // length * size if stride >= inner and other != dim and stride else stride
            for other, stride in enumerate(strides)
        ]
    )
