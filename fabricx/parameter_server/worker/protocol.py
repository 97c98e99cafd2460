"""Worker protocols: when a worker pushes gradients and pulls weights; `Lockstep` for workers in lockstep."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabricx.core.strategy import SPARSE_CLIPPED
from fabricx.distributed.world import World
from fabricx.parameter_server.optimizer_parts import OptimizerSnapshot, groups_of, load_from_servers, nested
from fabricx.parameter_server.wire.messages import Groups, Reply, Settings
from fabricx.parameter_server.wire.powersgd import LowRank
from fabricx.parameter_server.worker.client import Client
from fabricx.parameter_server.worker.prefetch import PrefetchHooks
from fabricx.parameter_server.worker.unreduced_gradients import unreduced


class WorkerProtocol(ABC):
    """When a worker pushes gradients and pulls weights.

    Args:
        settings: of the servers.

    Attributes:
        servers_step: servers step and hold the optimizers' state; workers do not step.
        computing: a gradient is being computed.
        prefetch: hooks for weights that are pulled during the forward; None if weights are pulled before.
        server_feedback: initial error feedback of the servers' compressed sums.
    """

    servers_step = True

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.computing = False
        self.prefetch: PrefetchHooks | None = None
        self.server_feedback: Sequence[Tensor | None] = ()
        self.world = World()
        self._client: Client | None = None
        self._parameters: list[Tensor] = []
        self._hidden: list[Tensor | None] | None = None  # gradients that hooks can't read at present
        self._optimizers: list[Optimizer] = []
        self._every_optimizer: list[Optimizer] = []  # including nested optimizers
        self._count = 0  # number of parameters in all groups

    @property
    def client(self) -> Client:
        """Return the client of the servers."""
        assert self._client is not None
        return self._client

    def begin(self, world: World, client: Client, parameters: list[Tensor], optimizers: list[Optimizer]) -> None:
        """Connect the protocol to its client, before training.

        Args:
            world: the ranks.
            client: of the servers.
            parameters: of all optimizers.
            optimizers: of the user.
        """
        self.world, self._client = world, client
        self._parameters, self._optimizers = parameters, optimizers
        self._every_optimizer = nested(optimizers)
        self._count = _parameters_of(self._every_optimizer)

    def starts(self, step: int) -> None:
        """Initialise the servers at the begin of training.

        Args:
            step: number of updates made before.
        """
        self.settings.workers = self.workers_of_update
        self.client.begin(
            self.settings, self._optimizers if self.servers_step else None, step, lost=self.server_feedback
        )
        if self.servers_step:
            self.forget_moments()

    @property
    def workers_of_update(self) -> int:
        """Return the number of workers whose batches make up a global batch."""
        return self.world.size

    def forget_moments(self) -> None:
        """Clear the state of the workers' optimizers, because servers step."""
        for optimizer in self._every_optimizer:
            optimizer.state.clear()
            optimizer._opt_called = True  # type: ignore[attr-defined]  # otherwise torch warns about scheduler order

    def end(self) -> None:
        """End training."""
        self._client = None

    @contextlib.contextmanager
    def computes(self) -> Iterator[None]:
        """Provide the weights for computing a gradient inside this context."""
        self.before_step()
        self.computing = True
        if self.prefetch is not None:
            self.client.await_parameters(self.prefetch.direct)
        try:
            yield
        finally:
            self.computing = False
        if self.prefetch is not None:
            self.on_weights(*self.client.finish_pull())

    def on_weights(self, reply: Reply | None, late: set[int]) -> None:
        """Process the reply of a pull.

        Args:
            reply: of the first server; None without a pull.
            late: numbers of the parameters that were received after the forward.
        """
        if self.prefetch is not None:
            self.prefetch.missed = late

    def pull_rows(self, ids: dict[int, Tensor]) -> None:
        """Pull rows of tables for a lookup.

        Args:
            ids: unique row ids, shape [k], by the number of the parameter.
        """
        self.client.pull_rows(ids)

    def weights_step(self, step: int) -> int:
        """Wait for a background pull; returns the number of updates in this worker's weights.

        Args:
            step: number of updates made so far.
        """
        if self.prefetch is not None and self._client is not None:
            self.on_weights(*self._client.finish_pull())
        return step

    def before_step(self) -> None:
        """Pull weights before a step, if necessary."""

    def backward(self, compute: Callable[[], None], *, closing: bool) -> None:
        """Compute gradients.

        Args:
            compute: runs the backward.
            closing: the backward closes the accumulation window.
        """
        try:
            compute()
        except RuntimeError as error:
            if self.prefetch is not None and "inplace operation" in str(error):
                raise self.prefetch.error(self.prefetch.missed) from error
            raise
        if self.prefetch is not None:
            self.prefetch.missed = set()
        if closing:
            self.complete()

    def complete(self) -> bool:
        """Exchange the window's gradient, if there is one; returns whether all ranks have reached this point."""
        return False

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor | None:
        """Clip the sum of all workers' gradients to a norm; returns its norm, or None if the gradient is local.

        Args:
            parameters: to clip.
            max_norm: maximum 2-norm.
        """
        return None

    def clip_value(self, parameters: Iterable[Tensor], limit: float) -> bool:
        """Clip the elements of the sum of all workers' gradients; returns False if the gradient is local.

        Args:
            parameters: to clip.
            limit: maximum absolute value.
        """
        return False

    @abstractmethod
    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Take part in an update.

        Args:
            optimizer: of the user.
            closure: see `Optimizer.step`.
        """

    @abstractmethod
    def updated(self, step: int) -> int:
        """Complete an update; returns its number.

        Args:
            step: number of the update, as far as this worker knows.
        """

    def meet(self) -> None:
        """Synchronise the weights of all workers; each worker calls it after all its pushes."""

    @contextlib.contextmanager
    def whole_states(self, optimizers: list[Optimizer]) -> Iterator[None]:
        """Provide complete optimizer states inside this context; every rank enters it.

        Args:
            optimizers: filled with state inside the context.
        """
        if not self.servers_step:
            yield
            return
        remembered = OptimizerSnapshot(optimizers)
        load_from_servers(optimizers, self._parameters, self.client.server_optimizers())
        yield
        self.forget_moments()
        remembered.restore()

    def local_state(self) -> Any:
        """Return the state of weights and optimizers that exists only on this worker, without communication."""
        return None

    def load_local_state(self, states: Sequence[Any]) -> None:
        """Restore local states before `starts`; the weights are restored already.

        Args:
            states: result of `local_state` of this rank, or of all ranks of another run.
        """

    def kept(self) -> Any:
        """Return this worker's error feedback of compressed gradients."""
        return self.client.kept

    def keep(self, kept: Any) -> None:
        """Restore the error feedback.

        Args:
            kept: result of `kept`.
        """
        self.client.kept = kept

    def push(self, gradients: list[Tensor | None], **details: Any) -> bool:
        """Push gradients with the present hyperparameters; returns False if they are known not to be used.

        Args:
            gradients: by parameter.
            details: see `Client.push`.
        """
        return self.client.push(gradients, groups=self.groups() if self.servers_step else None, **details)

    def groups(self) -> Groups:
        """Return the hyperparameters of each group of each optimizer."""
        return groups_of(self._every_optimizer)

    def check_parameters(self) -> None:
        """Check that no optimizer has got new parameters since training began.

        Raises:
            RuntimeError: an optimizer has new parameters.
        """
        count = _parameters_of(self._every_optimizer)
        if count != self._count:
            raise RuntimeError(
                f"the optimizers had {self._count} parameters when training began and have {count} now, and servers "
                "don't have the new ones: pass all parameters in configure_optimizers, those to be trained later with "
                "requires_grad=False (they are skipped until it is True); or use strategy=single"
            )

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients to push, by parameter."""
        return self.local_gradients()

    @property
    def pushes_parts(self) -> bool:
        """Return whether this worker's gradient is only a part of the update's gradient."""
        return False

    @contextlib.contextmanager
    def hooks_see_gradients(self) -> Iterator[None]:
        """Provide the update's gradient to hooks; if it is not on this worker, reading a gradient raises an error."""
        if not self.pushes_parts:
            yield
            return
        self._hidden = self.gradients()
        try:
            with unreduced(self._parameters):
                yield
        finally:
            hidden, self._hidden = self._hidden, None
            for parameter, gradient in zip(self._parameters, hidden, strict=True):
                if gradient is None:  # includes gradients dropped meanwhile
                    parameter.grad = None

    def nonfinite_gradients(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return the parameters whose gradients are not finite, or could overflow in the sum over workers.

        Args:
            parameters: to check.
        """
        workers = self.world.size if self.pushes_parts else 1
        wanted = {id(parameter) for parameter in parameters}
        nonfinite = []
        for parameter, gradient in zip(self._parameters, self.local_gradients(), strict=True):
            if id(parameter) in wanted and gradient is not None:
                values = gradient._values() if gradient.is_sparse else gradient
                if not bool((values * workers).isfinite().all()):
                    nonfinite.append(parameter)
        return nonfinite

    def local_gradients(self) -> list[Tensor | None]:
        """Return this worker's gradients by parameter, also while hooks can't read them."""
        return [parameter.grad for parameter in self._parameters] if self._hidden is None else self._hidden

    def drop_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Drop this worker's gradients of parameters from the next update.

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

    def check_dense(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Check that parameters can be clipped, and return them as a list.

        Args:
            parameters: to clip.

        Raises:
            ValueError: a gradient is sparse.
        """
        clipped = list(parameters)
        wanted = {id(parameter) for parameter in clipped}
        for parameter, gradient in zip(self._parameters, self.gradients(), strict=False):
            if id(parameter) in wanted and gradient is not None and gradient.is_sparse:
                raise ValueError(SPARSE_CLIPPED)
        return clipped

    def drop_partial_gradients(self) -> None:
        """Clear the gradients, if they were parts of a sum on servers."""
        if self.pushes_parts:
            for parameter in self._parameters:
                parameter.grad = None


def _parameters_of(optimizers: Iterable[Optimizer]) -> int:
    return sum(len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups)


class Lockstep(WorkerProtocol):
    """Synchronous protocol: each update uses the gradient of a global batch, and workers step in lockstep.

    Args:
        settings: of the servers.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._clock = 0  # number of updates so far

    def starts(self, step: int) -> None:
        super().starts(step)
        self._clock = step

    @property
    def pushes_parts(self) -> bool:
        return self.servers_step and self.world.size > 1

    def _push_part(self, *, hold: bool) -> None:
        rank = self.world.rank
        self.push(self.gradients(), clock=self._clock, parts=self.world.size, leases=(rank,), hold=hold)


@final
class WorkerStep(Lockstep):
    """Servers sum gradients, and each worker steps with the sum.

    Args:
        settings: of the servers.
        several: a window has several backwards, which reach different parameters (manual optimization).
        low_rank: compression by low-rank factors; None for none.
    """

    servers_step = False

    def __init__(self, settings: Settings, *, several: bool, low_rank: LowRank | None) -> None:
        super().__init__(settings)
        self._several = several
        self._low_rank = low_rank

    def backward(self, compute: Callable[[], None], *, closing: bool) -> None:
        earlier = self._set_aside() if self._several else []
        super().backward(compute, closing=closing)
        for parameter, gradient in earlier:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def _set_aside(self) -> list[tuple[Tensor, Tensor]]:
        """Remove gradients that are sums over ranks already, so that the next backward's gradients are separate."""
        earlier = [(parameter, parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        for parameter in self._parameters:
            parameter.grad = None
        return earlier

    def complete(self) -> bool:
        if self._low_rank is None:
            self._exchange()
        else:
            self._low_rank.join(self._exchange)
        return True

    def _exchange(self) -> None:
        self._push_part(hold=False)
        self._clock += 1
        self.client.pull_sums(self._clock)

    def gradients(self) -> list[Tensor | None]:
        if self._low_rank is None:
            return super().gradients()
        return [carrier.grad for carrier in self._low_rank.carriers]

    def kept(self) -> Any:
        return super().kept() if self._low_rank is None else self._low_rank.state()

    def keep(self, kept: Any) -> None:
        if self._low_rank is None:
            super().keep(kept)
        else:
            self._low_rank.load(kept)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        return optimizer.step(closure) if closure is not None else optimizer.step()

    def updated(self, step: int) -> int:
        return step


@final
class ServerStep(Lockstep):
    """Servers hold the sum until all workers have sent their clipping, and then step.

    Args:
        settings: of the servers.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._scales: list[tuple[list[Tensor], float]] = []
        self._limits: list[tuple[list[Tensor], float]] = []
        self._pushed = False
        self._joined = False  # complete weights were pulled since the newest update
        self._whole: list[Tensor] | None = None  # complete weights of the servers, if this worker's may lack updates
        self._received: list[Tensor | None] = []  # weights by server to which compressed differences refer

    def complete(self) -> bool:
        self.world.barrier()  # whether there is an update is known when all workers have reached this point
        return True

    def _push(self) -> None:
        """Push this worker's final gradient, once per update."""
        if not self._pushed:
            self._push_part(hold=True)
        self._pushed = True

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        clipped = self._check_once(parameters)
        self._push()
        norm = self.client.norm(self._clock, clipped)
        self._scales.append((clipped, min(1.0, max_norm / (norm + 1e-6))))  # same epsilon as torch's clip_grad_norm_
        return torch.tensor(norm)

    def clip_value(self, parameters: Iterable[Tensor], limit: float) -> bool:
        self._limits.append((self._check_once(parameters), limit))
        return True

    def _check_once(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        clipped = self.check_dense(parameters)
        before = {id(parameter) for earlier, _ in (*self._scales, *self._limits) for parameter in earlier}
        if any(id(parameter) in before for parameter in clipped):
            raise ValueError("a gradient is clipped twice in an update, and servers clip once: use optimizer=worker")
        return clipped

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        return None

    def updated(self, step: int) -> int:
        # The module's optimizer_step may have changed learning rates after the gradient was pushed for its norm.
        groups = self.groups() if self._pushed else None
        self._push()
        self.drop_partial_gradients()
        self.client.apply(self._clock, self._scales, self._limits, groups)
        self._scales, self._limits, self._pushed, self._joined = [], [], False, False
        self._clock += 1
        if self.prefetch is None:
            self.client.pull(self._parameters, self._clock, to_train=True)
        else:
            self.client.begin_pull(self._clock)
        return step

    def meet(self) -> None:
        self.client.finish_pull()
        if self.client.partial and not self._joined:  # a callback may have replaced the module's weights meanwhile
            self.client.pull(self._parameters)
        self._joined = True

    def local_state(self) -> Any:
        self.client.finish_pull()
        received = self.client.received_weights()
        if not self.world.main_rank:
            return None, None, received
        return self.client.server_optimizers(), self.client.weights() if self.client.partial else None, received

    def starts(self, step: int) -> None:
        whole, received = self._whole, self._received
        self._whole, self._received, self._joined = None, [], False
        differ = any(weights is not None for weights in received)
        local = [parameter.detach().clone() for parameter in self._parameters] if differ else []
        for parameter, weights in zip(self._parameters, whole or (), strict=False):
            parameter.detach().copy_(weights)
        super().starts(step)
        for parameter, weights in zip(self._parameters, local, strict=False):
            parameter.detach().copy_(weights)
        if differ:
            self.client.forget_tables()
        self.client.set_received_weights(received)

    def load_local_state(self, states: Sequence[Any]) -> None:
        servers, self._whole, self._received = states[0]
        if servers is None:
            return  # the main rank initialises the servers
        load_from_servers(self._optimizers, self._parameters, servers)
