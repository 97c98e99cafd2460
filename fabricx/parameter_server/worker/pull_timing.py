"""When a worker waits for pulled weights: before the step, or during the forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import final

from torch import Tensor, nn

from fabricx.parameter_server.wire.messages import Reply
from fabricx.parameter_server.worker.prefetch import PrefetchHooks
from fabricx.parameter_server.worker.weight_pulls import WeightPulls

Note = Callable[[Reply], None]  # argument: the reply of the first server


class PullTiming(ABC):
    """When pulled weights arrive."""

    @abstractmethod
    def pull(self, version: int, note: Note, *, one_by_one: bool = False) -> None:
        """Pull weights for a gradient.

        Args:
            version: minimum version.
            note: called when all weights have arrived.
            one_by_one: see `WeightPulls.pull`; all weights have then arrived when this returns.
        """

    def begin_step(self) -> None:
        """Wait for the weights that a step uses at once."""

    def backward(self, compute: Callable[[], None]) -> None:
        """Compute gradients.

        Args:
            compute: runs the backward.

        Raises:
            RuntimeError: weights were used before they had arrived.
        """
        compute()

    def settle(self) -> None:
        """Wait for all weights."""

    def end(self) -> None:
        """End training."""


@final
class NoPulls(PullTiming):
    """Weights are local, or in memory that workers share."""

    def pull(self, version: int, note: Note, *, one_by_one: bool = False) -> None:
        """Do nothing."""


@final
class BeforeStep(PullTiming):
    """Weights arrive before the step begins.

    Args:
        weights: pulls from the servers.
        parameters: parameters by number.
    """

    def __init__(self, weights: WeightPulls, parameters: Sequence[Tensor]) -> None:
        self._weights, self._parameters = weights, parameters

    def pull(self, version: int, note: Note, *, one_by_one: bool = False) -> None:
        note(self._weights.pull(self._parameters, version, to_train=True, one_by_one=one_by_one))


@final
class DuringForward(PullTiming):
    """Weights arrive in the background; each submodule waits for its direct parameters.

    Args:
        weights: pulls from the servers.
        parameters: parameters by number.
        module: the user's module.
    """

    def __init__(self, weights: WeightPulls, parameters: Sequence[Tensor], module: nn.Module) -> None:
        self._weights = weights
        self._at_once = BeforeStep(weights, parameters)
        self._hooks = PrefetchHooks(module, parameters, weights.await_parameters)

    def pull(self, version: int, note: Note, *, one_by_one: bool = False) -> None:
        if one_by_one:
            self._at_once.pull(version, note, one_by_one=True)
            return

        def arrived(reply: Reply, late: set[int]) -> None:
            self._hooks.missed = late
            note(reply)

        self._weights.begin(version, arrived)

    def begin_step(self) -> None:
        self._hooks.missed = set()
        self._weights.await_parameters(self._hooks.direct)

    def backward(self, compute: Callable[[], None]) -> None:
        try:
            compute()
        except RuntimeError as error:
            if "inplace operation" in str(error):
                raise self._hooks.error(self._hooks.missed) from error
            raise
        self._hooks.missed = set()

    def settle(self) -> None:
        self._weights.finish()

    def end(self) -> None:
        self._hooks.end()
