"""Data parallelism that sums gradients after the last backward of a window: a pipeline computes several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from fabricx.core.module_state.placeholder import is_placeholder
from fabricx.core.strategy import Strategy, Traits
from fabricx.core.strategy_parts import Elastic, HoldsPart
from fabricx.core.strategy_support.gradient_checks import check_dense
from fabricx.distributed.world import World

BUCKET_BYTES: Final = 25 * 2**20  # gradients that are summed in a single collective


class GradientSums(Strategy, Elastic, HoldsPart):
    """Sum the gradients of data ranks in buckets, after backward; torch's DDP expects one forward before a backward.

    Attributes:
        reduce_shared: sums gradients over the stages of a pipeline, before the sum over data ranks.
        in_batch: the microbatches of a batch are in the pipeline; its gradients are summed afterwards.
    """

    traits = Traits(elastic=True)
    reduce_shared: Callable[[], None] | None = None
    in_batch = False

    def world_changed(self, world: World) -> None:
        self.world = world

    def setup(self, module: nn.Module, *, several_backwards: bool = False) -> None:
        super().setup(module)
        if self.world.size == 1:
            return
        check_dense(module, "strategy=pipeline")
        for tensor in (*module.parameters(), *module.buffers()):
            if not is_placeholder(tensor):
                self.world.broadcast(tensor)

    def teardown(self) -> None:
        self.absent, self.elements, self.reduce_shared = (), {}, None
        super().teardown()

    def forward_backward(
        self, step: Callable[..., Any], backward: Callable[[Any], Any], batch: Any, index: int
    ) -> Any:  # fmt: skip
        self.gather()
        outputs = super().forward_backward(step, backward, batch, index)
        self.end_backward()
        return outputs

    def backward_without_data(self, example: tuple[Any, ...] = ()) -> bool:
        if not self.in_batch:
            self.gather()
            self.end_backward()
        return True

    def end_backward(self) -> None:
        """Sum the gradients of a window over the data ranks, after its last backward; all data ranks call it."""
        if not self.ends_window or self.module is None:
            return
        if self.reduce_shared is not None:
            self.reduce_shared()
        self.reduce_gradients(self.module)

    def reduce_gradients(self, module: nn.Module) -> None:
        """Sum the gradients of a module over the data ranks; all data ranks call it.

        Args:
            module: the user's module.
        """
        if self.world.size == 1:
            return
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not parameters:
            return
        # A parameter that no rank has used keeps no gradient, so that the optimizer does not decay it.
        used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int8, device=self.world.device)
        self.world.all_reduce(used, "max")
        for parameter, is_used in zip(parameters, used.tolist(), strict=True):
            if is_used and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.sum_gradients(parameters)

    def gather(self) -> None:
        """Gather the weights for a batch; all data ranks call it."""

    def gather_to_evaluate(self) -> None:
        """Gather the weights for an evaluation; all data ranks call it."""

    def release(self) -> None:
        """End an evaluation, which began with `gather_to_evaluate`."""

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum the gradients of parameters over the data ranks.

        Args:
            parameters: all data ranks have gradients of the same parameters.
        """
        self.sum_over(self.world, parameters)

    @staticmethod
    def sum_over(world: World, parameters: Sequence[nn.Parameter]) -> None:
        """Sum the gradients of parameters over some ranks.

        Args:
            world: the ranks.
            parameters: these ranks have gradients of the same parameters.
        """
        if world.size == 1:
            return
        for bucket in _buckets([p.grad for p in parameters if p.grad is not None]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            world.all_reduce(flat)
            parts = flat.split([gradient.numel() for gradient in bucket])
            torch._foreach_copy_(bucket, [part.view_as(g) for part, g in zip(parts, bucket, strict=True)])


def _buckets(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of gradients of the same dtype, of at most `BUCKET_BYTES` unless a gradient is larger.

    >>> [len(bucket) for bucket in _buckets([torch.zeros(2), torch.zeros(3), torch.zeros(1, dtype=torch.float64)])]
    [2, 1]
    """
    bucket: list[Tensor] = []
    for gradient in gradients:
        full = sum(other.nbytes for other in bucket) + gradient.nbytes > BUCKET_BYTES
        if bucket and (full or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
