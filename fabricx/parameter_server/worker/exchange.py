"""The contract of an exchange of gradients between workers: through servers, or in shared memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, final

from torch import Tensor
from torch.optim import Optimizer

from fabricx.parameter_server.wire.messages import Push, Settings
from fabricx.parameter_server.worker.remote_state import RemoteState

Clip = tuple[str, list[Tensor], float]  # "norm" or "value", parameters, limit
WHOLE: Final = Push(clock=0, parts=1, leases=(0,))  # an update of a single gradient


@dataclass(slots=True)
class ExchangeStatistics:
    """Statistics of a worker's exchanges.

    Attributes:
        waited_s: seconds of waiting for other processes.
        pushed_s: seconds of pushing.
        pulls: number of pulls.
        pushes: newest pushes to servers: (worker, number, time on the monotonic clock).
    """

    waited_s: float = 0.0
    pushed_s: float = 0.0
    pulls: int = 0
    pushes: deque[tuple[int, int, float]] = field(default_factory=lambda: deque(maxlen=4096))


class Exchange(ABC):
    """Exchange of gradients between the workers of a run.

    Attributes:
        connected: this worker has joined the exchange.
        statistics: this worker's statistics.
        remote: state that is on servers; empty without servers.
        sends_early: the gradients of the present backward are final, and can be sent as soon as they are computed.
    """

    connected: ClassVar[bool] = True

    def __init__(self, remote: RemoteState, statistics: ExchangeStatistics) -> None:
        self.remote, self.statistics = remote, statistics
        self.sends_early = True

    @abstractmethod
    def register_grad_hooks(self) -> Callable[[], None]:
        """Register hooks that send complete gradients while `sends_early`; returns a function that removes them."""

    def begin(
        self, settings: Settings, optimizers: Sequence[Optimizer] | None, version: int,
        *, rule: tuple[dict[str, list[Tensor]], int] | None = None, error_feedback: Sequence[Tensor | None] = (),
    ) -> None:  # fmt: skip
        """Initialise the servers, if any: the first worker sends `ServerInit`, which servers process first.

        Args:
            settings: behaviour of the servers.
            optimizers: the user's optimizers, over the parameters; None if servers only sum.
            version: number of updates made before.
            rule: tensors of the update rule, by name and parameter, and its rounds; None for a new rule.
            error_feedback: error feedback of the servers' compressed sums, by server, flat.
        """

    @abstractmethod
    def push(
        self, gradients: Sequence[Tensor | None], push: Push = WHOLE, *, clips: Sequence[Clip] = (),
        answered: bool = False,
    ) -> bool:  # fmt: skip
        """Provide this worker's gradients to the exchange.

        Args:
            gradients: gradients by parameter, in its shape; None for a parameter without a gradient.
            push: description of the gradient: its update and leases, and hyperparameters.
            clips: clipping of the sum over workers, in order.
            answered: wait for the server's reply, which states whether the gradient is used.

        Returns:
            False if the gradient is certainly not used.
        """

    @abstractmethod
    def pull_sums(self, version: int) -> None:
        """Write the sums of all workers' gradients to `parameter.grad`.

        A parameter without a gradient on any worker has None.

        Args:
            version: number of the update.
        """

    @property
    def error_feedback(self) -> list[Tensor]:
        """Return this worker's error feedback of compressed gradients, by server, flat."""
        return []

    @error_feedback.setter
    def error_feedback(self, feedback: Sequence[Tensor]) -> None:
        """Restore the error feedback."""

    @property
    @abstractmethod
    def traffic(self) -> tuple[int, int]:
        """Return the bytes of gradients and weights that this worker has (sent, received)."""

    @abstractmethod
    def close(self, *, done: bool = True) -> None:
        """Leave the exchange.

        Args:
            done: this worker has finished; servers end when all workers have.
        """


@final
class NoExchange(Exchange):
    """Exchange of a worker that has not joined any: before training, after it, and in evaluation."""

    connected = False

    def __init__(self) -> None:
        super().__init__(RemoteState.none(), ExchangeStatistics())

    def register_grad_hooks(self) -> Callable[[], None]:
        return lambda: None

    def push(
        self, gradients: Sequence[Tensor | None], push: Push = WHOLE, *, clips: Sequence[Clip] = (),
        answered: bool = False,
    ) -> bool:  # fmt: skip
        return False

    def pull_sums(self, version: int) -> None:
        """Do nothing."""

    @property
    def traffic(self) -> tuple[int, int]:
        return 0, 0

    def close(self, *, done: bool = True) -> None:
        """Do nothing."""
