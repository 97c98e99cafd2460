"""Errors for hooks that read a worker's part of a gradient: only the servers have the sum."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, final

import torch
from torch import Tensor


class GradientElsewhere(RuntimeError):
    """A hook has read or changed a gradient that is only this worker's part of the sum."""


_MESSAGE = (
    "this gradient is only this worker's part of the global mean, which is on the servers: hooks see the global mean "
    "with strategy=ddp, or parameter_server with mode=sync and optimizer=worker. self.clip_gradients clips the global "
    "mean anywhere"
)


@final
class UnreducedGradient(Tensor):
    """A gradient that raises an error when it is read; `unreduced` assigns it to parameters while hooks run."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise GradientElsewhere(_MESSAGE)


@contextlib.contextmanager
def unreduced(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Raise an error if the gradients of parameters are read or replaced inside this context.

    Args:
        parameters: parameters with or without gradients.


    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.grad = torch.ones(2)
    >>> with unreduced([weight]):
    ...     try:
    ...         weight.grad.norm()
    ...     except GradientElsewhere as error:
    ...         print(str(error)[:45])
    this gradient is only this worker's part of t
    """
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    hidden: list[Tensor | None] = [None if gradient is None else _hidden(gradient) for _, gradient in gradients]
    for (parameter, _), gradient in zip(gradients, hidden, strict=True):
        parameter.grad = gradient
    try:
        yield
        if any(parameter.grad is not gradient for (parameter, _), gradient in zip(gradients, hidden, strict=True)):
            raise GradientElsewhere(_MESSAGE)
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _hidden(gradient: Tensor) -> Tensor:
    if gradient.is_sparse:  # a sparse tensor has no storage that a subclass can share
        gradient = torch.zeros((), dtype=gradient.dtype, device=gradient.device).expand(gradient.shape)
    return gradient.as_subclass(UnreducedGradient)
