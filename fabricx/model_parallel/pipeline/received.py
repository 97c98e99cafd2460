"""Tensors with which the graph of a stage begins, and their gradients."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor


@final
class Received:
    """The gradient of a tensor that a chunk has received."""

    def __init__(self) -> None:
        self._gradient: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        """Add a gradient; called within the backward.

        Args:
            gradient: in the shape of the tensor.
        """
        self._gradient = gradient if self._gradient is None else self._gradient + gradient

    @property
    def exists(self) -> bool:
        """Return whether the loss depends on the tensor."""
        return self._gradient is not None

    def gradient(self, tensor: Tensor) -> Tensor:
        """Return the gradient; zeros if nothing depends on the tensor.

        Args:
            tensor: a tensor of the same shape.
        """
        return torch.zeros_like(tensor) if self._gradient is None else self._gradient


def refuse_gradient(block: str, gradient: Tensor) -> None:
    """Refuse a gradient of an output that another stage has, and that the trial run did not use in this way.

    Args:
        block: name of the block.
        gradient: of its output.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"the loss depends on the output of {block}, which this stage of the pipeline does not have, since the step of "
        "the trial run before training did not use it after the blocks. Use it in each step, for example multiplied by "
        "0.0, or use strategy=tensor or strategy=fsdp"
    )


def attach(tensor: Tensor, gradient: Received) -> None:
    """Begin a graph with a tensor; it is no leaf, so that a block may change its argument in place.

    Args:
        tensor: without a graph.
        gradient: receives the gradient of the tensor.
    """
    root = torch.zeros((), device=tensor.device, requires_grad=True)
    with torch.enable_grad():
        _Enter.apply(root, tensor, gradient)  # type: ignore[no-untyped-call]


class _Enter(torch.autograd.Function):
    """Makes a tensor part of a graph that begins with it."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, tensor: Tensor, received: Received) -> Tensor:
        ctx.received = received
        ctx.mark_dirty(tensor)
        ctx.set_materialize_grads(False)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if gradients[0] is not None:
            ctx.received.add(gradients[0])
        return None, None, None
