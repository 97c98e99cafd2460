"""The contract of worker protocols: when a worker pushes gradients and pulls weights."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Generic, TypeVar, final

from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.distributed.world import World
from fabricx.parameter_server.wire.messages import Groups, Settings
from fabricx.parameter_server.worker.exchange import Exchange
from fabricx.parameter_server.worker.local_gradients import LocalGradients
from fabricx.parameter_server.worker.pull_timing import NoPulls, PullTiming
from fabricx.parameter_server.worker.worker_optimizers import WorkerOptimizers

E = TypeVar("E", bound=Exchange)


class WorkerProtocol(ABC, Generic[E]):
    """Decides when a worker pushes gradients and pulls weights.

    A strategy calls, in this order:

    - `connect`; `load_local_state`, `load_error_feedback`, if a run resumes; `start_training`.
    - For each microbatch: `computing_gradient` around the training step, which calls `before_step`; then `backward`.
    - `exchange_gradient` at the end of an accumulation window: by `backward`, or by the strategy on a worker without
      samples. Then `clip_norm` or `clip_value`, `step` for each optimizer, `finish_update`.
    - `await_weights` before it reads weights between two steps.
    - `meet`, then `pool_statistics`, when all workers meet: for a validation, a checkpoint, the end of training.
    - `disconnect`.

    Args:
        settings: settings of the exchange.

    Attributes:
        servers_step: weights are stepped by servers, or by all workers together; optimizers on this worker do not step.
        settings: see Args.
        world: the workers.
        parameters: parameters of all optimizers, by number.
        optimizers: the user's optimizers.
        gradients: this worker's gradients.
        timing: whether this worker waits for pulled weights before the step or during the forward.
        server_rule: initial state of the servers' update rule: tensors by name and parameter, and rounds; None for a
            new rule.
        server_feedback: initial error feedback of the servers' compressed sums.
    """

    servers_step: ClassVar[bool] = True

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.world = World()
        self.server_rule: tuple[dict[str, list[Tensor]], int] | None = None
        self.server_feedback: Sequence[Tensor | None] = ()
        self._exchange: E | None = None
        self._attach([], [], NoPulls())

    def _attach(self, parameters: list[Tensor], optimizers: list[Optimizer], timing: PullTiming) -> None:
        self.parameters = parameters
        self.gradients = LocalGradients(parameters)
        self.optimizers = WorkerOptimizers(optimizers, parameters)
        self.timing = timing

    # -- a run ----------------------------------------------------------------------------------------------------

    @property
    def exchange(self) -> E:
        """Return the exchange; it exists between `connect` and `disconnect`.

        The protocol of workers at their own pace is built with the options of a strategy, before there is an exchange.
        """
        assert self._exchange is not None
        return self._exchange

    def connect(
        self, world: World, exchange: E, parameters: list[Tensor], optimizers: list[Optimizer], timing: PullTiming
    ) -> None:  # fmt: skip
        """Connect the protocol to its exchange, before training.

        Args:
            world: the workers.
            exchange: with the other workers.
            parameters: parameters of all optimizers.
            optimizers: the user's optimizers.
            timing: timing of pulls.
        """
        self.world, self._exchange = world, exchange
        self._attach(parameters, optimizers, timing)

    def start_training(self, step: int, ranks: int, module: nn.Module | None) -> None:
        """Start training: initialise the servers, if there are any.

        Args:
            step: number of updates made before.
            ranks: number of ranks at the beginning of the run.
            module: the user's module.
        """
        self.settings.workers = self.workers_of_update
        optimizers = self.optimizers.optimizers if self.servers_step else None
        self.exchange.begin(self.settings, optimizers, step, rule=self.server_rule, error_feedback=self.server_feedback)
        if self.servers_step:
            self.optimizers.forget_moments()

    @property
    def shares_update(self) -> bool:
        """Return whether other workers may change the weights of this worker now."""
        return False

    @property
    def workers_of_update(self) -> int:
        """Return the number of workers whose batches make up a global batch."""
        return self.world.size

    def disconnect(self) -> None:
        """End training."""
        self.timing.end()
        self._exchange = None
        self._attach([], [], NoPulls())

    # -- a step ---------------------------------------------------------------------------------------------------

    def computing_gradient(self) -> AbstractContextManager[Any]:
        """Return a context for the computation of a gradient, with the weights for it."""
        return self._computing()

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        self.before_step()
        self.timing.begin_step()
        yield
        self.timing.settle()

    def before_step(self) -> None:
        """Pull weights before a step, if necessary."""

    def backward(self, compute: Callable[[], None], *, closing: bool) -> None:
        """Compute gradients.

        Args:
            compute: runs the backward.
            closing: the backward closes the accumulation window.
        """
        self.timing.backward(compute)
        if closing:
            self.exchange_gradient()

    def exchange_gradient(self) -> bool:
        """Exchange the gradient of the accumulation window, if there is a gradient.

        Returns:
            True if all ranks have reached this point when this returns.
        """
        return False

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor | None:
        """Clip the sum of all workers' gradients to a norm.

        Args:
            parameters: parameters to clip.
            max_norm: maximum 2-norm.

        Returns:
            The norm before, shape []; None if the gradient is local.
        """
        return None

    def clip_value(self, parameters: Iterable[Tensor], limit: float) -> bool:
        """Clip the elements of the sum of all workers' gradients; returns False if the gradient is local.

        Args:
            parameters: parameters to clip.
            limit: maximum absolute value.
        """
        return False

    @abstractmethod
    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Take part in an update.

        Args:
            optimizer: the user's optimizer.
            closure: see `Optimizer.step`.
        """

    @abstractmethod
    def finish_update(self, step: int) -> int:
        """Complete an update; returns its number.

        Args:
            step: number of the update, as counted by this worker.
        """

    def await_weights(self, step: int) -> int:
        """Wait for weights in transit; returns the number of updates in this worker's weights.

        Args:
            step: number of updates made so far.
        """
        self.timing.settle()
        return step

    def groups(self) -> Groups | None:
        """Return the hyperparameters to push; None if this worker steps."""
        return self.optimizers.groups() if self.servers_step else None

    # -- gradients and hooks --------------------------------------------------------------------------------------

    @property
    def pushes_parts(self) -> bool:
        """Return whether this worker pushes only a part of an update's gradient; the servers sum the parts."""
        return False

    def hooks_see_gradients(self) -> AbstractContextManager[Any]:
        """Return a context for hooks, in which a gradient that is only a part can't be read."""
        return self.gradients.hidden() if self.pushes_parts else contextlib.nullcontext()

    def nonfinite_gradients(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return the parameters whose gradients are not finite, or could overflow in the sum over workers.

        Args:
            parameters: parameters to check.
        """
        return self.gradients.nonfinite(parameters, self.world.size if self.pushes_parts else 1)

    def drop_partial_gradients(self) -> None:
        """Clear the gradients, if they were parts of a sum on servers."""
        if self.pushes_parts:
            self.gradients.clear()

    # -- between the workers, and checkpoints ---------------------------------------------------------------------

    def meet(self) -> None:
        """Synchronise the weights of all workers; each worker calls it after all its pushes."""

    def pool_statistics(self) -> None:
        """Make running statistics equal on all workers, after `meet`; each worker calls it."""

    def whole_states(self) -> AbstractContextManager[Any]:
        """Return a context in which the user's optimizers have their complete states; every rank enters it."""
        return contextlib.nullcontext()

    def local_state(self) -> Any:
        """Return the state of weights and optimizers that exists only on this worker, without communication."""
        return None

    def load_local_state(self, states: Sequence[Any]) -> None:
        """Restore local states before `start_training`; the weights are restored already.

        Args:
            states: result of `local_state` of this rank, or of all ranks of another run.
        """

    def error_feedback(self) -> Any:
        """Return this worker's error feedback of compressed gradients."""
        return self.exchange.error_feedback

    def load_error_feedback(self, feedback: Any) -> None:
        """Restore the error feedback.

        Args:
            feedback: result of `error_feedback`.
        """
        self.exchange.error_feedback = feedback


@final
class NoProtocol(WorkerProtocol[Exchange]):
    """Protocol of a worker that has not joined an exchange: before training, after it, and in evaluation."""

    servers_step = False

    def __init__(self) -> None:
        super().__init__(Settings(workers=1))

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        return optimizer.step(closure) if closure is not None else optimizer.step()

    def finish_update(self, step: int) -> int:
        return step
