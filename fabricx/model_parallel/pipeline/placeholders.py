"""Parameters and buffers of other stages: they keep their shape and have no memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn


def tensors_by_name(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module; those with several names have the first.

    Args:
        module: the user's module.
    """
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def release(module: nn.Module, names: Iterable[str]) -> None:
    """Replace the values of parameters and buffers by placeholders without memory.

    The value is NaN, so that a result that depends on a placeholder by mistake is visible; False and 0 for other
    dtypes. Parameters stay the same objects and keep `requires_grad`.

    Args:
        module: the user's module.
        names: names of its parameters and buffers.
    """
    tensors = tensors_by_name(module)
    for name in names:
        tensor = tensors[name]
        value = float("nan") if tensor.is_floating_point() else 0
        tensor.data = torch.full((), value, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
        tensor.grad = None


def restore(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Write whole tensors into parameters and buffers, also into placeholders.

    Args:
        module: the user's module.
        values: values by name.

    Raises:
        LookupError: the module has no parameter or buffer of a name.
    """
    tensors = tensors_by_name(module)
    for name, value in values.items():
        if name not in tensors:
            raise LookupError(f"the module has no parameter or buffer {name!r}")
        tensor = tensors[name]
        tensor.data = value.detach().to(device=tensor.device, dtype=tensor.dtype).reshape(tensor.shape)


def refuses(error: BaseException) -> bool:
    """Return whether an error is torch's refusal to write to a placeholder.

    Args:
        error: error of a step.

    >>> try:
    ...     torch.zeros(()).expand(2).add_(1)
    ... except RuntimeError as error:
    ...     print(refuses(error))
    True
    """
    return isinstance(error, RuntimeError) and "refers to a single memory location" in str(error)
