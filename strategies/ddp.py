"""Data-parallel training with torch's DistributedDataParallel."""

from __future__ import annotations

import functools
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from fabricx.core.strategy import Strategy, Traits
from fabricx.core.strategy_parts import Elastic, KeepsLocalState, MeasuresWaiting, WrapsStep
from fabricx.core.strategy_support.gradient_checks import check_dense, warn_of_lost_residuals
from fabricx.distributed.compression.codecs import CODECS, POWERSGD, SUMMED, SumCompression
from fabricx.distributed.ddp.compressed_buckets import LowRankAverager, average_as, average_as_factors
from fabricx.distributed.ddp.shared_buckets import SharedMemoryAverager, average_in_shared_memory
from fabricx.distributed.ddp.torch_ddp import BUFFERS_ARGUMENT, BufferSourceDDP, StepModule, check_dtypes
from fabricx.distributed.ddp.unused_parameters import (
    UnusedParameters,
    reached,
    requiring_grad,
    with_sparse_gradients,
    zero,
)
from fabricx.distributed.world import World
from fabricx.errors import check_choice

_GRAPH_CHANGED = (
    "static_graph=True needs gradients of the same parameters in each step, but in this step other parameters have "
    "gradients than in the first; remove static_graph"
)
_HOOK_LOST = (
    "strategy=ddp lacks the gradient of a parameter that the step uses: torch drops the hooks of a parameter whose "
    "memory set_ replaces. Change its elements instead: `with torch.no_grad(): weight.copy_(new)`"
)


