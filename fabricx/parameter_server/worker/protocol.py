"""Worker protocols between two batches; lockstep: all workers together, step by step."""

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
from fabricx.parameter_server.optimizer_parts import Remembered, groups_of, nested, take_in
from fabricx.parameter_server.wire.messages import Groups, Reply, Settings
from fabricx.parameter_server.wire.powersgd import LowRank
from fabricx.parameter_server.worker.client import Client
from fabricx.parameter_server.worker.prefetch import PrefetchHooks
from fabricx.parameter_server.worker.unreduced_gradients import unjoined


class WorkerProtocol(ABC):
    """What a worker does with its gradients, and when it looks for weights.

    Attributes:
        servers_step: the servers have the optimizers' moments, and nothing is left for the workers' to do.
        computing: a gradient is being computed.
        lookout: for weights that come while a forward goes on; None where all have come before.
        owed: what servers have to add to the next sums, when training starts.
    """

    servers_step = True

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.computing = False
        self.lookout: PrefetchHooks | None = None
        self.owed: Sequence[Tensor | None] = ()
        self.world = World()
        self._client: Client | None = None
        self._parameters: list[Tensor] = []
        self._hidden: list[Tensor | None] | None = None  # gradients that hooks can't see now
        self._optimizers: list[Optimizer] = []
        self._every_optimizer: list[Optimizer] = []  # contained ones too
        self._count = 0  # parameters of all groups

    @property
    def client(self) -> Client:
        """Return who speaks to the servers."""
        assert self._client is not None
        return self._client

    def begin(self, world: World, client: Client, parameters: list[Tensor], optimizers: list[Optimizer]) -> None:
        """Get to know the others, before anything is trained."""
        self.world, self._client = world, client
        self._parameters, self._optimizers = parameters, optimizers
        self._every_optimizer = nested(optimizers)
        self._count = _parameters_of(self._every_optimizer)

    def starts(self, step: int) -> None:
        """Begin to train, after so many updates."""
        self.settings.workers = self.workers_of_update
        self.client.begin(self.settings, self._optimizers if self.servers_step else None, step, lost=self.owed)
        if self.servers_step:
            self.forget_moments()

    @property
    def workers_of_update(self) -> int:
        """Return how many workers' batches are a global batch."""
        return self.world.size

    def forget_moments(self) -> None:
        """Give up what the optimizers remember: others step."""
        for optimizer in self._every_optimizer:
            optimizer.state.clear()
            optimizer._opt_called = True  # type: ignore[attr-defined]  # else torch warns that schedules come first

    def end(self) -> None:
        """Train no more."""
        self._client = None

    @contextlib.contextmanager
    def computes(self) -> Iterator[None]:
        """Have the weights to compute a gradient with."""
        self.before_step()
        self.computing = True
        if self.lookout is not None:
            self.client.bring(self.lookout.own)
        try:
            yield
        finally:
            self.computing = False
        if self.lookout is not None:
            self.came(*self.client.finish_pull())

    def came(self, reply: Reply | None, late: set[int]) -> None:
        """Take note of weights that have come; those of some parameters after the forward."""
        if self.lookout is not None:
            self.lookout.missed = late

    def weights_step(self, step: int) -> int:
        """Wait for weights that are on their way; returns how many updates are in those that are here."""
        if self.lookout is not None and self._client is not None:
            self.came(*self._client.finish_pull())
        return step

    def before_step(self) -> None:
        """See to it that the weights are those to compute with."""

    def backward(self, compute: Callable[[], None], *, closing: bool) -> None:
        """Call what computes gradients; `closing`, the window's are complete then."""
        try:
            compute()
        except RuntimeError as error:
            if self.lookout is not None and "inplace operation" in str(error):
                raise self.lookout.complaint(self.lookout.missed) from error
            raise
        if self.lookout is not None:
            self.lookout.missed = set()
        if closing:
            self.complete()

    def complete(self) -> bool:
        """Bring this worker's gradient, or that it has none; returns whether all ranks have come this far."""
        return False

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor | None:
        """Scale the sum of all workers' gradients down to a norm, and return its own; None if that isn't elsewhere."""
        return None

    def clip_value(self, parameters: Iterable[Tensor], limit: float) -> bool:
        """Cut the elements of that sum; returns False if it isn't elsewhere."""
        return False

    @abstractmethod
    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Take part in an update."""

    @abstractmethod
    def updated(self, step: int) -> int:
        """Complete an update that is the `step`-th as far as this worker knows; returns which it is."""

    def meet(self) -> None:
        """See the same weights as all others: each calls it, and has brought all that it computed."""

    @contextlib.contextmanager
    def whole_states(self, optimizers: list[Optimizer]) -> Iterator[None]:
        """Let the optimizers have all that there is to be known of their parameters; all ranks are together."""
        if not self.servers_step:
            yield
            return
        remembered = Remembered(optimizers)
        take_in(optimizers, self._parameters, self.client.server_optimizers())
        yield
        self.forget_moments()
        remembered.restore()

    def own(self) -> Any:
        """Return what nobody would know of the weights and moments without this worker; nothing is communicated."""
        return None

    def take_own(self, owns: Sequence[Any]) -> None:
        """Take over what `own` returned on this rank, or on all of other ranks; weights are there. Then it `starts`."""

    def kept(self) -> Any:
        """Return what compression has kept of this worker's gradients for later ones."""
        return self.client.kept

    def keep(self, kept: Any) -> None:
        """Take over what `kept` has returned."""
        self.client.kept = kept

    def push(self, gradients: list[Tensor | None], **details: Any) -> bool:
        """Bring gradients, with the hyperparameters as they are now; returns whether they are used, where known."""
        return self.client.push(gradients, groups=self.groups() if self.servers_step else None, **details)

    def groups(self) -> Groups:
        """Return the hyperparameters of each group of each optimizer."""
        return groups_of(self._every_optimizer)

    def check_parameters(self) -> None:
        """Check that no optimizer has got other parameters since training began.

        Raises:
            RuntimeError: one has.
        """
        count = _parameters_of(self._every_optimizer)
        if count != self._count:
            raise RuntimeError(
                f"the optimizers had {self._count} parameters when training began and have {count} now, and servers "
                "don't know the new ones: give all parameters in configure_optimizers, those to be trained later with "
                "requires_grad=False (they are skipped until it is True); or take strategy=single"
            )

    def gradients(self) -> list[Tensor | None]:
        """Return what the parameters have now."""
        return self.gradients_here()

    @property
    def brings_parts(self) -> bool:
        """Return whether this worker's gradient is only a part of that of an update."""
        return False

    @contextlib.contextmanager
    def hooks_see_gradients(self) -> Iterator[None]:
        """Let hooks see the gradient of the update; reading it is an error where it is elsewhere."""
        if not self.brings_parts:
            yield
            return
        self._hidden = self.gradients()
        try:
            with unjoined(self._parameters):
                yield
        finally:
            hidden, self._hidden = self._hidden, None
            for parameter, gradient in zip(self._parameters, hidden, strict=True):
                if gradient is None:  # also one that was dropped
                    parameter.grad = None

    def nonfinite_gradients(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return the parameters whose gradient has NaN or infinity, or could have in the sum of all workers' parts."""
        workers = self.world.size if self.brings_parts else 1
        wanted = {id(parameter) for parameter in parameters}
        found = []
        for parameter, gradient in zip(self._parameters, self.gradients_here(), strict=True):
            if id(parameter) in wanted and gradient is not None:
                values = gradient._values() if gradient.is_sparse else gradient
                if not bool((values * workers).isfinite().all()):
                    found.append(parameter)
        return found

    def gradients_here(self) -> list[Tensor | None]:
        """Return the gradients of the parameters, by parameter, also while hooks cannot read them."""
        return [parameter.grad for parameter in self._parameters] if self._hidden is None else self._hidden

    def drop_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Let the update that follows have no gradient of some parameters from this worker."""
        wanted = {id(parameter) for parameter in parameters}
        if self._hidden is not None:
            kept = zip(self._parameters, self._hidden, strict=True)
            self._hidden = [None if id(parameter) in wanted else gradient for parameter, gradient in kept]
            return
        for parameter in self._parameters:
            if id(parameter) in wanted:
                parameter.grad = None

    def check_dense(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return parameters that are about to be clipped.

        Raises:
            ValueError: the gradient of one is sparse.
        """
        clipped = list(parameters)
        wanted = {id(parameter) for parameter in clipped}
        for parameter, gradient in zip(self._parameters, self.gradients(), strict=False):
            if id(parameter) in wanted and gradient is not None and gradient.is_sparse:
                raise ValueError(SPARSE_CLIPPED)
        return clipped

    def forget_part(self) -> None:
        """Let the parameters have no gradient, where it was a part that is summed elsewhere."""
        if self.brings_parts:
            for parameter in self._parameters:
                parameter.grad = None


def _parameters_of(optimizers: Iterable[Optimizer]) -> int:
    return sum(len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups)


class Lockstep(WorkerProtocol):
    """Each update is of the gradient of a global batch, and all workers go step by step."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._clock = 0  # updates that this worker has been a part of

    def starts(self, step: int) -> None:
        super().starts(step)
        self._clock = step

    @property
    def brings_parts(self) -> bool:
        return self.servers_step and self.world.size > 1

    def _push_own(self, *, hold: bool) -> None:
        rank = self.world.rank
        self.push(self.gradients(), clock=self._clock, parts=self.world.size, leases=(rank,), hold=hold)


@final
class WorkerStep(Lockstep):
    """The servers sum gradients, and each worker steps with the sum, by itself.

    Args:
        settings: of the servers.
        several: backwards of one window, each reaching other parameters.
        low_rank: what travels in the place of the parameters' gradients; None if those do.
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
        """Take away what is the sum of all ranks already: only what a backward adds has to be summed."""
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
        self._push_own(hold=False)
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
    """The servers hold the sum until all workers have said what it is to be clipped by, and then step."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._scales: list[tuple[list[Tensor], float]] = []
        self._limits: list[tuple[list[Tensor], float]] = []
        self._pushed = False
        self._joined = False  # have all weights come since the newest update?
        self._whole: list[Tensor] | None = None  # the servers' weights, where this worker's may be less
        self._came: list[Tensor | None] = []  # what it has of them, by server, where differences follow

    def complete(self) -> bool:
        self.world.barrier()  # whether there will be an update is known when all have come this far
        return True

    def _push(self) -> None:
        """Bring this worker's part, once nobody will change it any more."""
        if not self._pushed:
            self._push_own(hold=True)
        self._pushed = True

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        clipped = self._check_once(parameters)
        self._push()
        norm = self.client.norm(self._clock, clipped)
        self._scales.append((clipped, min(1.0, max_norm / (norm + 1e-6))))  # as torch's clip_grad_norm_ does
        return torch.tensor(norm)

    def clip_value(self, parameters: Iterable[Tensor], limit: float) -> bool:
        self._limits.append((self._check_once(parameters), limit))
        return True

    def _check_once(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        clipped = self.check_dense(parameters)
        before = {id(parameter) for earlier, _ in (*self._scales, *self._limits) for parameter in earlier}
        if any(id(parameter) in before for parameter in clipped):
            raise ValueError("a gradient is clipped twice in an update, and servers clip once: take optimizer=worker")
        return clipped

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        return None

    def updated(self, step: int) -> int:
        # The module's optimizer_step may have set rates after the gradient was brought for its norm.
        groups = self.groups() if self._pushed else None
        self._push()
        self.forget_part()
        self.client.apply(self._clock, self._scales, self._limits, groups)
        self._scales, self._limits, self._pushed, self._joined = [], [], False, False
        self._clock += 1
        if self.lookout is None:
            self.client.pull(self._parameters, self._clock, to_train=True)
        else:
            self.client.begin_pull(self._clock)
        return step

    def meet(self) -> None:
        self.client.finish_pull()
        if self.client.partial and not self._joined:  # a callback may have let the module hold others meanwhile
            self.client.pull(self._parameters)
        self._joined = True

    def own(self) -> Any:
        self.client.finish_pull()
        came = self.client.came()
        if not self.world.main_rank:
            return None, None, came
        return self.client.server_optimizers(), self.client.weights() if self.client.partial else None, came

    def starts(self, step: int) -> None:
        whole, came = self._whole, self._came
        self._whole, self._came, self._joined = None, [], False
        differ = any(weights is not None for weights in came)
        own = [parameter.detach().clone() for parameter in self._parameters] if differ else []
        for parameter, weights in zip(self._parameters, whole or (), strict=False):
            parameter.detach().copy_(weights)
        super().starts(step)
        for parameter, weights in zip(self._parameters, own, strict=False):
            parameter.detach().copy_(weights)
        if differ:
            self.client.forget_tables()
        self.client.have(came)

    def take_own(self, owns: Sequence[Any]) -> None:
        servers, self._whole, self._came = owns[0]
        if servers is None:
            return  # the servers get all from the main rank
        take_in(self._optimizers, self._parameters, servers)
