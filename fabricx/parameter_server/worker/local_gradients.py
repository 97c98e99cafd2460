"""This worker's gradients of an update, which hooks can't read if they are only a part of a sum."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import final

from torch import Tensor

from fabricx.core.strategy_support.gradient_checks import SPARSE_CLIPPED
from fabricx.parameter_server.worker.unreduced_gradients import unreduced


@final
class LocalGradients:
    """This worker's gradients of the parameters.

    Args:
        parameters: parameters of all optimizers.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._hidden: list[Tensor | None] | None = None  # gradients that hooks can't read at present

    def all(self) -> list[Tensor | None]:
        """Return the gradients by parameter, in its shape, also while hooks can't read them."""
        return [parameter.grad for parameter in self._parameters] if self._hidden is None else self._hidden

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Raise an error if a gradient is read inside this context."""
        self._hidden = self.all()
        try:
            with unreduced(self._parameters):
                yield
        finally:
            hidden, self._hidden = self._hidden, None
            for parameter, gradient in zip(self._parameters, hidden, strict=True):
                if gradient is None:  # includes gradients dropped meanwhile
                    parameter.grad = None

    def drop(self, parameters: Iterable[Tensor]) -> None:
        """Drop gradients from the next update.

        Args:
            parameters: without a gradient afterwards.
        """
        wanted = {id(parameter) for parameter in parameters}
        if self._hidden is not None:
            kept = zip(self._parameters, self._hidden, strict=True)
            self._hidden = [None if id(parameter) in wanted else gradient for parameter, gradient in kept]
            return
        for parameter in self._parameters:
            if id(parameter) in wanted:
                parameter.grad = None

    def clear(self) -> None:
        """Drop all gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def nonfinite(self, parameters: Iterable[Tensor], workers: int) -> list[Tensor]:
        """Return the parameters whose gradients are not finite, or could overflow in the sum over workers.

        Args:
            parameters: parameters to check.
            workers: number of workers whose gradients are summed.
        """
        nonfinite = []
        for parameter, gradient in self._of(parameters):
            values = gradient._values() if gradient.is_sparse else gradient
            if not bool((values * workers).isfinite().all()):
                nonfinite.append(parameter)
        return nonfinite

    def check_dense(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Check that parameters can be clipped, and return them as a list.

        Args:
            parameters: parameters to clip.

        Raises:
            ValueError: a gradient is sparse.
        """
        clipped = list(parameters)
        if any(gradient.is_sparse for _, gradient in self._of(clipped)):
            raise ValueError(SPARSE_CLIPPED)
        return clipped

    def _of(self, parameters: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return the parameters among `parameters` that have a gradient, with the gradients."""
        wanted = {id(parameter) for parameter in parameters}
        pairs = zip(self._parameters, self.all(), strict=True)
        return [
            (parameter, gradient) for parameter, gradient in pairs if id(parameter) in wanted and gradient is not None
        ]
