"""Model parallelism by axes of a device mesh, with data parallelism over the other ranks."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx import plugins
from fabricx.core.optimizers import needs_closure
from fabricx.core.strategy import Strategy, Traits
from fabricx.core.strategy_parts import (
    AddsAxes,
    Elastic,
    HidesGradients,
    HoldsPart,
    KeepsLocalState,
    ModelParallel,
    ShardsWeights,
    WrapsStep,
    as_part,
)  # fmt: skip
from fabricx.core.strategy_support.gradient_checks import check_dense
from fabricx.distributed.world import World
from fabricx.errors import check_choice
from fabricx.model_parallel.axes import sizes_of, with_axes
from fabricx.model_parallel.data_parallel.gradient_sums import GradientSums
from fabricx.model_parallel.data_parallel.island_steps import IslandSteps
from fabricx.model_parallel.data_parallel.sharded_islands import ShardedIslands
from fabricx.model_parallel.data_parallel.sharded_stages import ShardedStages
from fabricx.model_parallel.data_parallel.sharded_sums import ShardedSums
from fabricx.model_parallel.experts.expert_sums import ExpertSums
from fabricx.model_parallel.gradient_norm import clip_norm
from fabricx.model_parallel.hidden_gradients import HiddenGradients
from fabricx.model_parallel.hook_weights import (
    FAILED_APART,
    STAGES_APART,
    HookWeights,
    is_paused,
    paused,
    resumed,
)  # fmt: skip
from fabricx.model_parallel.pipeline import placeholders
from fabricx.model_parallel.pipeline.checks import CLOSURE
from fabricx.model_parallel.pipeline.schedule import SCHEDULES
from fabricx.model_parallel.pipeline.seeds import seeds_of_batch, seeds_of_evaluation
from fabricx.model_parallel.set_up.divided import Settings
from fabricx.model_parallel.set_up.divider import divide
from fabricx.model_parallel.set_up.mesh_report import axes_line, parameter_bytes, weights_line
from fabricx.model_parallel.set_up.optimizer_checks import check_elementwise, check_separate
from fabricx.model_parallel.set_up.option_checks import (
    check_axes,
    check_island,
    check_options,
    data_name,
    data_parallelism,
    refuse_manual_optimization,
)  # fmt: skip
from fabricx.model_parallel.set_up.same_batches import SameBatches
from fabricx.model_parallel.step_hooks import step_beside_hooks

if TYPE_CHECKING:
    from fabricx.core.strategy_support.trial import Trial
    from fabricx.model_parallel.pipeline.stages import Pipeline
    from fabricx.model_parallel.set_up.divided import Divided
    from fabricx.model_parallel.set_up.division import Division

Data = Literal["ddp", "fsdp", "local_sgd"]
_LAYOUT: Final = "layout"  # key of the run's layout in the store, for replacements of dead workers


class Mesh(Strategy, AddsAxes, Elastic, HidesGradients, KeepsLocalState, ModelParallel, ShardsWeights, WrapsStep):
    """Train a module on a mesh of ranks: ranks along the model's axes compute a share of the data together.

    The axes from outer to inner are data (islands x replicas x shard), pipeline, context, tensor. `batch_size` is that
    of a data rank, so the global batch depends on the number of data ranks only. Checkpoints have whole tensors under
    the names of the module, and load under any strategy and any mesh.

    Args:
        data: data parallelism over the remaining ranks: "ddp", "fsdp", "local_sgd", or one of these strategies with
            options, such as `LocalSGD(every=50)` or {"name": "local_sgd", "every": 50}. With local_sgd, groups of
            ranks along the other axes (islands) make local steps, and average their weights periodically.
        replicas: data ranks of an island, with local_sgd: they train different data, and average their gradients at
            each step.
        shard: data ranks of an island that shard weights, gradients and optimizer states, with local_sgd: `fsdp` within
            islands.
        tensor: ranks over which the matrices of a layer are divided; None for all remaining ranks.
        plan: how layers are divided, by glob of module names, where it should differ from the plan that a trial run
            finds: "colwise", "rowwise", "vocab", "head" or "replicate".
        sequence: divide activations between the layers along the sequence, too.
        context: ranks over which the sequence is divided, for long sequences; None for all remaining ranks. Blocks
            compute a shard of it, with the positions and the attention of the whole sequence.
        sequence_dim: dim of the sequence in the first argument of the first block.
        context_method: "all_gather" gathers keys and values in each attention; "ring" passes them from rank to rank,
            so that no rank holds those of the whole sequence.
        pipeline: ranks over which the blocks of the module are divided into stages; None for all remaining ranks.
        blocks: modules that the stages consist of, or that compute shards of the sequence: their names, the name of
            their class, or "auto" for the longest chain of modules that a trial run finds.
        microbatches: parts of a batch that are in the pipeline at the same time; None for twice the number of stages.
        schedule: order of the computations of a stage: "1f1b", "gpipe" or "zero_bubble".
        virtual: groups of blocks on each rank ("interleaved" schedules); more groups are idle for a shorter time, and
            send more.
        expert: data ranks over which the experts of mixtures are divided; None for all data ranks. These ranks have
            different data, and send each token to the ranks of its experts.
        experts: modules of stacked experts: their names, the name of their class, or "auto" for all.

    Raises:
        ValueError: an option is unknown or out of range.
    """

    def __init__(
        self, *, data: Data | Strategy | Mapping[str, Any] = "ddp", replicas: int = 1, shard: int = 1,
        tensor: int | None = 1, plan: Mapping[str, str] | None = None, sequence: bool = False,
        context: int | None = 1, sequence_dim: int = 1, context_method: str = "all_gather", pipeline: int | None = 1,
        blocks: str | Sequence[str] = "auto", microbatches: int | None = None, schedule: str = "1f1b",
        virtual: int = 1, expert: int | None = 1, experts: str | Sequence[str] = "auto",
    ) -> None:  # fmt: skip
        super().__init__()
        self.data = data_parallelism(type(self).__name__, data)
        check_island(replicas, shard, self.data)
        self.replicas, self.shard = replicas, shard
        self.tensor, self.plan, self.sequence = tensor, dict(plan or {}), sequence
        self.context, self.sequence_dim, self.context_method = context, sequence_dim, context_method
        self.pipeline, self.blocks, self.microbatches = pipeline, blocks, microbatches
        self.schedule, self.virtual = schedule, virtual
        self.expert, self.experts = expert, experts
        axes = {"pipeline": pipeline, "context": context, "tensor": tensor}
        check_axes(axes, expert, self.data)
        self._axes: dict[str, int | None] = {"replicas": replicas, "shard": shard, **axes}
        check_choice(type(self).__name__, "schedule", schedule, SCHEDULES)
        check_choice(type(self).__name__, "context_method", context_method, ("all_gather", "ring"))
        self.data_strategy: Strategy = (
            plugins.build("strategies", self.data) if isinstance(self.data, str) else self.data
        )
        self.accumulation_refused = self.data_strategy.accumulation_refused
        self.batch_weight_refused = self.data_strategy.batch_weight_refused
        if shard > 1 and pipeline != 1:
            self.data_strategy = ShardedStages(self.data_strategy)
        elif shard > 1:
            self.data_strategy = ShardedIslands(self.data_strategy, plugins.build("strategies", "fsdp"))
        elif not self.data_strategy.traits.synchronous:
            self.data_strategy = IslandSteps(self.data_strategy)
        elif pipeline != 1:
            self.data_strategy = self._sums_for_pipeline()
        if expert != 1:
            self.data_strategy = ExpertSums()
        self.divides = expert != 1 or any(size != 1 for size in self._axes.values())
        self.traits = self._traits_of()
        self._forget()

    def _sums_for_pipeline(self) -> GradientSums:
        """Return data parallelism that reduces after the last microbatch."""
        if not isinstance(self.data, str):
            name = type(self.data).__name__
            raise ValueError(
                f"data={name}(...): with a pipeline, data parallelism has no options: set data='ddp' or 'fsdp', or "
                "pipeline=1"
            )
        return ShardedSums() if self.data == "fsdp" else GradientSums()

    def _forget(self) -> None:
        self._parts: Divided | None = None  # None for a module that is whole on each rank
        self._late: tuple[Callable[[], Trial], bool] | None = None  # trial, and an argument of `setup`
        self._batches = SameBatches(World())
        self._hidden = HiddenGradients()
        self._optimizers: list[Optimizer] = []

    def _traits_of(self, sizes: Mapping[str, int] | None = None, expert: int = 1) -> Traits:
        """Return the properties of the data strategy; ranks along the model's axes have different weights.

        Args:
            sizes: ranks along each axis; None before they are known.
            expert: data ranks that divide experts.
        """
        traits = self.data_strategy.traits
        if not self.divides:
            return traits
        traits = replace(traits, unreplicated=True)
        if sizes is None:
            return traits
        replicas = sizes["data"] // expert if expert > 1 else traits.replicas
        axes = sizes["pipeline"], sizes["context"], sizes["tensor"], expert
        return replace(traits, replicas=replicas, model_axes=axes)

    @property
    def _division(self) -> Division | None:
        return None if self._parts is None else self._parts.division

    @property
    def _pipeline(self) -> Pipeline | None:
        return None if self._parts is None else self._parts.pipeline

    @property
    def _divided(self) -> bool:
        return self.world.divided

    # -- set up --------------------------------------------------------------------------------------------------

    def check_ranks(self, ranks: int) -> None:
        self._sizes(ranks)

    def data_ranks_of(self, ranks: int) -> int:
        return self._sizes(ranks)["data"]

    def _sizes(self, ranks: int) -> dict[str, int]:
        known = math.prod(size for size in self._axes.values() if size is not None)
        if self.expert is not None and self.expert > 1:
            sizes_of(ranks, {"expert": self.expert}, self._called)  # the groups have to be complete
        remaining = max(1, ranks // known)
        return sizes_of(ranks, {axis: size or remaining for axis, size in self._axes.items()}, self._called)

    @property
    def _called(self) -> str:
        """Return the name by which the user selects this strategy."""
        return type(self).__name__.lower().replace("mesh", "") or "mesh"

    def with_axes(self, world: World) -> World:
        if world.newcomer:  # its place in the mesh is known when it joins the other ranks
            return world
        sizes = self._sizes(world.size)
        expert = self.expert or sizes["data"]
        self.traits = self._traits_of(sizes, expert)
        return with_axes(world, sizes, expert)

    def enter(self, world: World, module: nn.Module) -> None:
        super().enter(world, module)
        self.data_strategy.enter(self._data_world(world), module)

    def _data_world(self, world: World) -> World:
        """Return the ranks of the data strategy."""
        return world.axis("gradients") if self.data_strategy.traits.synchronous else world

    def world_changed(self, world: World) -> None:
        """Continue in the same mesh: a replacement has the position of a dead worker.

        Args:
            world: the ranks, as many as before.
        """
        module = self.module
        assert module is not None
        self.world = world
        if self._late is not None:  # a replacement, which has its place in the mesh only now
            trial, several_backwards = self._late
            self._late = None
            if self._divided:
                assert world.store is not None
                self._divide(module, trial(), json.loads(world.store.get(world.key(_LAYOUT))), joins=True)
            self.data_strategy.setup(module, several_backwards=several_backwards)
        elif self._divided:
            self._batches = SameBatches(world.axis("model"))
            assert self._parts is not None
            self._parts = self._parts.world_changed(world)
        as_part(self.data_strategy, Elastic).world_changed(self._data_world(world))

    def init_context(self, *, filled: bool = False) -> AbstractContextManager[Any]:
        # Layers are divided after a trial run, which needs their weights.
        if self._divided:
            return nullcontext()
        return as_part(self.data_strategy, ShardsWeights).init_context(filled=filled)

    def check_options(
        self, *, precision: str, compiles: bool, synchronises_batchnorm: bool, automatic_optimization: bool
    ) -> None:  # fmt: skip
        if self._divided:
            check_options(self._called, precision, compiles=compiles, synchronises_batchnorm=synchronises_batchnorm)
        if not automatic_optimization and (self._divided or self.replicas * self.shard > 1):
            pipelined = self.world.axis("pipeline").size > 1
            refuse_manual_optimization(self._called, pipelined=pipelined, divided=self._divided)

    def parallelize(self, module: nn.Module, trial: Callable[[], Trial], layout: Mapping[str, Any]) -> None:
        if self.world.newcomer and self.divides:
            self._late = (trial, False)
        if self._divided or self.replicas * self.shard > 1:
            self._print(axes_line(self.world, data_name(self.data)))
        if not self._divided:
            return
        if self.world.axis("pipeline").size > 1 or self.world.axis("expert").size > 1:
            check_dense(module, f"strategy={self._called}")
        for tensor in (*module.parameters(), *module.buffers()):
            self.world.broadcast(tensor)
        whole = parameter_bytes(module)
        self._divide(module, trial(), layout)
        sharded, together = self.data_strategy.traits.sharded, self.data_strategy.traits.synchronous
        shards = self.world.axis("gradients" if together else "island_gradients").size if sharded else 1
        self._print(weights_line(self.world.gather_objects(parameter_bytes(module) / shards), whole))
        if self.world.main_rank and self.world.store is not None:
            self.world.store.set(self.world.key(_LAYOUT), json.dumps(self.layout))

    def _divide(self, module: nn.Module, trial: Trial, layout: Mapping[str, Any], *, joins: bool = False) -> None:
        self._batches = SameBatches(self.world.axis("model"))
        settings = Settings(
            self._called, self.plan, self.sequence, self.sequence_dim, self.context_method, self.blocks,
            self.microbatches, self.schedule, self.virtual, self.experts, trial.half,
            apart=not self.data_strategy.traits.synchronous, sharded=self.data_strategy.traits.sharded,
        )  # fmt: skip
        whole = {name: parameter.numel() for name, parameter in module.named_parameters()}
        self._parts = divide(settings, self.world, module, trial, layout, joins=joins)
        part = as_part(self.data_strategy, HoldsPart)
        part.absent, part.elements = self._parts.division.absent, whole
        if self._pipeline is not None:
            self._sums().reduce_shared = self._pipeline.reduce_shared
        if isinstance(self.data_strategy, ExpertSums):
            self.data_strategy.experts = self._parts.experts

    @property
    def layout(self) -> dict[str, Any]:
        return {} if self._parts is None else self._parts.layout

    def _print(self, line: str) -> None:
        if self.world.main_rank:
            print(line, flush=True)

    def setup(self, module: nn.Module, *, several_backwards: bool = False) -> None:
        super().setup(module)
        if self._late is not None:
            self._late = (self._late[0], several_backwards)
            return
        self.data_strategy.setup(module, several_backwards=several_backwards)

    def attach_optimizers(self, optimizers: list[Optimizer]) -> None:
        self._optimizers = optimizers
        if self._pipeline is not None and any(needs_closure(optimizer) for optimizer in optimizers):
            raise ValueError(CLOSURE)
        divided = [
            f"{axis}={size}" for axis in ("tensor", "expert", "shard") if (size := self.world.axis(axis).size) > 1
        ]
        for optimizer in optimizers:
            if divided:
                check_elementwise(optimizer, divided[0])
            elif (stages := self.world.axis("pipeline").size) > 1:
                check_separate(optimizer, f"pipeline={stages}")
        self.data_strategy.attach_optimizers(optimizers)

    def restore_whole(self, module: nn.Module) -> None:
        if self._division is not None:
            self._division.restore(self._optimizers, as_part(self.data_strategy, ShardsWeights).unshard)

    def teardown(self) -> None:
        if self._parts is not None and self._parts.context is not None:
            self._parts.context.undo()
        self.data_strategy.teardown()
        self._forget()
        super().teardown()

    # -- one step ------------------------------------------------------------------------------------------------

    def wrap_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        return as_part(self.data_strategy, WrapsStep).wrap_step(self._sharded(step))

    def _sharded(self, step: Callable[..., Any]) -> Callable[..., Any]:
        return step if self._parts is None else self._parts.sharded(step)

    def wrap_evaluation(self, step: Callable[..., Any]) -> Callable[..., Any]:
        sharded = as_part(self.data_strategy, WrapsStep).wrap_evaluation(self._sharded(step))
        pipeline = self._pipeline
        if not self._divided:
            return sharded

        def evaluated(batch: Any, *args: Any) -> Any:
            self._batches.check(batch)
            if pipeline is None:
                return sharded(batch, *args)
            sums = self._sums()
            sums.gather_to_evaluate()
            try:
                return pipeline.evaluate(sharded, batch, *args, seed=seeds_of_evaluation(args))
            finally:
                sums.release()

        return evaluated

    @property
    def _in_batch(self) -> bool:
        """Return whether the microbatches of a batch are in the pipeline."""
        return isinstance(self.data_strategy, GradientSums) and self.data_strategy.in_batch

    def _sums(self) -> GradientSums:
        assert isinstance(self.data_strategy, GradientSums)
        return self.data_strategy

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        with super().accumulate(), self.data_strategy.accumulate():
            yield

    def forward_backward(
        self, step: Callable[..., Any], backward: Callable[[Any], Any], batch: Any, index: int
    ) -> Any:  # fmt: skip
        if self._division is not None:
            self._batches.check(batch)
        if self._pipeline is None:
            return self.data_strategy.forward_backward(step, backward, batch, index)
        sums = self._sums()
        sums.gather()
        sums.in_batch = True
        try:
            outputs = self._pipeline.forward_backward(step, backward, batch, index, seed=seeds_of_batch())
        finally:
            sums.in_batch = False
        sums.end_backward()
        return outputs

    def backward(self, loss: Tensor, compute: Callable[[], None] | None = None) -> None:
        if self._pipeline is not None:
            compute = functools.partial(self._pipeline.backward, loss, compute)
        self.data_strategy.backward(loss, compute)

    def backward_without_data(self, example: tuple[Any, ...] = ()) -> bool:
        return self.data_strategy.backward_without_data(example)

    def discard_window(self) -> None:
        self.data_strategy.discard_window()

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        if self._parts is None:
            return self.data_strategy.clip_norm(parameters, max_norm)
        with self._shown():
            return clip_norm(parameters, max_norm, *self._parts.gradient_ranks())

    def clip_value(self, parameters: Iterable[Tensor], limit: float) -> None:
        with self._shown():
            self.data_strategy.clip_value(parameters, limit)

    def hooks_see_gradients(self) -> AbstractContextManager[Any]:
        if self._division is None:
            return as_part(self.data_strategy, HidesGradients).hooks_see_gradients()
        return self._hidden.hide(self._division.divided(), self._division.trained_elsewhere())

    @property
    def divides_weights(self) -> bool:  # type: ignore[override]
        return self.divides or as_part(self.data_strategy, HidesGradients).divides_weights

    def hooks_see_weights(self, name: str) -> AbstractContextManager[Any]:
        if self._division is None or not self._division.divides:
            return as_part(self.data_strategy, HidesGradients).hooks_see_weights(name)
        apart = STAGES_APART if self._in_batch else FAILED_APART if name == "on_exception" else ""
        sharded = self.data_strategy.traits.sharded
        return HookWeights(self._division, self._optimizers, apart=apart, hook=name if sharded else "")

    def weights_as_stored(self) -> AbstractContextManager[Any]:
        return paused()

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """Context of code that hooks may call, in which gradients and weights are those of this rank."""
        with self._hidden.shown(), paused():
            yield

    def gradient_norm(self, optimizers: Sequence[Optimizer]) -> Tensor | None:
        if self._parts is None:
            return self.data_strategy.gradient_norm(optimizers)
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        with self._shown():
            return self._parts.norm([p for group in groups for p in group["params"]])

    def nonfinite_gradients(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        with self._shown():
            return as_part(self.data_strategy, HidesGradients).nonfinite_gradients(parameters)

    @contextmanager
    def _step_hooks_see(self) -> Iterator[None]:
        """Context of hooks of an optimizer's step: that of other hooks, also within the module's optimizer_step."""
        if is_paused():
            with resumed():
                yield
        else:
            with self.hooks_see_gradients(), self.hooks_see_weights("optimizer_step"):
                yield

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        step = functools.partial(self._step, optimizer, closure)
        return step() if self._parts is None else step_beside_hooks(optimizer, self._step_hooks_see, step)

    def _step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        with self._shown():
            try:
                return self.data_strategy.optimizer_step(optimizer, closure)
            except RuntimeError as error:
                if not placeholders.refuses(error):
                    raise
                raise ValueError(
                    f"{type(optimizer).__name__} steps parameters without a gradient, also those that other stages of "
                    "the pipeline hold: skip parameters whose grad is None, or use strategy=tensor or strategy=fsdp"
                ) from error

    def after_update(self, step: int) -> int:
        return self.data_strategy.after_update(step)

    # -- between the ranks, and state ----------------------------------------------------------------------------

    @property
    def buffer_source(self) -> int:  # type: ignore[override]
        return self.data_strategy.buffer_source // self.world.axis("context").size

    @buffer_source.setter
    def buffer_source(self, rank: int) -> None:
        # Ranks that compute shards of the sequence are ranks of the data strategy, too.
        self.data_strategy.buffer_source = rank * self.world.axis("context").size

    def synchronize(self, copies: Mapping[str, Tensor] | None = None, *, ends: bool = False) -> None:
        self.data_strategy.synchronize(copies, ends=ends)

    def state_dict(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        return self.data_strategy.state_dict(module, optimizers)

    def load_state_dict(self, state: dict[str, Any], module: nn.Module, optimizers: list[Optimizer]) -> None:
        self.data_strategy.load_state_dict(state, module, optimizers)

    def local_state_dict(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        data = self.data_strategy
        state = (data.local_state_dict if isinstance(data, KeepsLocalState) else data.state_dict)(module, optimizers)
        absent = frozenset() if self._division is None else self._division.absent
        return {**state, "module": {name: value for name, value in state["module"].items() if name not in absent}}

    def load_local_states(
        self, states: Sequence[dict[str, Any]], module: nn.Module, optimizers: list[Optimizer], *, own: bool
    ) -> None:  # fmt: skip
        data = self.data_strategy
        if isinstance(data, KeepsLocalState):
            data.load_local_states(states, module, optimizers, own=own)
        else:
            data.load_state_dict(states[0], module, optimizers)

    def whole_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return state if self._division is None else dict(self._division.whole_state(state))

    def own_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return state if self._division is None else dict(self._division.own_state(state))

    def sharded_parameters(self) -> dict[str, Tensor]:
        return as_part(self.data_strategy, ShardsWeights).sharded_parameters()

    @property
    def computes_together(self) -> bool:
        return as_part(self.data_strategy, ShardsWeights).computes_together

    def load_targets(self) -> dict[str, Tensor]:
        return {} if self._divided else self.sharded_parameters()

    def reshard(self) -> None:
        as_part(self.data_strategy, ShardsWeights).reshard()

    def whole_weights(self, module: nn.Module) -> dict[str, Any]:
        return as_part(self.data_strategy, ShardsWeights).whole_weights(module)

    def apply_requires_grad(self) -> None:
        as_part(self.data_strategy, ShardsWeights).apply_requires_grad()