@final
class DDP(Strategy, Elastic, KeepsLocalState, MeasuresWaiting, WrapsStep):
    """Every rank keeps the whole model; gradients are averaged while `backward` is running.

    Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.

    Args:
        bucket_mib: size of gradient buckets, in MiB.
        static_graph: promise that the same parameters take part in each step, in the same order; torch optimises for
            it. With three or more ranks the first step of a resumed run then sums in another order: results differ by
            rounding.
        find_unused_parameters: expect parameters without a gradient in some steps, and do not warn about them. Results
            are correct without this option, too; a step in which all parameters have gradients costs no more.
        compression: compression of gradients in the all-reduce: "fp16", "bf16" (half the bytes) or "powersgd" (low
            rank).
        powersgd_rank: rank of the approximation; a larger rank is more accurate and slower. The error of a gradient is
            added to the next gradient, and is saved in checkpoints.
        broadcast_buffers: broadcast the buffers of rank 0 at each forward, as batch normalisation requires; if the
            data of rank 0 have ended, those of the first rank with a sample of the batch before. With False each rank
            has its own, also after a recovery and in a run that resumes with as many ranks; otherwise those of rank 0.
        shared_memory: sum gradients in shared memory if all ranks are on one machine, with Linux and without GPUs, and
            gradients are dense and not compressed; gloo sums them otherwise, and with False.

    Raises:
        ValueError: an option is unknown or out of range.
    """

    traits = Traits(averages=True, elastic=True)

    def __init__(
        self,
        *,
        bucket_mib: float = 25.0,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        compression: SumCompression | None = None,
        powersgd_rank: int = 1,
        broadcast_buffers: bool = True,
        shared_memory: bool = True,
    ) -> None:
        super().__init__()
        if compression == POWERSGD or not broadcast_buffers:  # each rank has compression errors or buffers of its own
            self.traits = Traits(averages=True, elastic=True, unreplicated=True)
        if compression is not None:
            check_choice("DDP", "compression", compression, SUMMED, "a codec needs servers: strategy=parameter_server")
        if bucket_mib <= 0:
            raise ValueError(f"bucket_mib={bucket_mib}: must be more than 0; torch's default is 25")
        if powersgd_rank < 1:
            raise ValueError(f"powersgd_rank={powersgd_rank}: must be 1 or more columns")
        self.bucket_mib = bucket_mib
        self.static_graph = static_graph
        self.find_unused_parameters = find_unused_parameters
        self.compression = compression
        self.powersgd_rank = powersgd_rank
        self.broadcast_buffers = broadcast_buffers
        self.shared_memory = shared_memory
        if static_graph:
            self.accumulation_refused = (
                "static_graph=True needs one backward per update, and accumulation has several; remove either"
            )
        self._several_backwards = False
        self._waited_s = 0.0  # without waiting in `_shared`
        self._computed = 0.0  # time at which the newest gradients were computed, on a CPU
        self._ddp: nn.parallel.DistributedDataParallel | None = None
        self._step: StepModule | None = None
        self._frozen: list[nn.Parameter] = []  # parameters that DDP does not reduce
        self._retired: nn.parallel.DistributedDataParallel | None = None
        self._unused: UnusedParameters | None = None
        self._powersgd: LowRankAverager | None = None  # PowerSGD
        self._shared: SharedMemoryAverager | None = None  # sums in shared memory
        self._laid_out = False  # whether DDP has its final bucket layout
        self._joins = False  # the ranks are those of a new generation, which may have frozen other parameters
        self._of_each_step: set[Tensor] = set()  # parameters that get a gradient, with static_graph

    def setup(self, module: nn.Module, *, several_backwards: bool = False) -> None:
        super().setup(module)
        self._several_backwards = several_backwards
        if self.data_ranks.size == 1:
            return  # nothing to average
        if several_backwards and self.static_graph:
            raise ValueError(
                "static_graph=True needs one backward per step, and a manually optimised module has several; "
                "remove static_graph"
            )
        if several_backwards and self.compression == POWERSGD:
            raise ValueError(
                "compression='powersgd' adds the compression error of a gradient to the next update, and a manually "
                "optimised module may call backward several times per update; use compression='bf16', or none"
            )
        if self.compression:
            check_dense(module, f"compression={self.compression!r}")
        if self.compression == POWERSGD and any(p.is_complex() and p.requires_grad for p in module.parameters()):
            raise ValueError(
                "compression='powersgd' factors real matrices, and a parameter is complex: train torch.view_as_real of "
                "it, or use compression='bf16', or none"
            )
        check_dtypes(module)
        self._step = StepModule(module, several_backwards=several_backwards)
        self._frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
        if self._joins:
            self._agree_on_frozen(module)
        self._laid_out = False
        if self._can_share_memory(module):
            gradients = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
            room = min(gradients, int(self.bucket_mib * 2**20))
            self._shared = SharedMemoryAverager(self.data_ranks, room, at_once=self.static_graph)
        self._build(init_sync=self.world.generation == 0)  # in later generations all ranks have the same weights
        self._lay_out_buckets()
        self._laid_out = True
        if self._powersgd is not None:
            self._powersgd.active = True

    def _can_share_memory(self, module: nn.Module) -> bool:
        """Return whether gradients can be summed in memory that all ranks map."""
        world = self.world
        one_machine = sys.platform == "linux" and world.local_size == world.size and world.store is not None
        on_cpu = world.device.type == "cpu" and world.backend == "gloo"
        plain = not self.compression and not with_sparse_gradients(module)
        return self.shared_memory and one_machine and on_cpu and plain

    def _build(self, *, init_sync: bool) -> None:
        """Construct torch's DDP over all parameters that are not in `_frozen`; collective."""
        assert self.module is not None
        assert self._step is not None
        frozen = set(self._frozen)
        known = [parameter for parameter in self.module.parameters() if parameter not in frozen]
        if not known:
            return  # all parameters are frozen
        more: dict[str, Any] = {BUFFERS_ARGUMENT: self.broadcast_buffers}
        with requiring_grad(known):
            self._ddp = BufferSourceDDP(
                self._step,
                process_group=self.data_ranks.group,
                bucket_cap_mb=self.bucket_mib,
                static_graph=self.static_graph,
                # Several backwards reach different parameters; after a single backward `UnusedParameters` reduces.
                find_unused_parameters=self._several_backwards,
                gradient_as_bucket_view=True,
                init_sync=init_sync,
                **more,
            )
        self._ddp.source = functools.partial(getattr, self, "buffer_source")
        self._unused = UnusedParameters(self.data_ranks, known, with_sparse_gradients(self.module), self._unused)
        if self.compression == POWERSGD:
            kept = {} if self._powersgd is None else self._powersgd.state()
            names = {id(parameter): name for name, parameter in self.module.named_parameters()}
            named = {names[id(parameter)]: parameter for parameter in known}
            self._powersgd = LowRankAverager(named, self.powersgd_rank, self.data_ranks.group)
            self._powersgd.load(kept)
            self._powersgd.active = self._laid_out
            self._ddp.register_comm_hook(self._powersgd, average_as_factors)
        elif self.compression:
            self._ddp.register_comm_hook((CODECS[self.compression].sum_dtype, self.data_ranks.group), average_as)
        elif self._shared is not None:
            self._ddp.register_comm_hook(self._shared, average_in_shared_memory)

    def _lay_out_buckets(self) -> None:
        """Make DDP finalise its bucket layout before the first step by a reduction of zeros; collective.

        DDP rebuilds its buckets after the first reduction, and the position of a gradient in a bucket determines the
        order in which gloo sums gradients of three or more ranks. Without this, the first step after a resume or a
        failure would round differently than the same step of an uninterrupted run. Sums in shared memory do not depend
        on the layout.
        """
        rebuilds = not self._several_backwards and not self.static_graph and self.data_ranks.size > 2
        rebuilds = rebuilds and self._shared is None
        if self._ddp is None or self._unused is None or self.module is None or not rebuilds:
            return
        parameters = self._unused.parameters
        with requiring_grad(parameters):
            self._ddp.reducer.prepare_for_backward([])
            zero(parameters, with_sparse_gradients(self.module)).backward()
        for parameter in parameters:
            parameter.grad = None

    def wrap_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        if self._step is None:
            return step
        self._step.step = step
        if self._several_backwards:
            return self._forward_unprepared
        if self._ddp is None or self._frozen:  # DDP is replaced when a parameter is unfrozen
            return self._forward
        return self._ddp.forward

    def _forward(self, *args: Any) -> Any:
        assert self._step is not None
        return self._step(*args) if self._ddp is None else self._ddp.forward(*args)

    def _take_in_unfrozen(self) -> None:
        """Construct a new DDP if a frozen parameter requires a gradient now.

        Called between forward and backward, so that a module may unfreeze parameters in any hook. All ranks must
        unfreeze the same parameters in the same step.

        Raises:
            ValueError: `static_graph` is set.
        """
        unfrozen = {parameter for parameter in self._frozen if parameter.requires_grad}
        if not unfrozen:
            return
        assert self.module is not None
        if self.static_graph:
            names = [name for name, parameter in self.module.named_parameters() if parameter in unfrozen]
            raise ValueError(
                f"static_graph=True needs the same parameters in each step, and {names[0]} has been unfrozen; remove "
                "static_graph"
            )
        self._frozen = [parameter for parameter in self._frozen if parameter not in unfrozen]
        old = self._ddp
        if old is not None:
            for parameter in self.module.parameters():
                if parameter.grad is not None:  # a view of the old buckets
                    parameter.grad = parameter.grad.clone()
            self._retired = old  # keep it alive for the graph of this step, but delete its hooks
            del old.reducer, old.logger
        self._build(init_sync=False)
        assert self._ddp is not None
        if not self._several_backwards:
            self._ddp.reducer.prepare_for_backward([])

    def world_changed(self, world: World) -> None:
        module = self.module
        assert module is not None
        self._release_buckets()
        self.world = world
        self._joins = True
        try:
            self.setup(module, several_backwards=self._several_backwards)
        finally:
            self._joins = False

    def _agree_on_frozen(self, module: nn.Module) -> None:
        """Reduce the same parameters on all ranks: hooks may have frozen some before a replacement joined; collective.

        The state that all ranks load next determines what requires a gradient.
        """
        parameters = list(module.parameters())
        numbers = {number for number, parameter in enumerate(parameters) if not parameter.requires_grad}
        common = set.intersection(*self.data_ranks.gather_objects(numbers))
        self._frozen = [parameters[number] for number in sorted(common)]

    def teardown(self) -> None:
        self._release_buckets()
        self._powersgd = None
        super().teardown()

    def _release_buckets(self) -> None:
        if self._ddp is not None and self.module is not None:
            for parameter in self.module.parameters():
                if parameter.grad is not None:  # a view of the buckets
                    parameter.grad = None
            # Delete its hooks now: the traceback of an interrupted backward may keep it alive, and a hook that still
            # expects gradients would fail in the next backward.
            for name in ("reducer", "logger"):
                vars(self._ddp).pop(name, None)
        if self._shared is not None:
            self._waited_s += self._shared.waited_s
            self._shared.close()
        self._ddp = self._step = self._retired = self._unused = self._shared = None
        self._frozen, self._of_each_step = [], set()

    def synchronize(self, copies: Mapping[str, Tensor] | None = None, *, ends: bool = False) -> None:
        if self.broadcast_buffers:
            super().synchronize(copies, ends=ends)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        if self._ddp is not None and self.accumulation_refused:  # a hook has set accumulate_grad_batches
            raise ValueError(self.accumulation_refused)
        with super().accumulate(), nullcontext() if self._ddp is None else self._ddp.no_sync():
            yield
        if self._step is not None:
            self._step.called[0] = False

    def backward(self, loss: Tensor, compute: Callable[[], None] | None = None) -> None:
        if self._step is not None:
            self._step.called[0] = False
        if self._frozen and self.ends_window and self._step is not None:
            self._take_in_unfrozen()
        if self._ddp is None or not self._ddp.require_backward_grad_sync:
            super().backward(loss, compute)
            return
        if self._several_backwards:
            # Each backward performs a reduction of the parameters that this loss reaches.
            self._ddp.reducer.prepare_for_backward([loss])
        on_cpu = self.world.device.type == "cpu"
        if on_cpu:
            # A callback queued at the start of backward runs when all gradients are computed, before waiting for peers.
            loss.register_hook(self._call_when_computed)
        try:
            super().backward(loss, compute)
        except RuntimeError as error:
            if self.static_graph and "static_graph" in str(error):
                raise ValueError(_GRAPH_CHANGED) from error
            raise
        if not self._several_backwards:
            self._complete(loss)
        if on_cpu:
            self._waited_s += time.perf_counter() - self._computed

    def _complete(self, loss: Tensor | None) -> None:
        """Contribute zeros for the parameters that this rank's backward has not reached, to complete the averages.

        Args:
            loss: loss of the backward; None without a backward.

        Raises:
            ValueError: with `static_graph`, other parameters got a gradient than in the first step; or DDP lacks the
                gradient of a parameter that the backward has reached.
        """
        ddp, unused = self._ddp, self._unused
        assert ddp is not None
        assert unused is not None
        unused.reductions += 1
        if loss is not None:
            try:
                ddp.reducer._check_reducer_finalized()
            except RuntimeError as error:
                if self.static_graph:
                    raise ValueError(_GRAPH_CHANGED) from error
            else:
                if self.static_graph and not self._of_each_step:
                    self._of_each_step = reached(loss)
                return
        if loss is not None and not set(unused.parameters) - reached(loss):
            raise ValueError(_HOOK_LOST)
        unused.complete(loss, warns=not self.find_unused_parameters)
        if self._powersgd is not None:
            self._powersgd.undo([parameter for parameter in unused.parameters if parameter.grad is None])
        try:
            ddp.reducer._check_reducer_finalized()
        except RuntimeError as error:
            raise ValueError(_HOOK_LOST) from error

    # -- state of each rank --------------------------------------------------------------------------------------

    def state_dict(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        state = super().state_dict(module, optimizers)
        if not self.broadcast_buffers:  # each rank has its own
            kept = {name: buffer.clone() for name, buffer in module.named_buffers() if name in state["module"]}
            if optimizers:
                state["buffers"] = self.data_ranks.gather_objects(kept)
            for buffer in kept.values():
                self.data_ranks.broadcast(buffer)
            state["module"].update(kept)
        if self.compression != POWERSGD or not optimizers:
            return state
        return {
            **state,
            "thin": self.data_ranks.gather_objects({} if self._powersgd is None else self._powersgd.state()),
        }

    def local_state_dict(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        state = super().state_dict(module, optimizers)
        return state if self._powersgd is None else {**state, "own": self._powersgd.state()}

    def load_local_states(
        self, states: Sequence[dict[str, Any]], module: nn.Module, optimizers: list[Optimizer], *, own: bool
    ) -> None:  # fmt: skip
        super().load_state_dict(states[0], module, optimizers)
        if self._powersgd is not None:
            kept = states[0].get("own", {})
            if not own:
                kept = {name: {**saved, "lost": torch.zeros_like(saved["lost"])} for name, saved in kept.items()}
                warn_of_lost_residuals(self.world)
            self._powersgd.load(kept)

    def load_state_dict(self, state: dict[str, Any], module: nn.Module, optimizers: list[Optimizer]) -> None:
        super().load_state_dict(state, module, optimizers)
        buffers = state.get("buffers", ())
        if not self.broadcast_buffers and len(buffers) == self.data_ranks.size:
            module.load_state_dict(buffers[self.data_ranks.rank], strict=False)
        kept = state.get("thin")
        if self._powersgd is None or kept is None:
            return
        if len(kept) == self.data_ranks.size:
            self._powersgd.load(kept[self.data_ranks.rank])
        elif self.world.main_rank:
            warnings.warn(
                f"the checkpoint is of {len(kept)} ranks, and this run has {self.data_ranks.size}: the compression "
                "errors of gradients are dropped; resume with the same number of ranks to keep them",
                stacklevel=2,
            )

    @property
    def waited_s(self) -> float:  # type: ignore[override]
        """Return the seconds of waiting so far, also within the present backward, which sums in shared memory."""
        return self._waited_s + (0.0 if self._shared is None else self._shared.waited_s)

    def _call_when_computed(self, gradient: Tensor) -> None:
        Variable._execution_engine.queue_callback(self._note_computed)  # type: ignore[attr-defined]

    def _note_computed(self) -> None:
        self._computed = time.perf_counter()

    def backward_without_data(self, example: tuple[Any, ...] = ()) -> bool:
        if self._step is None:
            return True
        if not self.ends_window:  # no reduction follows
            self._forward_without_data()
            return True
        step, self._step.step = self._step.step, self._zero
        try:
            again = self._step.called[0]
            if again and self.static_graph and self._ddp is not None:
                self._ddp.require_forward_param_sync = False  # the first forward of this step has broadcast the buffers
            loss = self._zero() if again and not self.static_graph else self._forward()
            if self._frozen:
                self._take_in_unfrozen()
            if self.static_graph:
                self.backward(loss)
            elif self._ddp is not None:
                self._complete(None)
        finally:
            self._step.step = step
            self._step.called[0] = False
        return True

    def _forward_without_data(self) -> None:
        """Run a forward without a backward: the first of a window broadcasts buffers and the bucket layout."""
        assert self._step is not None
        if self._step.called[0]:
            return
        step, self._step.step = self._step.step, self._zero
        try:
            self._forward()
        finally:
            self._step.step = step
            self._step.called[0] = False

    def _zero(self) -> Tensor:
        """Return a loss of zero that depends on the parameters of each step, or on all parameters."""
        assert self.module is not None
        reaches = self._of_each_step or {p for p in self.module.parameters() if p.requires_grad}
        wanted = [parameter for parameter in self.module.parameters() if parameter in reaches]
        return zero(wanted, with_sparse_gradients(self.module))

    def _forward_unprepared(self, *args: Any) -> Any:
        """Run the step without DDP's preparation for a single backward: `backward` prepares each of several."""
        ddp, inner = self._ddp, self._step
        assert inner is not None
        if ddp is None:
            return inner(*args)
        step, syncs = inner.step, ddp.require_backward_grad_sync

        def step_then_unprepared(*args: Any) -> Any:
            outputs = step(*args)
            ddp.require_backward_grad_sync = False  # DDP reads it at the end of its forward
            return outputs

        inner.step = step_then_unprepared
        try:
            return ddp.forward(*args)
        finally:
            inner.step = step
            ddp.require_backward_grad_sync = syncs
            ddp.require_forward_param_sync = True
