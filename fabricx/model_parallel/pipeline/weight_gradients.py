"""Weight gradients that are computed later than the gradients of activations, for zero-bubble schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from fabricx.distributed.sharding.grad_hooks import number_of_hooks
from fabricx.model_parallel.recomputation import is_checkpointed


@final
class DeferredWeights(TorchFunctionMode):
    """Defers the weight gradients of matrix products while it is active, forward and backward.

    `linear`, and `addmm` with a bias (GPT-2's projections in transformers), are deferred. Other gradients are computed
    in the backward, as are those of parameters with gradient hooks, and of checkpointed code, whose second computation
    is outside of this mode.

    Attributes:
        queue: receives a function for each deferred gradient during a backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[Callable[[], None]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # fmt: skip
        options = kwargs or {}
        if func is F.linear and _deferrable(weight := _argument(args, options, 1, "weight")):
            inputs, bias = _argument(args, options, 0, "input"), _argument(args, options, 2, "bias")
            return _Product.apply(*_cast(inputs, bias), weight, True, self)  # type: ignore[no-untyped-call]
        if func is torch.addmm and not options and len(args) == 3 and args[0].dim() == 1 and _deferrable(args[2]):
            return _Product.apply(*_cast(args[1], args[0]), args[2], False, self)  # type: ignore[no-untyped-call]
        return func(*args, **options)


def _argument(args: tuple[Any, ...], options: dict[str, Any], number: int, name: str) -> Any:
    return args[number] if number < len(args) else options.get(name)


def _deferrable(weight: Any) -> bool:
    return (
        torch.is_grad_enabled()
        and not is_checkpointed()
        and type(weight) is nn.Parameter
        and weight.requires_grad
        and weight.layout is torch.strided
        and not number_of_hooks(weight)
    )


def _cast(inputs: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return inputs and bias in the dtype of autocast, if it is active; float64 and complex numbers are not cast."""
    device = inputs.device.type
    if not torch.is_autocast_enabled(device) or inputs.dtype is torch.float64 or inputs.is_complex():
        return inputs, bias
    dtype = torch.get_autocast_dtype(device)
    return inputs.to(dtype), None if bias is None else bias.to(dtype)


class _Product(torch.autograd.Function):
    """`inputs @ weight.T + bias`, or `inputs @ weight + bias`, without the gradient of the weight."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, bias: Tensor | None, weight: Tensor, transposed: bool, mode: DeferredWeights
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(inputs, weight)
        ctx.transposed, ctx.mode = transposed, mode
        ctx.set_materialize_grads(False)  # a product without effect on the loss has no gradient, not zeros
        with torch.autocast(inputs.device.type, enabled=False):
            matrix = weight.to(inputs.dtype)
            return F.linear(inputs, matrix if transposed else matrix.t(), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        [gradient] = gradients
        if gradient is None:
            return None, None, None, None, None
        inputs, weight = ctx.saved_tensors
        matrix = weight.to(gradient.dtype).conj()  # without effect on real numbers
        input_gradient = gradient @ (matrix if ctx.transposed else matrix.t()) if ctx.needs_input_grad[0] else None
        bias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None

        @torch.no_grad()
        def add() -> None:
            rows, outputs = inputs.reshape(-1, inputs.shape[-1]).conj(), gradient.reshape(-1, gradient.shape[-1])
            product = (outputs.t() @ rows if ctx.transposed else rows.t() @ outputs).to(weight.dtype)
            weight.grad = product if weight.grad is None else weight.grad.add_(product)

        ctx.mode.queue.append(add)
        return input_gradient, bias, None, None, None
