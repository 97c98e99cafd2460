"""The contract of a strategy: training of a module on one or several ranks."""

from __future__ import annotations

import warnings
from abc import ABC
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.core.averaging import AverageRule
from fabricx.distributed.world import World
from fabricx.errors import NamesChecked

ReduceOp = Literal["sum", "max", "min"]
OTHER_STATE = (
    "Resume with the optimizers and schedules of the checkpoint; or convert the checkpoint in on_load_checkpoint; or "
    "start a new run from its weights: Module.load_from_checkpoint(path), and fit without ckpt_path"
)
SPARSE_CLIPPED = (
    "torch can't clip sparse gradients; set sparse=False, or clip only dense gradients in configure_gradient_clipping"
)


@dataclass(frozen=True)
class Traits:
    """Properties of a strategy; the loop tests these, never the strategy's name.

    Attributes:
        synchronous: all ranks have the same weights after a step.
        sharded: a rank stores only a part of the weights or of the optimizer state.
        unreplicated: some state differs per rank, or is stored by servers, and not on all ranks.
        elastic: the number of ranks may change during a run.
        checkpoint_averages: a checkpoint averages the ranks' states, which changes the training that follows.
        max_ranks: largest number of ranks; None for any number.
    """

    synchronous: bool = True
    sharded: bool = False
    unreplicated: bool = False
    elastic: bool = False
    checkpoint_averages: bool = False
    max_ranks: int | None = None

    @property
    def replicated(self) -> bool:
        """Return whether each rank stores the whole state, equal on all ranks."""
        return self.synchronous and not self.sharded and not self.unreplicated


