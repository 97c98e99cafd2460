"""Errors for reading a worker's part of a gradient whose sum is on the servers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, final

import torch
from torch import Tensor


class GradientElsewhere(RuntimeError):
    """A hook has read or changed a gradient that is only this worker's part."""


_MESSAGE = (
    "this gradient is only this worker's part of the global mean, which is on the servers: hooks see the global mean "
    "with strategy=ddp, or parameter_server with mode=sync and optimizer=worker. self.clip_gradients clips the global "
    "mean anywhere"
)


@final
class Unjoined(Tensor):
    """A gradient that can't be read; `unjoined` puts it where hooks would find this worker's part."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise GradientElsewhere(_MESSAGE)


@contextlib.contextmanager
def unjoined(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Let it be an error to read, or to replace, the gradients of parameters.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.grad = torch.ones(2)
    >>> with unjoined([weight]):
    ...     try:
    ...         weight.grad.norm()
    ...     except GradientElsewhere as error:
    ...         print(str(error)[:45])
    this gradient is only this worker's part of t
    """
    own = [(parameter, parameter.grad) for parameter in parameters]
    hidden: list[Tensor | None] = [None if gradient is None else _hidden(gradient) for _, gradient in own]
    for (parameter, _), gradient in zip(own, hidden, strict=True):
        parameter.grad = gradient
    try:
        yield
        if any(parameter.grad is not gradient for (parameter, _), gradient in zip(own, hidden, strict=True)):
            raise GradientElsewhere(_MESSAGE)
    finally:
        for parameter, gradient in own:
            parameter.grad = gradient


def _hidden(gradient: Tensor) -> Tensor:
    if gradient.is_sparse:  # it has no memory that a subclass could share
        gradient = torch.zeros((), dtype=gradient.dtype, device=gradient.device).expand(gradient.shape)
    return gradient.as_subclass(Unjoined)
