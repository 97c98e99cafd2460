"""Data-parallel training in a few lines: a strategy outside of the package."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fabricx as fx


class PlainDDP(fx.Strategy):
    """Each rank keeps the whole model; the ranks add their gradients before each update."""

    def setup(self, module: nn.Module, *, several_backwards: bool = False) -> None:
        super().setup(module)
        if several_backwards:
            raise ValueError("PlainDDP reduces gradients once per update: use automatic optimization")
        for tensor in (*module.parameters(), *module.buffers()):
            self.data_ranks.broadcast(tensor.data)

    def backward(self, loss: Tensor, compute: Callable[[], None] | None = None) -> None:
        super().backward(loss, compute)
        self.backward_without_data()

    def backward_without_data(self, example: tuple[Any, ...] = ()) -> bool:
        assert self.module is not None
        for parameter in self.module.parameters():
            if self.ends_window and parameter.requires_grad:  # once for each update
                if parameter.grad is None:  # no sample, or not used in this batch: the same collectives on all ranks
                    parameter.grad = torch.zeros_like(parameter)
                self.data_ranks.all_reduce(parameter.grad)
        return True
