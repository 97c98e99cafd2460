"""The contract of a strategy: training of a module on one or several ranks.

These methods are for every strategy. Parts that few strategies implement are in `strategy_parts.py`; the guide is
`docs/strategy.md`.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.core.module_state.placeholder import is_placeholder, load_present
from fabricx.core.strategy_parts import HoldsPart, as_part, check_parts
from fabricx.core.strategy_support.gradient_checks import SPARSE_CLIPPED
from fabricx.core.strategy_support.held_gradients import take_from_state
from fabricx.core.strategy_support.lightning_names import StrategyNames
from fabricx.core.strategy_support.optimizer_state import OTHER_STATE, by_name, by_number
from fabricx.distributed.membership.lost_peers import raise_peer_lost
from fabricx.distributed.sharding.dtensors import is_dtensor
from fabricx.distributed.world import World
from fabricx.errors import NamesChecked

ReduceOp = Literal["sum", "max", "min"]


@dataclass(frozen=True)
class Traits:
    """Properties of a strategy; the loop tests these, never the strategy's name.

    Attributes:
        synchronous: all ranks have the same weights after a step.
        lockstep: all ranks train each global batch together; False: each rank works at its own pace, on data that the
            strategy leases to it (`DealsData`).
        averages: gradients are averaged over ranks, not summed; the loop then multiplies each loss by the number of
            ranks.
        exchanges: a step computes with data of other ranks, so that all ranks compute each microbatch.
        sharded: a rank stores only a part of the weights or of the optimizer state (`ShardsWeights`).
        unreplicated: some state differs per rank, or is stored by servers, and not on all ranks.
        elastic: the number of ranks may change during a run (`Elastic`).
        checkpoint_averages: a checkpoint averages the ranks' states, which changes the training that follows.
        max_ranks: largest number of ranks; None for any number.
        replicas: number of groups of ranks with the same state, if `sharded`.
        model_axes: ranks along the axes "pipeline", "context", "tensor" and "expert" of a divided model.
        batch_parts: fixed number of parts of each global batch; 0 for the number of ranks.
    """

    synchronous: bool = True
    lockstep: bool = True
    averages: bool = False
    exchanges: bool = False
    sharded: bool = False
    unreplicated: bool = False
    elastic: bool = False
    checkpoint_averages: bool = False
    max_ranks: int | None = None
    replicas: int = 1
    model_axes: tuple[int, int, int, int] = (1, 1, 1, 1)
    batch_parts: int = 0

    @property
    def joint_steps(self) -> bool:
        """Return whether all ranks compute each microbatch together: they gather weights or exchange data in it."""
        return self.sharded or self.exchanges

    @property
    def replicated(self) -> bool:
        """Return whether each rank stores the whole state, equal on all ranks."""
        return self.synchronous and not self.sharded and not self.unreplicated

    @property
    def resizable(self) -> bool:
        """Return whether the state of several ranks can be loaded by another number of ranks, with equal model axes."""
        *_, expert = self.model_axes
        return expert == 1 and (self.synchronous or math.prod(self.model_axes) == 1)

    def model_part(self, rank: int) -> tuple[int, int]:
        """Return the stage of the pipeline and the tensor rank of a rank: its part of a divided model.

        Args:
            rank: any rank.
        """
        pipeline, context, tensor, _ = self.model_axes
        return rank // (context * tensor) % pipeline, rank % tensor

    def represents(self, rank: int) -> bool:
        """Return whether checkpoints have the metrics and random numbers of a rank; see `World.represents`.

        Args:
            rank: any rank.
        """
        pipeline, context, tensor, _ = self.model_axes
        return rank % (pipeline * context * tensor) == (pipeline - 1) * context * tensor

    def replicas_of(self, rank: int, size: int) -> list[int]:
        """Return the ranks that store the same state as a rank, which comes first.

        Args:
            rank: any rank.
            size: number of ranks.
        """
        group = size // self.replicas if size % self.replicas == 0 else size  # ranks that hold the whole state together
        if self.replicated:
            group = 1
        peers = list(range(rank % group, size, group))
        if math.prod(self.model_axes[:3]) > 1 and self.synchronous and not self.sharded:
            peers = [peer for peer in range(size) if self.model_part(peer) == self.model_part(rank)]
        return [rank, *(peer for peer in peers if peer != rank)]


class Strategy(StrategyNames, NamesChecked, ABC):
    """Trains a module on a `World` of ranks; the defaults are for a single rank.

    A strategy is a plain, picklable description until `setup`: it is created in the caller's process and set up in each
    worker after the process group has been joined. The loop divides the loss by the samples of the global batch, so
    that the sum of the ranks' gradients is the gradient of the global batch. If `traits.averages`, it multiplies the
    loss by the number of ranks.

    Attributes:
        traits: properties, of the class or of this strategy.
        batch_weight_refused: reason why `Module.batch_weight` is not supported; "" if it is.
        accumulation_refused: reason why several batches per weight update are not supported; "" if they are.
        world: the ranks; set before all methods below.
        module: the user's module, on its device; None outside of a run.
        ends_window: whether the next backward is the last of an accumulation window, before an update.
        buffer_source: data rank whose buffers are copied to the others: the first with a sample of the newest batch,
            because the stream of rank 0 may have ended.
    """

    former_arguments: ClassVar[Mapping[str, str]] = {
        "backend": (
            "processes communicate by gloo on CPUs and by NCCL on GPUs, also if mpirun has started them; MPI itself is "
            "not used. Remove it"
        )
    }
    traits: Traits = Traits()
    batch_weight_refused = ""
    accumulation_refused = ""
    ends_window = True
    buffer_source = 0

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_parts(cls)

    def __init__(self) -> None:
        self.world = World()
        self.module: nn.Module | None = None

    def enter(self, world: World, module: nn.Module) -> None:
        """Begin a stage of a run, also an evaluation; called before `setup`, by the run only.

        Args:
            world: ranks of the run.
            module: the user's module.
        """
        self.world, self.module = world, module

    @property
    def data_ranks(self) -> World:
        """Return the ranks that train different shares of each global batch, over which gradients are reduced."""
        return self.world.axis("data")

    @property
    def step_ranks(self) -> World:
        """Return the data ranks that make each step together: all if synchronous, else this rank or its island."""
        return self.data_ranks if self.traits.synchronous else self.world.axis("island_data")

    # -- set up -------------------------------------------------------------------------------------------------

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
            optimizers: optimizers of the module.
        """

    def teardown(self) -> None:
        """Release the resources of `setup`; the module stays usable."""
        self.module = None

    # -- one step -----------------------------------------------------------------------------------------------

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Return a context for microbatches that do not end an accumulation window, without gradient reduction."""
        self.ends_window = False
        try:
            yield
        finally:
            self.ends_window = True

    def forward_backward(
        self, step: Callable[..., Any], backward: Callable[[Any], Any], batch: Any, index: int
    ) -> Any:  # fmt: skip
        """Compute the gradients of a microbatch with automatic optimization.

        A strategy that computes a microbatch in several parts, such as the stages of a pipeline, calls `step` and
        `backward` for each part, and scales the losses of the parts to those of the whole microbatch.

        Args:
            step: training step of the module; called with a batch and its index.
            backward: called with the outputs of `step`; runs the hooks, and calls `Strategy.backward` with the scaled
                loss. Returns the outputs for hooks; None without a loss.
            batch: batch of the data loader, on the device.
            index: index of the batch.

        Returns:
            the result of `backward`.
        """
        return backward(step(batch, index))

    def backward(self, loss: Tensor, compute: Callable[[], None] | None = None) -> None:
        """Compute gradients; after the last microbatch of a window they are those of the global batch.

        Args:
            loss: this rank's loss, scaled by its share of the global batch, and by the number of ranks if
                `traits.averages`; shape [].
            compute: called instead of `loss.backward`.

        Raises:
            PeerLost: torch communicates in this backward, and another rank has died.
        """
        try:
            (compute or loss.backward)()
        except RuntimeError as error:
            raise_peer_lost(error, f"rank {self.world.rank} of {self.world.size}, backward")
            raise

    def backward_without_data(self, example: tuple[Any, ...] = ()) -> bool:
        """Participate in the forward and backward of the other ranks, with a gradient of zero.

        Called on a rank without a sample, without a loss or with a batch of weight zero.

        Args:
            example: (batch, index) of another rank's sample, as arguments of the step; empty if there is none.

        Returns:
            True if it took part in a reduction that is complete on no rank before all have reached it; else False. Read
            at the end of an accumulation window, and with `joint_steps` for each microbatch.
        """
        return True

    def discard_window(self) -> None:
        """Discard the results of an accumulation window that is aborted, except `parameter.grad`."""

    def gradient_norm(self, optimizers: Sequence[Optimizer]) -> Tensor | None:
        """Return the 2-norm of the newest gradient, shape []; None if this rank does not have it. Collective.

        Args:
            optimizers: optimizers of the parameters.
        """
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        known = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        gradients = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in known]
        if not gradients:
            return None
        norm: Any = nn.utils.get_total_norm(gradients)
        whole: Tensor = norm.full_tensor() if is_dtensor(norm) else norm
        return whole

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Scale gradients down to a 2-norm of at most `max_norm`, over all ranks.

        Args:
            parameters: parameters with gradients.
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

    def clip_value(self, parameters: Iterable[Tensor], limit: float) -> None:
        """Clip each element of the gradients to [-limit, limit].

        Args:
            parameters: parameters with gradients.
            limit: 0 or more.

        Raises:
            ValueError: a gradient is sparse.
        """
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        if not trained:  # such as on a stage without parameters of the optimizer; torch refuses an empty list
            return
        try:
            nn.utils.clip_grad_value_(trained, limit)
        except NotImplementedError as error:
            raise ValueError(SPARSE_CLIPPED) from error

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights.

        Args:
            optimizer: optimizer to step.
            closure: recomputes the loss; None without.

        Returns:
            the result of `optimizer.step`.
        """
        return optimizer.step(closure) if closure is not None else optimizer.step()

    def after_update(self, step: int) -> int:
        """Complete an update after all optimizers have stepped.

        Args:
            step: weight updates as counted by this rank.

        Returns:
            weight updates of the model, also by other ranks.
        """
        return step

    # -- between the ranks, and state ---------------------------------------------------------------------------

    def synchronize(self, copies: Mapping[str, Tensor] | None = None, *, ends: bool = False) -> None:
        """Complete all communication, and make weights and buffers equal on all ranks; collective.

        Called before an evaluation, a checkpoint and the end of training.

        Args:
            copies: earlier copies of buffers, which are made equal, too.
            ends: training has ended.
        """
        if self.module is not None:
            for buffer in (*self.module.buffers(), *(copies or {}).values()):
                if is_placeholder(buffer):
                    continue
                if self.buffer_source:
                    self.data_ranks.broadcast(buffer, self.buffer_source)
                self.world.broadcast(buffer)

    def state_dict(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        """Return weights and optimizer states, with the same names and global shapes under every strategy; collective.

        A shard is a DTensor. Optimizer states are keyed by the names of the parameters.

        Args:
            module: the user's module.
            optimizers: optimizers of the module; empty to save weights only.
        """
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        return {
            "module": module.state_dict(),
            "optimizers": [by_name(optimizer, names) for optimizer in optimizers],
        }

    def load_state_dict(self, state: dict[str, Any], module: nn.Module, optimizers: list[Optimizer]) -> None:
        """Load a state of any strategy.

        Args:
            state: result of `state_dict`.
            module: the user's module.
            optimizers: optimizers of the module; the state must have as many.

        Raises:
            ValueError: the optimizers differ from those of the state.
        """
        self._load_weights(module, state["module"])
        if len(state["optimizers"]) != len(optimizers):
            raise ValueError(
                f"the checkpoint holds {len(state['optimizers'])} optimizers and the module has {len(optimizers)}. "
                + OTHER_STATE
            )
        parameters = dict(module.named_parameters())
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(by_number(optimizer, parameters, saved))
            take_from_state(optimizer, loaded=True)

    def _load_weights(self, module: nn.Module, weights: Mapping[str, Any]) -> None:
        if absent := as_part(self, HoldsPart).absent:
            load_present(module, weights, absent)
        else:
            module.load_state_dict(weights, strict=getattr(module, "strict_loading", None) is not False)
