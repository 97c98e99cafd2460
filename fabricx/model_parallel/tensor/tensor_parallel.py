"""Tensor parallelism of an unchanged module: shards its layers by a plan, and runs its step on the shards.

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019;
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022 (sequence parallelism).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import tree_map

from fabricx.core.module_state.placeholder import is_placeholder
from fabricx.core.tensors.tensor_properties import SIZES
from fabricx.distributed.world import World
from fabricx.errors import PeerLost
from fabricx.model_parallel.nested import leaves, mapped
from fabricx.model_parallel.placement import Placement, replace_data
from fabricx.model_parallel.recomputation import recomputing
from fabricx.model_parallel.tensor.collectives import sliced, whole_tensor
from fabricx.model_parallel.tensor.layer_functions import LayerFunctions, Weight
from fabricx.model_parallel.tensor.parallel_layers import placements_of
from fabricx.model_parallel.tensor.plan import TensorPlan, check_not_compiled
from fabricx.model_parallel.tensor.sharded_activations import Activations
from fabricx.model_parallel.tensor.sharded_functions import ShardedFunctions
from fabricx.model_parallel.tensor.sharded_tensor import ShardedTensor

_OUTSIDE = (
    "{name} is sharded over tensor-parallel ranks, and was called outside of the module's steps; call it in "
    "training_step, validation_step, test_step or predict_step. If this is a recomputation of activation "
    "checkpointing, use use_reentrant=False"
)
_REPLACED = (
    "{name} is divided over tensor-parallel ranks, and training_step has replaced {what}: change a weight by "
    "weight.copy_(new) in no_grad, or in on_train_batch_start, on_before_optimizer_step or on_train_batch_end; make "
    "modules and parameters in __init__ or configure_model"
)
_LAYERS: Final = {*SIZES, F.linear, torch.addmm, F.embedding, F.multi_head_attention_forward}


@final
class TensorParallel:
    """Shards the layers of a module over the ranks of a group; user code sees the shapes of the whole model.

    Sharded parameters are the same objects as before, with this rank's shard as data; tied parameters stay tied.

    Args:
        module: root module, with whole parameters that are equal on all ranks, and without gradients.
        plan: plan of `find_tensor_plan`, equal on all ranks.
        world: ranks of the group, on the same device types.
        sequence: shard the residual stream between `blocks` along the sequence (dim 1).
        blocks: the module's blocks in the order of their calls; the residual stream is the first floating-point tensor
            among the arguments of the first, and the output of the last, or the first element of its output.

    Attributes:
        plan: as in the arguments.
        placements: placements of each sharded parameter, by all of its names.
    """

    def __init__(
        self, module: nn.Module, plan: TensorPlan, world: World, *, sequence: bool = False,
        blocks: Sequence[nn.Module] = (),
    ) -> None:  # fmt: skip
        check_not_compiled(module, "tensor parallelism")
        self.placements: dict[str, Placement] = {}
        self.plan = plan
        self._module, self._world = module, world
        self._activations = Activations(world, self._name_of)
        self._functions = LayerFunctions(self._activations)
        self._parts: dict[str, nn.Module] = {}  # modules with sharded weights, and all modules around them
        self._divided: list[tuple[nn.Module, str, str, torch.Size]] = []  # weights with their names and shapes
        self._weights: dict[int, tuple[Tensor, Weight]] = {}
        self._mode = ShardedFunctions(self._activations, _LAYERS, self._layer, self._weights, self._weight)
        self._hooks: list[Any] = []
        self._depth = 0
        self._sequence = sequence and bool(blocks)
        self._shard_parameters(plan)
        if self._sequence:
            self._shard_sequence(blocks)

    @property
    def ranks(self) -> int:
        """Return the number of ranks over which matrices are divided."""
        return self._world.size

    def world_changed(self, world: World) -> None:
        """Use another process group with the same place of this rank.

        Args:
            world: ranks of the group, as many as before.
        """
        own_streams = self._activations.own_streams
        self._world, self._activations = world, Activations(world, self._name_of)
        self._activations.own_streams = own_streams
        self._functions = LayerFunctions(self._activations)
        self._mode = ShardedFunctions(self._activations, _LAYERS, self._layer, self._weights, self._weight)

    def divide_sequence(self) -> None:
        """Call torch's attention for the heads of this rank, also with dropout; a context axis computes it."""
        self._activations.own_streams = True

    # -- parameters ---------------------------------------------------------------------------------------------

    def _shard_parameters(self, plan: TensorPlan) -> None:
        for name, layer in plan.layers.items():
            part = self._module.get_submodule(name)
            weights: dict[str, Weight] = {}
            for key, placement in placements_of(part, layer, plan.ranks).items():
                full = f"{name}.{key}" if name else key
                weights[key] = Weight(full, layer, placement)
            for key, weight in weights.items():
                self._shard(part.get_parameter(key), weight)
            self._hooks.append(part.register_forward_pre_hook(self._entering(name, weights)))
            levels = name.split(".") if name else []
            around = [".".join(levels[: depth + 1]) for depth in range(len(levels))]
            self._parts.update((path, self._module.get_submodule(path)) for path in around)
            for key, weight in weights.items():
                self._divided.append((part, key, weight.name, part.get_parameter(key).shape))
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            if id(parameter) in self._weights:
                self.placements[name] = self._weights[id(parameter)][1].placement

    @torch.no_grad()
    def _shard(self, parameter: nn.Parameter, weight: Weight) -> None:
        if id(parameter) not in self._weights:
            replace_data(parameter, weight.placement.shard(parameter.data, self._world.rank))
            self._weights[id(parameter)] = (parameter, weight)

    def _entering(self, name: str, weights: Mapping[str, Weight]) -> Callable[..., None]:
        def hook(part: nn.Module, args: Any) -> None:
            # fsdp replaces parameters in the forward; copies have their own, of which those made in hooks are whole
            parameters = {key: _attribute(part, key) for key in weights}  # tensors in `torch.func.functional_call`
            if all(map(self._is_whole, parameters.values(), weights.values())):
                return
            if not self._depth:
                raise RuntimeError(_OUTSIDE.format(name=name or type(part).__name__))
            for key, weight in weights.items():
                self._weights.setdefault(id(parameters[key]), (parameters[key], weight))

        return hook

    def _is_whole(self, parameter: Tensor, weight: Weight) -> bool:
        return id(parameter) not in self._weights and tuple(parameter.shape) == weight.placement.shape

    def whole(self, name: str, local: Tensor) -> Tensor:
        """Return the whole tensor of a parameter, or of an optimizer's moment; collective.

        Args:
            name: name of the parameter, as in `module.named_parameters()`.
            local: shard of this rank; a tensor of another shape, such as a step count, is returned as it is.
        """
        return whole_tensor(self.placements.get(name), local, self._world)

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's shard of a whole tensor; the inverse of `whole`, without communication.

        Args:
            name: name of the parameter.
            whole: its tensor, or a moment; a tensor of another shape is returned as it is.
        """
        placement = self.placements.get(name)
        if placement is None or tuple(whole.shape) != placement.shape:
            return whole
        return placement.shard(whole, self._world.rank)

    @torch.no_grad()
    def undo(self) -> None:
        """Give the module whole parameters again; collective. The parameters stay the same objects."""
        done: set[int] = set()
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            if name in self.placements and id(parameter) not in done:
                done.add(id(parameter))
                parameter.grad = None
                replace_data(parameter, self.whole(name, parameter.data))
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._divided, self.placements = [], [], {}
        self._parts.clear()
        self._weights.clear()

    # -- the step -----------------------------------------------------------------------------------------------

    def wrap_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step that runs on the shards; its outputs are ordinary tensors.

        Args:
            step: training, validation, test or predict step of the module.
        """

        @functools.wraps(step)
        def sharded_step(*args: Any, **options: Any) -> Any:
            try:
                with self.active():
                    outputs = tree_map(self._activations.whole, step(*args, **options))
            except PeerLost:
                raise
            except Exception as error:
                self._check_weights(error)
                raise
            self._check_weights()
            return outputs

        return sharded_step

    def _check_weights(self, cause: Exception | None = None) -> None:
        """Refuse a step that has replaced sharded weights, or modules with such weights, by whole ones."""
        for path, part in self._parts.items():
            parent, _, key = path.rpartition(".")
            if getattr(self._parts[parent] if parent else self._module, key, None) is not part:
                raise ValueError(_REPLACED.format(name=path, what="this module by another")) from cause
        for part, key, name, shape in self._divided:
            if part.get_parameter(key).shape != shape:
                raise ValueError(_REPLACED.format(name=name, what="it or its memory by a whole tensor")) from cause

    def _name_of(self, shard: Tensor) -> str:
        """Return the name of the weight that has the memory of a tensor; "" if none has."""
        address = shard.data_ptr()
        for parameter, weight in self._weights.values():
            size = 0 if is_placeholder(parameter) else parameter.nbytes
            if parameter.data_ptr() <= address < parameter.data_ptr() + size:
                return weight.name
        return ""

    @contextmanager
    def active(self, sequence: bool = False) -> Iterator[None]:
        """Return a context in which sharded layers can be called.

        Args:
            sequence: whether the residual stream is sharded at its beginning.
        """
        before, fast_path = self._functions.sequence, torch.backends.mha.get_fastpath_enabled()
        self._functions.forget()
        self._functions.sequence = sequence
        torch.backends.mha.set_fastpath_enabled(False)
        self._depth += 1
        try:
            with self._mode, recomputing(lambda: self.active(self._functions.sequence)):
                yield
        finally:
            self._depth -= 1
            torch.backends.mha.set_fastpath_enabled(fast_path)
            self._functions.sequence = before
            self._functions.forget()

    def ordinary(self, output: Any) -> Any:
        """Return an activation as an ordinary tensor that is equal on all ranks; collective, within a step.

        Args:
            output: output of a submodule; other values are returned as they are.
        """
        return self._activations.whole(output)

    @property
    def gathered(self) -> dict[str, int]:
        """Return the functions that were computed on gathered activations, and how often: each costs communication."""
        return self._activations.gathered

    def _layer(self, func: Any, args: Any, options: dict[str, Any]) -> Any:
        """Compute a sharded layer; returns NotImplemented for all other functions."""
        if func in SIZES and args and id(args[0]) in self._weights:  # code that reads sizes of weights
            whole = self._weights[id(args[0])][1].placement.shape
            return func(torch.empty(whole, device="meta"), *args[1:], **options)
        if func is F.linear:
            weight = self._sharded_weight(args, options, 1, "weight")
            if weight is not None and weight.layer.style != "attention":
                named = {"local" if name == "weight" else name: value for name, value in options.items()}
                return self._functions.linear(weight, *args, **named)
        elif func is torch.addmm:
            weight = self._sharded_weight(args, options, 2, "mat2")
            if weight is not None and len(args) == 3 and not options:
                return self._functions.addmm(weight, *args)
        elif func is F.embedding:
            weight = self._sharded_weight(args, options, 1, "weight")
            if weight is not None and weight.placement.dim == 0:
                named = {"local" if name == "weight" else name: value for name, value in options.items()}
                return self._functions.embedding(weight, *args, **named)
        elif func is F.multi_head_attention_forward:
            weight = self._sharded_weight(args, options, 5, "in_proj_weight")
            weight = weight or self._sharded_weight((), options, 0, "q_proj_weight")
            if weight is not None:
                return self._functions.multi_head_attention(weight, *args, **options)
        return NotImplemented

    def _sharded_weight(self, args: Any, options: dict[str, Any], position: int, name: str) -> Weight | None:
        tensor = args[position] if len(args) > position else options.get(name)
        known = self._weights.get(id(tensor))
        return None if known is None else known[1]

    def _weight(self, tensor: Any) -> Any:
        """Return a sharded weight that a function other than its layer's reads, as a sharded tensor."""
        placement = self._weights[id(tensor)][1].placement
        parts = placement.parts if len(placement.parts) > 1 else ()
        return self._activations.sharded(tensor, placement.dim, parts, placement.shape)

    # -- sequence parallelism -----------------------------------------------------------------------------------

    def _shard_sequence(self, blocks: Sequence[nn.Module]) -> None:
        self._hooks.append(blocks[0].register_forward_pre_hook(self._enter_blocks, with_kwargs=True))
        self._hooks.append(blocks[-1].register_forward_hook(self._leave_blocks))

    def begin(self) -> None:
        """Begin the blocks; stages of a pipeline that do not compute the first block call it, too."""
        self._functions.sequence = self._sequence

    def _enter_blocks(self, block: nn.Module, args: Any, options: Any) -> Any:
        self.begin()
        stream = next((leaf for _, leaf in leaves((args, options)) if _is_stream(leaf)), None)
        if stream is None:
            raise ValueError(
                f"sequence=True: {type(block).__name__}, the first block, has no argument with a sequence in dim 1; "
                "set blocks=CLASS or a list of names, or sequence=False"
            )
        if isinstance(stream, ShardedTensor):  # a recomputation of the block
            return None
        shard = self._activations.sharded(sliced(stream, self._world, 1), 1, (), stream.shape)
        return mapped((args, options), lambda _, leaf: shard if leaf is stream else leaf)

    def _leave_blocks(self, _: nn.Module, __: Any, output: Any) -> Any:
        self._functions.sequence = False
        return mapped(output, lambda _, leaf: self._activations.whole(leaf))


def _attribute(part: nn.Module, key: str) -> Any:
    """Return the tensor of a part that has the name of a parameter."""
    path, _, name = key.rpartition(".")
    return getattr(part.get_submodule(path), name)


def _is_stream(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 1
