"""Errors for hooks that read a gradient of which this rank has a part only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn, final

import torch
from torch import Tensor, nn

_MESSAGE: Final = (
    "this gradient is divided over ranks, and a rank has only its part: hooks can't read it. For the norm of the whole "
    "gradient call self.trainer.strategy.gradient_norm([optimizer]); to clip, set gradient_clip_val or call "
    "self.clip_gradients. With strategy=ddp, or a mesh with tensor=1 and pipeline=1, hooks read whole gradients"
)


class DividedGradient(RuntimeError):
    """A hook has read or changed a gradient of which this rank has a part only."""


class HiddenGradient(Tensor):
    """Raises an error when it is read."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise DividedGradient(_MESSAGE)


@final
class HiddenGradients:
    """Hides gradients from hooks, and shows them to the strategy that hooks call."""

    def __init__(self) -> None:
        self._pairs: list[tuple[nn.Parameter, Tensor | None, Tensor]] = []

    @contextmanager
    def hide(
        self, parameters: Iterable[nn.Parameter], elsewhere: Iterable[nn.Parameter] = ()
    ) -> Iterator[None]:  # fmt: skip
        """Context of hooks, in which reading a gradient is an error.

        Args:
            parameters: parameters with or without gradients.
            elsewhere: parameters with gradients on other ranks only.

        >>> weight, hidden = nn.Parameter(torch.ones(2)), HiddenGradients()
        >>> weight.grad = torch.ones(2)
        >>> with hidden.hide([weight]):
        ...     with hidden.shown():
        ...         print(float(weight.grad.sum()))
        ...     try:
        ...         weight.grad.norm()
        ...     except DividedGradient as error:
        ...         print(str(error)[:38])
        2.0
        this gradient is divided over ranks, a
        """
        gradients: list[tuple[nn.Parameter, Tensor | None, Tensor]] = [
            (p, p.grad, hidden(p.grad)) for p in parameters if p.grad is not None
        ]
        gradients += [(p, None, hidden(p)) for p in elsewhere if p.grad is None]
        self._pairs = gradients
        for parameter, _, part in gradients:
            parameter.grad = part
        try:
            yield
        finally:
            self._pairs = []
            _replace((parameter, part, gradient) for parameter, gradient, part in gradients)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Context in which all gradients can be read, also within `hide`."""
        pairs = self._pairs
        _replace((parameter, part, gradient) for parameter, gradient, part in pairs)
        try:
            yield
        finally:
            _replace(pairs)


def _replace(pairs: Iterable[tuple[nn.Parameter, Tensor | None, Tensor | None]]) -> None:
    """Replace gradients that are still the first of a pair by the second."""
    for parameter, before, after in pairs:
        if parameter.grad is before:
            parameter.grad = after


def hidden(gradient: Tensor) -> Tensor:
    """Return a stand-in for a gradient, which raises an error when it is read.

    Args:
        gradient: of which this rank has a part only; or a parameter, for a gradient that other ranks have.
    """
    if isinstance(gradient, HiddenGradient):
        return gradient
    stand_in = torch.zeros((), dtype=gradient.dtype, device=gradient.device).expand(gradient.shape)
    return stand_in.as_subclass(HiddenGradient)
