"""How a worker goes on between its batches: with all others, step by step."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabricx.comm.world import World
from fabricx.exchange.arrival import Lookout
from fabricx.exchange.client import Client
from fabricx.exchange.lowrank import LowRank
from fabricx.exchange.messages import Groups, Reply, Settings
from fabricx.strategy import SPARSE_CLIPPED


class Pace(ABC):
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
        self.lookout: Lookout | None = None
        self.owed: Sequence[Tensor | None] = ()
        self.world = World()
        self._client: Client | None = None
        self._parameters: list[Tensor] = []
        self._optimizers: list[Optimizer] = []

    @property
    def client(self) -> Client:
        """Return who speaks to the servers."""
        assert self._client is not None
        return self._client

    def begin(self, world: World, client: Client, parameters: list[Tensor], optimizers: list[Optimizer]) -> None:
        """Get to know the others, before anything is trained."""
        self.world, self._client = world, client
        self._parameters, self._optimizers = parameters, optimizers

    def starts(self, step: int) -> None:
        """Begin to train, after so many updates."""
        self.settings.workers = self.world.size
        self.client.begin(self.settings, self._optimizers if self.servers_step else None, step, lost=self.owed)
        if self.servers_step:
            self.forget_moments()

    def forget_moments(self) -> None:
        """Give up what the optimizers remember: others step."""
        for optimizer in self._optimizers:
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

    def before_step(self) -> None:
        """See to it that the weights are those to compute with."""

    def backward(self, loss: Tensor, *, closing: bool) -> None:
        """Compute gradients; `closing`, the window's are complete then."""
        try:
            loss.backward()  # type: ignore[no-untyped-call]
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
        for optimizer, states in zip(optimizers, self.client.optimizer_states(), strict=True):
            for parameter, state in zip(self._parameters, states, strict=True):
                if state:
                    optimizer.state[parameter] = state
        yield
        self.forget_moments()

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

    def push(self, gradients: list[Tensor | None], **details: Any) -> None:
        """Bring gradients, with the hyperparameters as they are now."""
        self.client.push(gradients, groups=self.groups() if self.servers_step else None, **details)

    def groups(self) -> Groups:
        """Return the hyperparameters of each group of each optimizer."""
        return [
            [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            for optimizer in self._optimizers
        ]

    def gradients(self) -> list[Tensor | None]:
        """Return what the parameters have now."""
        return [parameter.grad for parameter in self._parameters]


class Together(Pace):
    """Each update is of the gradient of a global batch, and all workers go step by step."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._clock = 0  # updates that this worker has been a part of

    def starts(self, step: int) -> None:
        super().starts(step)
        self._clock = step

    def _push_own(self, *, hold: bool) -> None:
        rank = self.world.rank
        self.push(self.gradients(), clock=self._clock, parts=self.world.size, leases=(rank,), hold=hold)


@final
class Summing(Together):
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

    def backward(self, loss: Tensor, *, closing: bool) -> None:
        earlier = self._set_aside() if self._several else []
        super().backward(loss, closing=closing)
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
class Holding(Together):
    """The servers hold the sum until all workers have said what it is to be clipped by, and then step."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._scales: list[tuple[list[Tensor], float]] = []
        self._limits: list[tuple[list[Tensor], float]] = []
        self._pushed = False
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
        clipped = list(parameters)
        if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in clipped):
            raise ValueError(SPARSE_CLIPPED)
        self._push()
        norm = self.client.norm(self._clock, clipped)
        self._scales.append((clipped, min(1.0, max_norm / (norm + 1e-6))))  # as torch's clip_grad_norm_ does
        return torch.tensor(norm)

    def clip_value(self, parameters: Iterable[Tensor], limit: float) -> bool:
        self._limits.append((list(parameters), limit))
        return True

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        return None

    def updated(self, step: int) -> int:
        self._push()
        self.client.apply(self._clock, self._scales, self._limits)
        self._scales, self._limits, self._pushed = [], [], False
        self._clock += 1
        if self.lookout is None:
            self.client.pull(self._parameters, self._clock, to_train=True)
        else:
            self.client.begin_pull(self._clock)
        return step

    def meet(self) -> None:
        self.client.finish_pull()
        if self.client.partial:
            self.client.pull(self._parameters)

    def own(self) -> Any:
        self.client.finish_pull()
        came = self.client.came()
        if not self.world.main_rank:
            return None, None, came
        return self.client.optimizer_states(), self.client.weights() if self.client.partial else None, came

    def starts(self, step: int) -> None:
        whole, came = self._whole, self._came
        self._whole, self._came = None, []
        differ = any(weights is not None for weights in came)
        own = [parameter.detach().clone() for parameter in self._parameters] if differ else []
        for parameter, weights in zip(self._parameters, whole or (), strict=False):
            parameter.detach().copy_(weights)
        super().starts(step)
        for parameter, weights in zip(self._parameters, own, strict=False):
            parameter.detach().copy_(weights)
        self.client.have(came)

    def take_own(self, owns: Sequence[Any]) -> None:
        states, self._whole, self._came = owns[0]
        if states is None:
            return  # the servers get all from the main rank
        for optimizer, mine in zip(self._optimizers, states, strict=True):
            optimizer.state.update({p: state for p, state in zip(self._parameters, mine, strict=True) if state})
