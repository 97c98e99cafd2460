"""Data parallel training with torch's DistributedDataParallel."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from fabricx.comm.world import World
from fabricx.errors import did_you_mean
from fabricx.strategy import Strategy, Traits

Compression = Literal["fp16", "bf16", "powersgd"]
_COMPRESSIONS = ("fp16", "bf16", "powersgd")
# torch 2.13 renamed it, and warns about the old name.
_SIGNATURE = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
_BUFFERS_ARGUMENT = "forward_sync_buffers" if "forward_sync_buffers" in _SIGNATURE else "broadcast_buffers"


@final
class DDP(Strategy):
    """Every rank keeps the whole model; gradients are averaged while `backward` is running.

    Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.

    Args:
        bucket_mib: gradients travel in buckets of this size, in MiB.
        static_graph: the same parameters take part in each step, in the same order; lets torch optimise for that.
        find_unused_parameters: some parameters get no gradient in some steps. Costs a walk through the graph.
        compression: "fp16", "bf16" (half the bytes) or "powersgd" (low rank) for the gradients on their way.
        powersgd_rank: rank of the approximation; larger is closer and slower.
        broadcast_buffers: give all ranks the buffers of rank 0 at each forward, as batch normalisation wants it.
    """

    traits = Traits(elastic=True)

    def __init__(
        self,
        *,
        bucket_mib: float = 25.0,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        compression: Compression | None = None,
        powersgd_rank: int = 1,
        broadcast_buffers: bool = True,
    ) -> None:
        super().__init__()
        if compression is not None and compression not in _COMPRESSIONS:
            raise ValueError(
                f"compression={compression!r} isn't known to DDP.{did_you_mean(str(compression), _COMPRESSIONS)}\n"
                f"  known: {', '.join(_COMPRESSIONS)}"
            )
        if bucket_mib <= 0:
            raise ValueError(f"bucket_mib={bucket_mib}: a bucket needs room, 25 is torch's default")
        self.bucket_mib = bucket_mib
        self.static_graph = static_graph
        self.find_unused_parameters = find_unused_parameters
        self.compression = compression
        self.powersgd_rank = powersgd_rank
        self.broadcast_buffers = broadcast_buffers
        self._several_backwards = False
        self._computed = 0.0  # when the newest gradient was, on a CPU
        self._ddp: nn.parallel.DistributedDataParallel | None = None
        self._step: _Step | None = None

    def setup(self, module: nn.Module, *, several_backwards: bool = False) -> None:
        super().setup(module)
        self._several_backwards = several_backwards
        if self.world.size == 1 or not any(parameter.requires_grad for parameter in module.parameters()):
            return  # nothing to average
        if several_backwards and self.static_graph:
            raise ValueError("static_graph=True needs one backward per step; a manually optimised module has several")
        self._step = _Step(module)
        more: dict[str, Any] = {_BUFFERS_ARGUMENT: self.broadcast_buffers}
        self._ddp = nn.parallel.DistributedDataParallel(
            self._step,
            bucket_cap_mb=self.bucket_mib,
            static_graph=self.static_graph,
            # One backward of several reaches only a part of the parameters: the others have to be found.
            find_unused_parameters=self.find_unused_parameters or several_backwards,
            gradient_as_bucket_view=True,
            init_sync=self.world.generation == 0,  # else all have the same weights already
            **more,
        )
        if self.compression:
            _compress(self._ddp, self.compression, self.powersgd_rank)

    def wrap_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        if self._ddp is None or self._step is None:
            return step
        self._step.step = step
        return self._forward_unprepared if self._several_backwards else self._ddp.forward

    def world_changed(self, world: World) -> None:
        module = self.module
        assert module is not None
        self._leave_buckets()
        self.world = world
        self.setup(module, several_backwards=self._several_backwards)

    def teardown(self) -> None:
        self._leave_buckets()
        super().teardown()

    def _leave_buckets(self) -> None:
        if self._ddp is not None and self.module is not None:
            for parameter in self.module.parameters():
                if parameter.grad is not None:  # a view into buckets that go away
                    parameter.grad = None
        self._ddp = None
        self._step = None

    def quiesce(self, copies: Mapping[str, Tensor] | None = None) -> None:
        if self.broadcast_buffers:
            super().quiesce(copies)

    @property
    def gradient_factor(self) -> float:
        return float(self.world.size)  # DDP averages: shares of the global mean have to be scaled up to sum to it

    def accumulate(self) -> AbstractContextManager[Any]:
        return self._ddp.no_sync() if self._ddp is not None else super().accumulate()

    def backward(self, loss: Tensor) -> None:
        if self._ddp is not None and self._several_backwards and self._ddp.require_backward_grad_sync:
            # Each backward is a reduction of its own, over the parameters that this loss reaches.
            self._ddp.reducer.prepare_for_backward([loss])
        if self._ddp is None or self.world.device.type != "cpu" or not self._ddp.require_backward_grad_sync:
            loss.backward()  # type: ignore[no-untyped-call]
            return
        # What is queued where a backward begins is called when all is computed, before others are waited for.
        loss.register_hook(self._call_when_computed)
        loss.backward()  # type: ignore[no-untyped-call]
        self.waited_s += time.perf_counter() - self._computed

    def _call_when_computed(self, gradient: Tensor) -> None:
        Variable._execution_engine.queue_callback(self._note_computed)  # type: ignore[attr-defined]

    def _note_computed(self) -> None:
        self._computed = time.perf_counter()

    def backward_nothing(self, *company: Any) -> bool:
        if self._ddp is None or self._step is None:
            return True
        step, self._step.step = self._step.step, self._zero
        try:
            loss: Any = self._forward_unprepared() if self._several_backwards else self._ddp.forward()
            self.backward(loss)
        finally:
            self._step.step = step
        return True

    def _zero(self) -> Tensor:
        """Return a loss of zero that every parameter takes part in; an empty slice keeps NaN weights out of it."""
        assert self.module is not None
        terms = [p.reshape(-1)[:0].sum() for p in self.module.parameters() if p.requires_grad]
        return torch.stack([term.to(terms[0]) for term in terms]).sum()

    def _forward_unprepared(self, *args: Any) -> Any:
        """Run the step without DDP preparing for the one backward to follow: `backward` prepares for each."""
        ddp, inner = self._ddp, self._step
        assert ddp is not None
        assert inner is not None
        step, syncs = inner.step, ddp.require_backward_grad_sync

        def step_then_unprepared(*args: Any) -> Any:
            outputs = step(*args)
            ddp.require_backward_grad_sync = False  # seen by DDP when it returns from its forward
            return outputs

        inner.step = step_then_unprepared
        try:
            return ddp.forward(*args)
        finally:
            inner.step = step
            ddp.require_backward_grad_sync = syncs
            ddp.require_forward_param_sync = True


class _Step(nn.Module):
    """What DDP sees as the model: calling it is the user's training step."""

    step: Callable[..., Any]

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __call__(self, *args: Any) -> Any:  # straight to the step: two frames fewer than through torch's hooks
        return self.step(*args)


def _compress(ddp: nn.parallel.DistributedDataParallel, compression: str, powersgd_rank: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

    if compression == "powersgd":
        state = powersgd.PowerSGDState(None, matrix_approximation_rank=powersgd_rank, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powersgd.powerSGD_hook)
    elif compression == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif dist.get_backend() == "nccl":
        ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    else:
        ddp.register_comm_hook(None, _bf16_hook)  # torch's own refuses every backend but NCCL, though gloo sums bf16


def _bf16_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket with half the bytes on the way."""
    buffer = bucket.buffer()
    halves = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(halves, async_op=True)
    assert work is not None
    averaged: torch.futures.Future[Tensor] = work.get_future().then(lambda done: buffer.copy_(done.value()[0]))
    return averaged


# DDP compares a hook's annotations with the types themselves, and here annotations are text.
_bf16_hook.__annotations__.update({"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]})
