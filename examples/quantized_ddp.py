"""Data-parallel training with gradients of 8 bits: a strategy outside of the package."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import fabricx as fx
from fabricx.core.strategy_parts import KeepsLocalState


class QuantizedDDP(fx.Strategy, KeepsLocalState):
    """Each rank keeps the whole model; ranks exchange gradients as int8, and keep the rounding error for the next step.

    Source of the error feedback: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014.
    """

    traits = fx.Traits(unreplicated=True)  # each rank has its own rounding errors

    def setup(self, module: nn.Module, *, several_backwards: bool = False) -> None:
        super().setup(module)
        if several_backwards:
            raise ValueError("QuantizedDDP reduces gradients once per update: use automatic optimization")
        for tensor in (*module.parameters(), *module.buffers()):
            self.world.broadcast(tensor.data)
        self._errors = {name: torch.zeros_like(parameter) for name, parameter in module.named_parameters()}

    def backward(self, loss: Tensor, compute: Callable[[], None] | None = None) -> None:
        super().backward(loss, compute)
        self.backward_without_data()

    def backward_without_data(self, example: tuple[Any, ...] = ()) -> bool:
        assert self.module is not None
        for name, parameter in self.module.named_parameters():
            if self.ends_window and parameter.requires_grad:  # once for each update
                exact = self._errors[name] + (0.0 if parameter.grad is None else parameter.grad)
                scale = (exact.abs().max() / 127).clamp(min=1e-30)
                rounded = (exact / scale).round()
                self._errors[name] = (exact - rounded * scale).nan_to_num(0, 0, 0)  # NaN would stay for ever
                scales = self.data_ranks.all_gather(scale).view(-1, *[1] * exact.dim())
                parameter.grad = (self.data_ranks.all_gather(rounded.to(torch.int8)) * scales).sum(0)
        return True

    def state_dict(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        return {**super().state_dict(module, optimizers), "errors": self.world.gather_objects(dict(self._errors))}

    def load_state_dict(self, state: dict[str, Any], module: nn.Module, optimizers: list[Optimizer]) -> None:
        super().load_state_dict(state, module, optimizers)
        if len(state.get("errors", [])) == self.world.size:  # otherwise written by another strategy, or on other ranks
            self._errors = dict(state["errors"][self.world.rank])

    def local_state_dict(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        return {**super().state_dict(module, optimizers), "errors": dict(self._errors)}

    def load_local_states(self, states: Any, module: nn.Module, optimizers: list[Optimizer], *, own: bool) -> None:
        super().load_state_dict(states[0], module, optimizers)
        self._errors = dict(states[0]["errors"])