class Strategy(NamesChecked, ABC):
    """Trains a module on a `World` of ranks; the defaults are for a single rank.

    A strategy is a plain, picklable description until `setup`: it is created in the caller's process and set up in each
    worker after the process group has been joined. The loop divides the loss by the samples of the global batch, and
    multiplies it by `gradient_factor`, so that the strategy's reduction results in the sum over ranks.
    """

    traits: Traits = Traits()
    servers = 0  # number of server processes besides the ranks
    link = ""  # between workers and servers, "auto" or "gloo"; "" for a strategy with collectives only
    waited_s = 0.0  # seconds for which this rank has waited for peers in computation and updates, if measured
    waits_for_servers = False  # whether `waited_s` is the time spent waiting for servers
    pushed_s = 0.0  # seconds spent sending gradients to servers
    norm_clipping_refused = ""  # reason why the gradient norm can't be limited; "" if it can
    batch_weight_refused = ""  # reason why `Module.batch_weight` is not supported; "" if it is
    ends_window = True  # whether the next backward ends an accumulation window
    weight_pulls: int | None = None  # number of pulls of weights from servers; None if this rank steps
    global_updates = True  # an update is made from a global batch; False: from the batch of a rank
    batch_parts = 0  # fixed number of parts of each global batch; 0 for the number of ranks

    def __init__(self) -> None:
        self.world = World()
        self.module: nn.Module | None = None

    @property
    def pushes(self) -> deque[tuple[int, int, float]]:
        """Return the newest gradients that were sent to servers: (worker, number of its gradient, time)."""
        return deque()

    # -- set up -------------------------------------------------------------------------------------------------

    def enter(self, world: World) -> None:
        """Join a world; called for every stage, also for evaluation.

        Args:
            world: ranks of the run.
        """
        self.world = world

    def init_context(self) -> AbstractContextManager[Any]:
        """Return a context for `configure_model`, such as the meta device, which allocates no weights."""
        return nullcontext()

    def place(self, module: nn.Module) -> None:
        """Move a module to this rank's device; called for every stage, before any computation.

        Args:
            module: the user's module.
        """
        self.module = module
        module.to(self.world.device)

    def setup(self, module: nn.Module, *, several_backwards: bool = False) -> None:
        """Wrap or shard the module for training, and synchronise the initial weights.

        Args:
            module: the user's module, on its device.
            several_backwards: a step may call `backward` several times, each for different parameters (manual
                optimization).
        """
        self.module = module

    def attach_optimizers(self, optimizers: list[Optimizer]) -> None:
        """Attach the user's optimizers, before training and before a checkpoint is loaded.

        Args:
            optimizers: of the module.
        """

    def on_train_start(self, step: int, ranks: int) -> None:
        """Start to train, after a checkpoint has been loaded.

        Args:
            step: weight updates so far.
            ranks: number of ranks at the start of the run, which determines the global batch.
        """

    def wrap_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the callable that the loop calls instead of the module's training step.

        Args:
            step: training step of the module.
        """
        return step

    def teardown(self) -> None:
        """Release the resources of `setup`; the module stays usable."""
        self.module = None

    def world_changed(self, world: World) -> None:
        """Continue with another set of ranks; called only with `traits.elastic`.

        Args:
            world: the new ranks.

        Raises:
            NotImplementedError: the strategy is not elastic.
        """
        raise NotImplementedError(f"{type(self).__name__} can't continue with another number of ranks")

    # -- one step -----------------------------------------------------------------------------------------------

    @property
    def gradient_factor(self) -> float:
        """Return the factor of a rank's loss; the number of ranks if the reduction of gradients averages."""
        return 1.0

    def accumulate(self) -> AbstractContextManager[Any]:
        """Return a context for microbatches that do not end an accumulation window, without gradient reduction."""
        return self._window_goes_on()

    def discard_window(self) -> None:
        """Discard the results of an accumulation window that is aborted, except `parameter.grad`."""

    @contextmanager
    def _window_goes_on(self) -> Iterator[None]:
        self.ends_window = False
        try:
            yield
        finally:
            self.ends_window = True

    def backward(self, loss: Tensor, compute: Callable[[], None] | None = None) -> None:
        """Compute gradients; after the last microbatch of a window they are the global mean.

        Args:
            loss: of this rank, scaled by its share of the global batch and by `gradient_factor`; shape [].
            compute: called instead of `loss.backward`.
        """
        (compute or loss.backward)()

    def backward_without_data(self, example: tuple[Any, ...] = ()) -> bool:
        """Participate in the backward of the other ranks with a gradient of zero, on a rank without a sample.

        Args:
            example: (batch, index) of another rank's sample, as arguments of the step; empty if there is none.

        Returns:
            whether this rank has participated in the backward, so that all ranks have reached this point.
        """
        return True

    def forward_without_data(self) -> None:
        """Participate in the forward of the other ranks without a sample, if no gradient reduction follows."""
        return

    def apply_requires_grad(self) -> None:
        """Apply changes of `requires_grad` by hooks to all copies of the parameters on this rank."""
        return

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Scale gradients down to a 2-norm of at most `max_norm`, over all ranks.

        Args:
            parameters: with gradients.
            max_norm: limit.

        Returns:
            the norm before, shape [].

        Raises:
            ValueError: a gradient is sparse.
        """
        try:
            return nn.utils.clip_grad_norm_(parameters, max_norm)
        except NotImplementedError as error:
            raise ValueError(SPARSE_CLIPPED) from error

    def gradient_norm(self, optimizers: Sequence[Optimizer]) -> Tensor | None:
        """Return the 2-norm of the newest gradient, shape []; None if this rank does not have it. Collective.

        Args:
            optimizers: of the parameters.
        """
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None and not p.grad.is_sparse]
        if not gradients:
            return None
        norm: Any = nn.utils.get_total_norm(gradients)
        whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return whole

    def clip_value(self, parameters: Iterable[Tensor], limit: float) -> None:
        """Clip each element of the gradients to [-limit, limit].

        Args:
            parameters: with gradients.
            limit: 0 or more.

        Raises:
            ValueError: a gradient is sparse.
        """
        try:
            nn.utils.clip_grad_value_(parameters, limit)
        except NotImplementedError as error:
            raise ValueError(SPARSE_CLIPPED) from error

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights.

        Args:
            optimizer: to step.
            closure: recomputes the loss; None without.

        Returns:
            the result of `optimizer.step`.
        """
        return optimizer.step(closure) if closure is not None else optimizer.step()

    def hooks_see_gradients(self) -> AbstractContextManager[Any]:
        """Return a context for hooks before the update, in which gradients are the global mean or can't be read."""
        return nullcontext()

    @property
    def hides_gradients(self) -> bool:
        """Return whether hooks cannot read the gradient of an update, because a rank has only its part of the sum."""
        return False

    def nonfinite_gradients(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return the parameters whose gradient (or part of it) on this rank contains NaN or infinity.

        Args:
            parameters: of optimizers, before they step; also in hooks that cannot read the gradients.
        """
        return [p for p in parameters if p.grad is not None and not _finite(p.grad)]

    def drop_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Exclude parameters from the next update; all ranks of a synchronous strategy call it.

        Args:
            parameters: to exclude.
        """
        for parameter in parameters:
            parameter.grad = None

    def after_update(self, step: int) -> int:
        """Complete an update after all optimizers have stepped.

        Args:
            step: weight updates as counted by this rank.

        Returns:
            weight updates of the model, also by other ranks.
        """
        return step

    def wait_for_weights(self, step: int) -> int:
        """Wait until all weights in transit to this rank have arrived; return the number of updates in its weights.

        Args:
            step: weight updates as counted by this rank.
        """
        return step

    def keep_average(self, rule: AverageRule, step: int, averages: Mapping[str, Tensor]) -> frozenset[str]:
        """Maintain a moving average of the weights of each update, if a rank does not see all updates.

        Every rank calls it before training, and again after a rollback.

        Args:
            rule: update rule of the average.
            step: weight updates of the run so far.
            averages: present averages, by the names of the parameters.

        Returns:
            names of the parameters whose averages `read_average` returns; the caller maintains all other averages.
        """
        return frozenset()

    def read_average(self) -> tuple[dict[str, Tensor], int]:
        """Return the averages by name, and their steps since `keep_average`; all gradients have been sent before."""
        return {}, 0

    @property
    def updates_per_batch(self) -> int:
        """Return the number of updates per global batch of ddp, by which schedules advance."""
        return 1

    @property
    def dealer(self) -> Any:
        """Return the part that leases data to ranks that work at their own pace; None for ranks in lockstep."""
        return None

    @property
    def lost_with_worker(self) -> list[str]:
        """Return names of the state that is lost if a worker dies, because it has the only copy."""
        return []

    # -- between the ranks --------------------------------------------------------------------------------------

    def reduce(self, values: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduce packed metrics over all ranks, in place; collective.

        Args:
            values: any shape.
            op: reduction.

        Returns:
            `values`.
        """
        return self.world.all_reduce(values, op)

    def synchronize(self, copies: Mapping[str, Tensor] | None = None) -> None:
        """Complete all communication, and make weights and buffers equal on all ranks; collective.

        Args:
            copies: earlier copies of buffers, which are made equal, too.
        """
        if self.module is not None:
            for buffer in (*self.module.buffers(), *(copies or {}).values()):
                self.world.broadcast(buffer)

    def on_train_end(self) -> None:
        """Make weights equal on all ranks after training; collective."""
        self.synchronize()

    def measured(self) -> dict[str, float]:
        """Return the strategy's metrics since the previous call, on the main rank; collective."""
        return {}

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        """Return weights and optimizer states, with the same names and global shapes under every strategy.

        A shard is a DTensor. Optimizer states are keyed by the names of the parameters.

        Args:
            module: the user's module.
            optimizers: of the module; empty to save weights only.
        """
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        return {
            "module": module.state_dict(),
            "optimizers": [_by_name(optimizer, names) for optimizer in optimizers],
        }

    def replicas_of(self, rank: int, size: int) -> list[int]:
        """Return the ranks that store the same tensors as a rank, which comes first.

        Args:
            rank: any rank.
            size: number of ranks.
        """
        return [rank, *(peer for peer in range(size) if peer != rank)] if self.traits.replicated else [rank]

    def pauses(self, mark: Callable[[], Any]) -> list[tuple[Any, Any]]:
        """Start to record the times at which this rank's device waits for peers during computation.

        Args:
            mark: returns a time stamp of the device.

        Returns:
            a list of (begin, end) that grows with each wait; it stays empty if the device does not wait.
        """
        return []

    def local_state_dict(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        """Return the local state of this rank for `load_local_states`, without communication.

        Args:
            module: the user's module.
            optimizers: of the module.
        """
        return self.state_dict(module, optimizers)

    def load_local_states(
        self, states: Sequence[dict[str, Any]], module: nn.Module, optimizers: list[Optimizer], *, own: bool
    ) -> None:  # fmt: skip
        """Load local states.

        Args:
            states: results of `local_state_dict`: this rank's (`own`), or those of all former ranks.
            module: the user's module.
            optimizers: of the module.
            own: whether the state is this rank's; False after a change of the number of ranks.
        """
        self.load_state_dict(states[0], module, optimizers)

    def whole_weights(self, module: nn.Module) -> dict[str, Any]:
        """Return the unsharded weights, in main memory, on the main rank; collective.

        Args:
            module: the user's module.
        """
        return {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}

    def sharded_parameters(self) -> dict[str, Tensor]:
        """Return the sharded parameters by name, as DTensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any], module: nn.Module, optimizers: list[Optimizer]) -> None:
        """Load a state of any strategy.

        Args:
            state: result of `state_dict`.
            module: the user's module.
            optimizers: of the module; the state must have as many.

        Raises:
            ValueError: the optimizers differ from those of the state.
        """
        module.load_state_dict(state["module"])
        if len(state["optimizers"]) != len(optimizers):
            raise ValueError(
                f"the checkpoint holds {len(state['optimizers'])} optimizers and the module has {len(optimizers)}. "
                + OTHER_STATE
            )
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(_by_number(optimizer, names, saved))

    def device(self, local_rank: int, accelerator: str) -> torch.device:
        """Return the device of a rank.

        Args:
            local_rank: rank on its machine.
            accelerator: device type, such as "cuda" or "cpu".
        """
        return torch.device("cuda", local_rank) if accelerator == "cuda" else torch.device(accelerator)

    def backend(self, device: torch.device) -> str:
        """Return the name of the backend for collectives of ranks on a kind of device.

        Args:
            device: of a rank.
        """
        return "nccl" if device.type == "cuda" else "gloo"


def sparse_tables(module: nn.Module) -> list[str]:
    """Return the names of the embeddings that are trained with sparse gradients.

    Args:
        module: the user's module.
    """
    kinds = (nn.Embedding, nn.EmbeddingBag)
    parts = ((name, part) for name, part in module.named_modules() if isinstance(part, kinds) and part.sparse)
    return [name for name, part in parts if part.weight.requires_grad]


def warn_of_lost_residuals(world: World) -> None:
    """Warn that compression errors (residuals) are dropped, because the number of ranks has changed.

    Args:
        world: the new ranks; only rank 0 warns.
    """
    if world.main_rank:
        warnings.warn(
            "the number of ranks has changed: the compression errors of gradients are dropped; resume with the same "
            "number of ranks to keep them",
            stacklevel=3,
        )


def check_dense(module: nn.Module, what: str) -> None:
    """Refuse embeddings whose gradients are sparse, before training.

    Args:
        module: the user's module.
        what: option that does not support sparse gradients, for the message.

    Raises:
        ValueError: there is such an embedding; the message names the remedies.
    """
    if names := sparse_tables(module):
        raise ValueError(
            f"{what} sums no sparse gradients, and {names[0]} has them; set sparse=False, or use strategy=ddp"
        )


def check_frozen(module: nn.Module | None, frozen: Sequence[Tensor], what: str) -> None:
    """Refuse gradients of parameters that were frozen at set-up, because the strategy does not reduce them.

    Args:
        module: the user's module.
        frozen: its parameters that required no gradient at set-up.
        what: name of the strategy, for the message.

    Raises:
        ValueError: such a parameter requires a gradient now.
    """
    for parameter in frozen:
        if parameter.requires_grad:
            names = {id(tensor): name for name, tensor in module.named_parameters()} if module is not None else {}
            raise ValueError(
                f"{names.get(id(parameter), 'a parameter')} was frozen at set-up and is trained now, and {what} "
                "reduces only parameters that required a gradient at set-up; freeze it in on_train_start instead, or "
                "use strategy=ddp"
            )


def _parameter_names(optimizer: Optimizer, names: Mapping[int, str]) -> list[str]:
    """Return the names of an optimizer's parameters, in its order; a number for parameters outside of the module."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [names.get(id(parameter), f"#{number}") for number, parameter in enumerate(parameters)]


def _by_name(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return an optimizer's state, keyed by names of parameters instead of torch's numbers."""
    ordered, state = _parameter_names(optimizer, names), optimizer.state_dict()
    return {
        **state,
        "class": type(optimizer).__qualname__,
        "state": {ordered[number]: values for number, values in state["state"].items()},
        "param_groups": [{**g, "params": [ordered[number] for number in g["params"]]} for g in state["param_groups"]],
    }


def _by_number(optimizer: Optimizer, names: Mapping[int, str], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inverse of `_by_name`, for an optimizer of the same class and the same groups, in any order.

    Raises:
        ValueError: the class, the parameters or the division into groups differ.
    """
    now_class = type(optimizer).__qualname__
    if (before := saved.get("class", now_class)) != now_class:
        raise ValueError(f"the optimizer of the checkpoint is {before}, and the module's is {now_class}. {OTHER_STATE}")
    order = _parameter_names(optimizer, names)
    numbers = {name: number for number, name in enumerate(order)}
    known = {name for group in saved["param_groups"] for name in group["params"]}
    if known != set(numbers):
        missing, more = sorted(set(numbers) - known), sorted(known - set(numbers))
        raise ValueError(
            f"the optimizer of the checkpoint has other parameters than the module's: it lacks "
            f"{', '.join(missing) or 'none'}, and additionally has {', '.join(more) or 'none'}. {OTHER_STATE}"
        )
    groups = {frozenset(group["params"]): group for group in saved["param_groups"]}
    now = optimizer.state_dict()["param_groups"]
    divided = [frozenset(order[number] for number in group["params"]) for group in now]
    if set(divided) != set(groups):
        described = " and ".join(
            "; ".join(", ".join(sorted(group)) for group in division) for division in (groups, divided)
        )
        raise ValueError(
            f"the optimizer of the checkpoint has other parameter groups than the module's: {described}. {OTHER_STATE}"
        )
    return {  # torch loads by position: groups and numbers have to be in the optimizer's order
        **saved,
        "state": {numbers[name]: values for name, values in saved["state"].items()},
        "param_groups": [{**groups[key], "params": g["params"]} for key, g in zip(divided, now, strict=True)],
    }


def _finite(gradient: Tensor) -> bool:
    values = gradient._values() if gradient.is_sparse else gradient
    return bool(values.isfinite().all())
