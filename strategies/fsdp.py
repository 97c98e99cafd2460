"""Sharded data-parallel training with torch's fully_shard (FSDP2)."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from fabricx.core.strategy import Strategy, Traits
from fabricx.core.strategy_parts import Elastic, HidesGradients, MeasuresWaiting, ShardsWeights, WrapsStep
from fabricx.core.strategy_support.gradient_checks import check_dense
from fabricx.distributed.collective_order import CollectiveOrder
from fabricx.distributed.heap import LARGE, release_freed_memory
from fabricx.distributed.sharding.dtensors import is_dtensor
from fabricx.distributed.sharding.fsdp_errors import explained
from fabricx.distributed.sharding.fsdp_internals import CollectiveTimer, DeviceWaits, UnshardedModule
from fabricx.distributed.sharding.fsdp_units import (
    Policy,
    blocks,
    check_owned,
    check_shardable,
    fill_shards,
    outermost_owners,
    tied_parameters,
)  # fmt: skip
from fabricx.distributed.sharding.gathered import GatheredWeights
from fabricx.distributed.sharding.grad_hooks import check_before_sharding, check_sharded, keep_hooks
from fabricx.distributed.sharding.meta_values import meta_device
from fabricx.distributed.sharding.unused_shards import UnusedShards
from fabricx.distributed.world import World
from fabricx.model_parallel.hook_weights import FAILED_APART, HookWeights, paused
from fabricx.model_parallel.set_up.division import Division
from fabricx.model_parallel.set_up.optimizer_checks import check_with_shards

Dtype = Literal["bf16", "fp16", "fp32"]
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


@final
class FSDP(Strategy, Elastic, HidesGradients, MeasuresWaiting, ShardsWeights, WrapsStep):
    """Shard weights, gradients and optimizer states over the ranks; gather the weights of a block to compute it.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020 (stage
    3; stage 2 without `reshard_after_forward`); Zhao et al., "PyTorch FSDP", VLDB 2023.

    Args:
        wrap: submodules (blocks) that are gathered separately. "auto" finds repeated blocks, such as the layers of a
            transformer; names of classes; or a number, for the smallest submodules with at least as many parameters.
        reshard_after_forward: free a block's gathered weights after its forward, and gather them again for backward.
        param_dtype: dtype in which blocks are gathered and computed: "bf16", "fp16" or "fp32"; None for their own.
        reduce_dtype: dtype in which gradients are summed; None for `param_dtype`.
        cpu_offload: keep shards, and step the optimizer, in main memory.
        activation_checkpointing: submodules, as in `wrap`, that recompute their forward during backward instead of
            keeping activations; None for no submodule.
        replicas: number of groups of ranks over which the model is replicated (hybrid sharding); each group shards it.

    Raises:
        ValueError: an option is unknown or out of range.
    """

    traits = Traits(averages=True, sharded=True, elastic=True)
    divides_weights = True

    def __init__(
        self,
        *,
        wrap: Policy = "auto",
        reshard_after_forward: bool = True,
        param_dtype: Dtype | None = None,
        reduce_dtype: Dtype | None = None,
        cpu_offload: bool = False,
        activation_checkpointing: Policy | None = None,
        replicas: int = 1,
    ) -> None:
        super().__init__()
        for name, dtype in (("param_dtype", param_dtype), ("reduce_dtype", reduce_dtype)):
            if dtype is not None and dtype not in _DTYPES:
                raise ValueError(f"{name}={dtype!r} is not a dtype of FSDP.\n  known: {', '.join(_DTYPES)}")
        if replicas < 1:
            raise ValueError(f"replicas={replicas}: must be 1 or more groups of ranks")
        self.wrap = wrap
        self.reshard_after_forward = reshard_after_forward
        self.param_dtype = param_dtype
        self.reduce_dtype = reduce_dtype
        self.cpu_offload = cpu_offload
        self.activation_checkpointing = activation_checkpointing
        self.replicas = replicas
        self.traits = Traits(averages=True, sharded=True, elastic=True, replicas=replicas)
        self._step: Callable[..., Any] | None = None
        self._called = False
        self._manual = False  # manual optimization: a step calls submodules and `backward`
        self._in_backward = False
        self._newest: tuple[Any, ...] | None = None  # arguments of the newest step that returned a loss
        self._outputs: list[Tensor] = []  # outputs of the block that computed last, until backward
        self._hooks: list[Any] = []
        self._built: UnshardedModule | None = None
        self._waits: CollectiveTimer | None = None
        self._unused: UnusedShards | None = None
        self._gathered: GatheredWeights | None = None
        self._order: CollectiveOrder | None = None  # order of collectives, compared over ranks
        self._gathers_much = False  # whether freed memory returns to the system
        self._freed = 0  # bytes that were freed since the last return
        self._division: Division | None = None  # for hooks
        self._optimizers: list[Optimizer] = []
        self._parameters: dict[str, nn.Parameter] = {}  # the optimizers' parameters, by name

    def init_context(self, *, filled: bool = False) -> AbstractContextManager[Any]:
        return meta_device(self.module, filled=filled) if self.data_ranks.size > 1 else super().init_context()

    def setup(self, module: nn.Module, *, several_backwards: bool = False) -> None:
        from torch.distributed.fsdp import FSDPModule

        super().setup(module)
        self._manual = several_backwards
        if self.data_ranks.size == 1 and not self.world.newcomer:
            return
        check_dense(module, "strategy=fsdp")
        if several_backwards:
            check_owned(module)
        if not isinstance(module, FSDPModule):  # else: sharded by an earlier run in this process
            check_shardable(module)
            check_before_sharding(module)
            if self.activation_checkpointing is not None:
                for block in blocks(module, self.activation_checkpointing):
                    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
            self._built = UnshardedModule(module)
            if self.world.newcomer:  # the process group is not formed yet: `world_changed` shards
                return
            self._agree_on_weights(module)
            self._shard(module, self._built)
            fill_shards(module, self.world.device)
            self._initialise_root(module)
        self._track_shards(module)
        self._register_output_hooks(module)

    def _track_shards(self, module: nn.Module) -> None:
        self._unused = UnusedShards(self.data_ranks, module, unreached=not self._manual)
        self._gathered = GatheredWeights(module, self._note_freed)
        self._division = Division(module, self.data_ranks, None, None, readers=self.data_ranks)
        self._hooks += self._gathered.register_hooks()

    def _register_output_hooks(self, module: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
        self._hooks += [part.register_forward_hook(self._note_outputs) for part in sharded]

    def _shard(self, module: nn.Module, built: UnshardedModule) -> None:
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
            register_fsdp_forward_method,
        )  # fmt: skip

        options: dict[str, Any] = {
            "mesh": self._mesh(),
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=_DTYPES.get(self.param_dtype or ""), reduce_dtype=_DTYPES.get(self.reduce_dtype or "")
            ),
            "offload_policy": CPUOffloadPolicy() if self.cpu_offload and self._has_device() else OffloadPolicy(),
        }
        with built.sharding():
            units = [block for block in blocks(module, self.wrap) if not tied_parameters(module, block)]
            for block in [*(outermost_owners(module, units) if self._manual else ()), *units]:
                fully_shard(block, reshard_after_forward=self.reshard_after_forward, **options)
            # The root gathers the other parameters for the whole step: freeing them would only cost another gather.
            fully_shard(module, reshard_after_forward=False, **options)
            for name in _STEPS:
                if callable(step := getattr(module, name, None)):
                    register_fsdp_forward_method(module, name)
                    vars(module)[name].__func__.__wrapped__ = getattr(step, "__func__", step)  # keeps the signature
        if not self._has_device():  # on a device, `record_pauses` measures the waiting time
            one_machine = sys.platform == "linux" and self.world.local_size == self.world.size
            self._order = CollectiveOrder(self.data_ranks, one_machine=one_machine)
            self._waits = CollectiveTimer(module, self._order.note)

    def _initialise_root(self, module: Any) -> None:
        """Initialise FSDP's root state, because a manual step may call a submodule before the root."""
        if self._manual:
            module._get_fsdp_state()._lazy_init()

    @property
    def waited_s(self) -> float:  # type: ignore[override]
        return self._waits.seconds if self._waits is not None else 0.0

    def record_pauses(self, mark: Callable[[], Any]) -> list[tuple[Any, Any]]:
        if self.module is None or self.data_ranks.size == 1 or not self._has_device():
            return []
        return DeviceWaits(self.module, mark).spans

    def _has_device(self) -> bool:
        return self.world.device.type != "cpu"

    def _mesh(self) -> Any:
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        size, kind = self.data_ranks.size, self.world.device.type
        if size % self.replicas:
            raise ValueError(
                f"replicas={self.replicas} doesn't divide the {size} ranks into groups of equal size; set a divisor "
                "of the number of ranks"
            )
        if self.data_ranks.group is not None:  # the ranks along the data axis of a mesh
            return DeviceMesh.from_group(self.data_ranks.group, kind, mesh_dim_names=("dp_shard",))
        if self.replicas == 1:
            return init_device_mesh(kind, (size,), mesh_dim_names=("dp_shard",))
        mesh = torch.arange(size).view(self.replicas, size // self.replicas)
        ranks_by_axis = [[ranks.tolist() for ranks in axis] for axis in (mesh.T, mesh)]
        groups = [self.data_ranks.new_subgroup(ranks) for ranks in ranks_by_axis]
        return DeviceMesh.from_group(groups, kind, mesh=mesh, mesh_dim_names=("dp_replicate", "dp_shard"))

    def _agree_on_weights(self, module: nn.Module) -> None:
        """Broadcast the weights of rank 0, before each rank keeps a shard of them."""
        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.is_meta:
                self.data_ranks.broadcast(tensor)

    def wrap_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        if self.data_ranks.size == 1:
            return step
        self._step = step

        def recorded_step(*args: Any) -> Any:
            if not self._called and self.module is not None:
                check_sharded(self.module)
            self._called, self._outputs = True, []
            settled = self._gathered.settle_step() if self._gathered is not None else nullcontext()
            with explained("training_step"), settled:
                outputs = step(*args)
            if self._manual:
                self._note("ends the training step")
            if _loss(outputs) is not None:
                self._newest = args
            return outputs

        return recorded_step

    def wrap_evaluation(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def evaluated(*args: Any) -> Any:
            with explained("validation_step"):
                return step(*args)

        return evaluated

    def attach_optimizers(self, optimizers: list[Optimizer]) -> None:
        assert self.module is not None
        if self.data_ranks.size > 1 and any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
            raise ValueError("LBFGS needs the whole gradient on a rank, and fsdp keeps it in shards; use strategy=ddp")
        self._optimizers, self._parameters = optimizers, dict(self.module.named_parameters())
        for sharded in list(filter(is_dtensor, self._parameters.values()))[:1]:
            for optimizer in optimizers:
                check_with_shards(optimizer, sharded, self.data_ranks)
        self._measure_size()

    def world_changed(self, world: World) -> None:
        """Shard over the new ranks; weights and optimizer states are lost, and have to be loaded.

        Args:
            world: the ranks; this rank has joined their process group.
        """
        module, built = self.module, self._built
        assert module is not None
        assert built is not None
        self._forget_step()
        self.world = world
        built.restore(torch.device("meta") if self.data_ranks.size > 1 else world.device)
        if self.data_ranks.size > 1:
            self._shard(module, built)
            module._apply(lambda tensor: torch.empty_like(tensor, device=world.device) if tensor.is_meta else tensor)
            self._initialise_root(module)
            self._track_shards(module)
            self._register_output_hooks(module)
        self._replace_parameters(module)

    def unshard(self) -> None:
        """Reverse the sharding; the values of weights and optimizer states are lost."""
        if self._built is None or self.module is None:
            return
        self._forget_step()
        self._gathered = self._unused = self._division = None
        self._built.restore(self.world.device)
        self._replace_parameters(self.module)

    def _replace_parameters(self, module: nn.Module) -> None:
        """Let the optimizers step the module's present parameters, without state."""
        before = {id(parameter): name for name, parameter in self._parameters.items()}
        parameters_before, self._parameters = self._parameters, dict(module.named_parameters())
        keep_hooks(parameters_before, self._parameters)
        self._measure_size()
        for optimizer in self._optimizers:
            optimizer.state.clear()
            for group in optimizer.param_groups:
                group["params"] = [self._parameters[before[id(p)]] if id(p) in before else p for p in group["params"]]

    def teardown(self) -> None:
        self._forget_step()
        for parameter in self._parameters.values():  # torch cannot move a sharded module with gradients
            parameter.grad = None
        self._optimizers, self._parameters = [], {}
        self._built = self._gathered = self._division = None
        super().teardown()

    def _forget_step(self) -> None:
        if self._order is not None:
            self._order.close()
            self._order = None
        self._step = self._newest = None
        self._called, self._outputs = False, []
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def after_update(self, step: int) -> int:
        if self._gathers_much:
            release_freed_memory()  # otherwise the allocator keeps the memory of gathered weights: up to all of them
        return step

    def _note_freed(self, size: int) -> None:
        """Return memory to the system within a step, because glibc hardly reuses the aligned blocks of a gather.

        Args:
            size: bytes of gathered weights that were freed. A backward that reduces gradients frees as much again for
                the gradients of the block, and for the input of their reduction.
        """
        self._freed += 3 * size if self._in_backward and self.ends_window else size
        if self._gathers_much and self._freed >= LARGE:
            self._freed = 0
            release_freed_memory()

    def _measure_size(self) -> None:
        whole = sum(p.numel() * p.element_size() for p in self._parameters.values())
        self._gathers_much = self.data_ranks.size > 1 and not self._has_device() and whole >= LARGE

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        root: Any = self.module
        with super().accumulate():
            if self.data_ranks.size == 1:
                yield
                return
            root.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                root.set_requires_gradient_sync(True)

    def discard_window(self) -> None:
        if self._unused is not None:
            self._unused.forget()

    def _note_outputs(self, block: nn.Module, inputs: Any, outputs: Any) -> None:
        elements = outputs.values() if isinstance(outputs, Mapping) else outputs
        several = elements if isinstance(outputs, (tuple, list, Mapping)) else [outputs]
        self._outputs = [output for output in several if isinstance(output, Tensor) and output.requires_grad]
        if self._manual:
            for output in self._outputs:
                output.register_hook(self._check_backward)

    def _check_backward(self, gradient: Tensor) -> None:
        """Refuse gradients of a loss that is not scaled to this rank's share of the global batch."""
        if not self._in_backward:
            raise ValueError(
                "a manually optimised module calls self.manual_backward(loss) instead of loss.backward() and "
                "torch.autograd.grad, so that the gradient is the mean over the global batch"
            )

    def backward(self, loss: Tensor, compute: Callable[[], None] | None = None) -> None:
        self._in_backward = True
        if self._unused is not None:
            self._unused.check_hooks()
        try:
            with explained("training_step"):
                super().backward(loss, compute)
        finally:
            self._in_backward = False
        self._note("ends a backward")
        if self._unused is not None:
            self._unused.end()
        self._outputs = []

    def _note(self, event: str) -> None:
        if self._order is not None:
            self._order.note(event)

    def backward_without_data(self, example: tuple[Any, ...] = ()) -> bool:
        """Gather and reduce with the other ranks: compute any available batch, with a loss of zero.

        Args:
            example: as in `Strategy.backward_without_data`.

        Raises:
            ValueError: there is no batch to compute.
        """
        if self.data_ranks.size == 1:
            return True
        if self._outputs:  # the step has computed, as on the other ranks, but returned no loss
            self._backward_of_zero(self._zero())
            return True
        batches = [args for args in (example, self._newest) if args]
        if not batches and self._called:
            return False
        if not batches or self._step is None:
            raise ValueError(
                f"rank {self.world.rank} has not received a batch yet, but with sharded weights every rank computes "
                "each step; provide at least one batch per rank, or use fewer devices"
            )
        devices = [self.world.device] if self.world.device.type == "cuda" else []
        for args in batches:  # the step may return no loss for this batch, and may not even compute
            with torch.random.fork_rng(devices=devices):
                loss = _loss(self._step(*args))
            if loss is not None or self._outputs:
                self._backward_of_zero(self._zero() if loss is None else loss * 0.0)
                return True
        return False

    def _backward_of_zero(self, loss: Tensor) -> None:
        with self._unused.without_data() if self._unused is not None else nullcontext():
            self.backward(loss)

    def _zero(self) -> Tensor:
        """Return a loss of zero that depends on the outputs of the newest step, and on all gathered parameters."""
        assert self.module is not None
        gathered = [p for p in self.module.parameters() if p.requires_grad and not is_dtensor(p)]
        return torch.stack([tensor.sum() * 0.0 for tensor in (*self._outputs, *gathered)]).sum()

    def apply_requires_grad(self) -> None:
        if self._gathered is not None:
            self._gathered.settle()

    def hooks_see_weights(self, name: str) -> AbstractContextManager[Any]:
        if self._division is None:
            return nullcontext()
        apart = FAILED_APART if name == "on_exception" else ""
        return HookWeights(self._division, self._optimizers, apart=apart, hook=name)

    def weights_as_stored(self) -> AbstractContextManager[Any]:
        return paused()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        self.reshard()  # otherwise the next forward would use the weights before this step
        try:
            return super().optimizer_step(optimizer, closure)
        except RuntimeError as error:
            if not any(word in str(error) for word in ("DTensor", "placement", "sharding strategy")):
                raise
            raise ValueError(
                f"{type(optimizer).__name__} computes with parameters in a way that torch doesn't support for shards: "
                "use an optimizer that treats elements separately, such as AdamW or SGD, or strategy=ddp"
            ) from error

    def synchronize(self, copies: Mapping[str, Tensor] | None = None, *, ends: bool = False) -> None:
        super().synchronize(copies, ends=ends)
        self.reshard()

    def reshard(self) -> None:
        if self._gathered is not None:
            self._gathered.shard()

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        self._note("clips gradients by their norm")
        with paused():
            norm: Any = nn.utils.clip_grad_norm_(parameters, max_norm)  # DTensors: the norm is over all ranks
        whole: Tensor = norm.full_tensor() if is_dtensor(norm) else norm
        return whole

    def sharded_parameters(self) -> dict[str, Tensor]:
        return {
            name: parameter
            for name, parameter in _all_names(self.module)  # a checkpoint saves tied weights under each of their names
            if is_dtensor(parameter)
        }

    def whole_weights(self, module: nn.Module) -> dict[str, Any]:
        weights = {}
        for name, value in module.state_dict().items():
            whole = value.full_tensor() if is_dtensor(value) else value
            if self.world.main_rank:
                weights[name] = whole.detach().cpu() if isinstance(whole, Tensor) else whole
        return weights


def _all_names(module: nn.Module | None) -> Iterable[tuple[str, nn.Parameter]]:
    return module.named_parameters(remove_duplicate=False) if module is not None else ()


def _loss(outputs: Any) -> Any:
    return outputs["loss"] if isinstance(outputs, dict) else outputs
