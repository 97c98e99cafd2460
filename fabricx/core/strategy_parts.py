"""Parts of the contract that few strategies implement, each with defaults for all others.

A strategy implements a part by inheritance, for example `class FSDP(Strategy, ShardsWeights)`. The run asks for a part
with `as_part(strategy, ShardsWeights)`: for another strategy this returns an object with the defaults.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.core.strategy_support.averaging import AverageRule
from fabricx.core.strategy_support.dealer import Dealer
from fabricx.distributed.world import World

if TYPE_CHECKING:
    from fabricx.core.strategy_support.trial import Trial

Part = TypeVar("Part")


def as_part(strategy: object, part: type[Part]) -> Part:
    """Return a strategy as one of the parts below.

    Args:
        strategy: the run's strategy.
        part: class of the part.

    Returns:
        the strategy; or its `data_strategy` (`AddsAxes`), if only that implements the part; or an object with the
        part's defaults.
    """
    if isinstance(strategy, part):
        return strategy
    return as_part(strategy.data_strategy, part) if isinstance(strategy, AddsAxes) else part()


def check_parts(strategy: type) -> None:
    """Refuse a class that defines a method of a part without inheriting the part: the run would not call the method.

    Args:
        strategy: class of a strategy.

    Raises:
        TypeError: it names the part.
    """
    for part in (
        DealsData, Elastic, HasServers, HidesGradients, KeepsLocalState, MeasuresWaiting, ModelParallel, ShardsWeights,
        WrapsStep,
    ):  # fmt: skip
        methods = [name for name, member in vars(part).items() if callable(member) or isinstance(member, property)]
        names = [name for name in methods if not name.startswith("_") and name in vars(strategy)]
        if names and not issubclass(strategy, part):
            raise TypeError(
                f"{strategy.__name__}.{names[0]} would never be called: {strategy.__name__} must inherit "
                f"{part.__name__}, too, as in class {strategy.__name__}(fabricx.Strategy, "
                f"fabricx.core.strategy_parts.{part.__name__})"
            )


def check_implemented(strategy: object) -> None:
    """Check that a strategy has the methods of its parts that have no default.

    Args:
        strategy: strategy of a run.

    Raises:
        ValueError: it names the method.
    """
    for part, names in (
        (Elastic, ("world_changed",)), (KeepsLocalState, ("local_state_dict", "load_local_states")),
    ):  # fmt: skip
        for name in names if isinstance(strategy, part) else ():
            if getattr(type(strategy), name) is getattr(part, name):
                raise ValueError(
                    f"{type(strategy).__name__} inherits {part.__name__}: implement {name}, or don't inherit it"
                )


class AddsAxes:
    """A strategy that adds axes of parallelism to another strategy, which has the parts that this one does not have.

    Attributes:
        data_strategy: the other strategy; set in the constructor.
    """

    data_strategy: Any


class Elastic:
    """A strategy that continues with other ranks when workers die or join (`traits.elastic`)."""

    def world_changed(self, world: World) -> None:
        """Continue with other ranks: set `self.world`, build process groups and buffers again.

        Args:
            world: the new ranks; this rank has joined their process group.

        Raises:
            NotImplementedError: the strategy does not implement this part.
        """
        raise NotImplementedError("a strategy with traits.elastic inherits Elastic and implements world_changed")


class HoldsPart:
    """A strategy whose ranks may hold a part of the module; `Mesh` sets the attributes before `Strategy.setup`.

    Attributes:
        absent: names of the parameters and buffers of other stages of a pipeline; states don't contain them.
        elements: number of elements of each whole parameter, by name; empty if the ranks hold whole parameters.
    """

    absent: Collection[str] = ()
    elements: Mapping[str, int] = {}


class KeepsLocalState:
    """A strategy whose in-memory checkpoints differ from `state_dict`: that is collective, or state differs by rank."""

    def local_state_dict(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        """Return the state of this rank for `load_local_states`, without communication.

        Args:
            module: the user's module.
            optimizers: optimizers of the module.
        """
        raise NotImplementedError

    def load_local_states(
        self, states: Sequence[dict[str, Any]], module: nn.Module, optimizers: list[Optimizer], *, own: bool
    ) -> None:  # fmt: skip
        """Load local states; collective, and the former ranks have the same numbers if `own`.

        Args:
            states: results of `local_state_dict`: this rank's (`own`), or those of all former ranks.
            module: the user's module.
            optimizers: optimizers of the module.
            own: whether the state is this rank's; False after a change of the number of ranks.
        """
        raise NotImplementedError

    def unchanged(self, module: nn.Module, optimizers: list[Optimizer]) -> AbstractContextManager[None]:
        """Return a context whose end restores the state that this rank had before it; collective.

        For a checkpoint at a step that depends on time, if `traits.checkpoint_averages`: it must not change the
        training that follows. A copy of the state is on the CPU meanwhile.

        Args:
            module: the user's module.
            optimizers: of the module.
        """
        return _restored(self, module, optimizers)


@contextmanager
def _restored(strategy: KeepsLocalState, module: nn.Module, optimizers: list[Optimizer]) -> Iterator[None]:
    state, buffers = apply_to_collection(
        (strategy.local_state_dict(module, optimizers), dict(module.named_buffers())), Tensor, _copied
    )
    yield
    strategy.load_local_states([state], module, optimizers, own=True)
    for name, buffer in module.named_buffers():  # also those that are not saved
        buffer.copy_(buffers[name])


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


class WrapsStep:
    """A strategy that calls the training step, also that of a manually optimised module, through a function."""

    def wrap_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the callable that the loop calls instead of the module's training step.

        Args:
            step: training step of the module.
        """
        return step

    def wrap_evaluation(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the callable that an evaluation during training calls instead of a step of the module.

        Args:
            step: "validation_step" of the module.
        """
        return step


class ModelParallel:
    """A strategy in which several ranks compute a share of the data together: axes of parallelism besides "data".

    Attributes:
        divides: several ranks compute a share, for some number of ranks at least.
    """

    divides = False

    def data_ranks_of(self, ranks: int) -> int:
        """Return the number of data ranks among a number of ranks.

        Args:
            ranks: number of all ranks.
        """
        return ranks

    def check_ranks(self, ranks: int) -> None:
        """Refuse a number of ranks that does not fit the axes, before any process starts.

        Args:
            ranks: number of all ranks.

        Raises:
            ValueError: names the nearest numbers that fit.
        """

    def with_axes(self, world: World) -> World:
        """Return the world with its axes; builds their process groups, so that all ranks call it.

        Args:
            world: all ranks.

        Raises:
            ValueError: the number of ranks does not fit the axes.
        """
        return world

    def check_options(
        self, *, precision: str, compiles: bool, synchronises_batchnorm: bool, automatic_optimization: bool
    ) -> None:  # fmt: skip
        """Refuse options of the run that the axes of parallelism do not support, before training.

        Args:
            precision: the run's precision, such as "bf16-mixed".
            compiles: the run compiles the module.
            synchronises_batchnorm: batch normalisation is synchronised over all ranks.
            automatic_optimization: of the module.

        Raises:
            ValueError: names the option and the remedy.
        """

    def parallelize(self, module: nn.Module, trial: Callable[[], Trial], layout: Mapping[str, Any]) -> None:
        """Divide the module's parameters and computation over ranks, before `Strategy.setup`; all ranks call it.

        Args:
            module: the user's module, whole, on its device.
            trial: returns the training step on two samples.
            layout: layout of the run that is resumed; {} for a new run.
        """

    @property
    def layout(self) -> dict[str, Any]:
        """Return what a resumed run has to divide in the same way for equal rounding, as plain data."""
        return {}

    def whole_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a checkpoint with whole tensors; all ranks call it.

        Args:
            state: nested, with this rank's parts of weights, moments and averages below the names of parameters.
        """
        return state

    def own_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a state; the inverse of `whole_state`, without communication.

        Args:
            state: state of a checkpoint.
        """
        return state

    def restore_whole(self, module: nn.Module) -> None:
        """Give the module and the optimizers whole tensors again, at the end of a fit; all ranks call it.

        Args:
            module: the user's module.
        """


class DealsData:
    """A strategy whose ranks work at their own pace, on data that it leases to them (`traits.lockstep` is False)."""

    @property
    def dealer(self) -> Dealer:
        """Return the part that leases data; it does nothing for ranks in lockstep."""
        return Dealer()


class ShardsWeights:
    """A strategy with `traits.sharded`: a rank stores a part of each weight, and gathers weights to compute."""

    def init_context(self, *, filled: bool = False) -> AbstractContextManager[Any]:
        """Return a context for `configure_model`, such as the meta device, which allocates no weights.

        Args:
            filled: the run loads the weights from a checkpoint.
        """
        return nullcontext()

    @property
    def computes_together(self) -> bool:
        """Return whether a forward needs all ranks now: they gather weights or exchange data in it."""
        return bool(self.sharded_parameters())

    def sharded_parameters(self) -> dict[str, Tensor]:
        """Return the sharded parameters by name, as DTensors."""
        return {}

    def load_targets(self) -> dict[str, Tensor]:
        """Return parameters by name whose saved tensors are loaded as the same shards; all others are loaded whole."""
        return self.sharded_parameters()

    def whole_weights(self, module: nn.Module) -> dict[str, Any]:
        """Return the unsharded weights, in main memory, on the main rank; collective. Other state is returned as it is.

        Args:
            module: the user's module.
        """
        state: Mapping[str, Any] = module.state_dict()  # extra state, and lists of metric objects, are no tensors
        return {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in state.items()}

    def reshard(self) -> None:
        """Free weights that a forward without a backward has gathered; without communication."""

    def unshard(self) -> None:
        """Reverse the sharding, at the end of a fit; the values of weights and optimizer states may be lost."""

    def apply_requires_grad(self) -> None:
        """Apply changes of `requires_grad` by hooks to all copies of the parameters on this rank."""


class HasServers:
    """A strategy with server processes, or whose ranks make updates that other ranks do not see.

    Attributes:
        servers: number of server processes besides the ranks.
        link: between workers and servers, "auto" or "gloo"; "" for collectives only.
        weight_pulls: number of pulls of weights from servers; None if this rank updates the weights (`servers_step`).
        overwrites: the next weights from servers replace those of this rank, with any change that it made.
        shares_update: other ranks may change the weights of this rank now, in shared memory.
        global_updates: an update is made from a global batch; False: from the batch of a rank.
        norm_clipping_refused: reason why the gradient norm can't be limited; "" if it can.
    """

    servers = 0
    link = ""
    weight_pulls: int | None = None
    overwrites = False
    shares_update = False
    global_updates = True
    norm_clipping_refused = ""

    @property
    def servers_step(self) -> bool:
        """Return whether servers update the weights, and not this rank."""
        return self.weight_pulls is not None

    def on_train_start(self, step: int, ranks: int) -> None:
        """Start to train, after a checkpoint has been loaded; `load_local_states` starts to train by itself.

        Args:
            step: weight updates so far.
            ranks: number of ranks at the start of the run, which determines the global batch.
        """

    def pull_tables(self) -> None:
        """Pull the rows of sparse tables that the weights of this rank lack, before a hook of the user may read them.

        Without effect on ranks that work at their own pace, whose other weights are not the newest either.
        """

    def wait_for_weights(self, step: int) -> int:
        """Wait until all weights in transit to this rank have arrived; return the number of updates in its weights.

        Args:
            step: weight updates as counted by this rank.
        """
        return step

    @property
    def updates_per_batch(self) -> int:
        """Return the number of updates per global batch of ddp, by which schedules advance."""
        return 1

    def keep_average(
        self, rule: AverageRule, step: int, averages: Mapping[str, Tensor], updates: int = 0
    ) -> frozenset[str]:
        """Maintain a moving average of the weights of each update, if a rank does not see all updates.

        Every rank calls it before training, and again after a rollback.

        Args:
            rule: update rule of the average.
            step: weight updates of the run so far.
            averages: present averages, by the names of the parameters.
            updates: steps of the present averages.

        Returns:
            names of the parameters whose averages `read_average` returns; the caller maintains all other averages.
        """
        return frozenset()

    def read_average(self) -> tuple[dict[str, Tensor], int]:
        """Return the averages by name, and their steps since the first; all gradients have been sent before."""
        return {}, 0

    @property
    def lost_with_worker(self) -> list[str]:
        """Return names of the state that is lost if a worker dies, because it has the only copy."""
        return []

    def measured(self) -> dict[str, float]:
        """Return metrics of the servers since the previous call, on the main rank; collective."""
        return {}


class HidesGradients:
    """A strategy under which `parameter.grad` is not always the gradient of the update.

    Attributes:
        hides_gradients: hooks cannot read the gradient of an update, because a rank has only its part of the sum.
        divides_weights: a rank may have a part of a weight, so that hooks need `hooks_see_weights`.
    """

    hides_gradients = False
    divides_weights = False

    def hooks_see_gradients(self) -> AbstractContextManager[Any]:
        """Return a context for hooks before the update, in which gradients are the global mean or can't be read."""
        return nullcontext()

    def hooks_see_weights(self, name: str) -> AbstractContextManager[Any]:
        """Return a context for a hook of the user, in which it sees whole weights; entered if `divides_weights`.

        Args:
            name: of the hook.
        """
        return nullcontext()

    def weights_as_stored(self) -> AbstractContextManager[Any]:
        """Return a context for code of fabricx that hooks call, in which a rank sees its parts of the weights."""
        return nullcontext()

    def nonfinite_gradients(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return the parameters whose gradient (or part of it) on this rank contains NaN or infinity.

        Args:
            parameters: parameters of optimizers, before they step; also in hooks that cannot read the gradients.
        """
        return [p for p in parameters if p.grad is not None and not _finite(p.grad)]

    def drop_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Exclude parameters from the next update; all ranks of a synchronous strategy call it.

        Args:
            parameters: parameters to exclude.
        """
        for parameter in parameters:
            parameter.grad = None


class MeasuresWaiting:
    """A strategy that measures how long this rank waits for other processes.

    Attributes:
        servers: number of server processes.
        waited_s: seconds for which this rank has waited for peers in computation and updates.
        waits_for_servers: whether `waited_s` is the time spent waiting for servers.
        pushed_s: seconds spent sending gradients to servers.
    """

    servers = 0
    waited_s = 0.0
    waits_for_servers = False
    pushed_s = 0.0

    @property
    def pushes(self) -> deque[tuple[int, int, float]]:
        """Return the newest gradients that were sent to servers: (worker, number of its gradient, time)."""
        return deque()

    def record_pauses(self, mark: Callable[[], Any]) -> list[tuple[Any, Any]]:
        """Start to record the times at which this rank's device waits for peers during computation.

        Args:
            mark: returns a time stamp of the device.

        Returns:
            a list of (begin, end) that grows with each wait; it stays empty if the device does not wait.
        """
        return []


def _finite(gradient: Tensor) -> bool:
    values = gradient._values() if gradient.is_sparse else gradient
    return bool(values.isfinite().all())
