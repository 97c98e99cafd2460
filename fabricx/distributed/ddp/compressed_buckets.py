"""Compression in the gradient buckets of torch's DDP: another dtype, or PowerSGD's low-rank factors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from fabricx.distributed.compression.powersgd import LowRankMatrix, is_compressible


@final
class LowRankAverager:
    """Averages gradients of DDP buckets with PowerSGD and error feedback, whose state is kept per parameter.

    State per parameter, in place of per bucket, stays valid when DDP rebuilds its buckets. A bucket is reduced
    synchronously, in the order in which DDP provides the buckets, which is the same on all ranks. torch's PowerSGD hook
    starts its second and third all-reduce when the previous all-reduce has ended, and its state fits only one bucket
    layout.

    Args:
        parameters: trainable parameters by name.
        rank: rank of the low-rank factors.
        group: process group of DDP; None for all ranks.

    Attributes:
        active: compress; if False, buckets are averaged without compression.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], rank: int, group: dist.ProcessGroup | None = None
    ) -> None:  # fmt: skip
        self._group = group
        self.active = False
        self._names = {id(p): name for name, p in parameters.items() if is_compressible(p, rank)}
        self._matrices = {name: LowRankMatrix(parameters[name], rank) for name in self._names.values()}
        self._before: dict[str, tuple[Tensor, Tensor]] = {}  # error and basis before the newest average

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Average the gradients of a bucket over all ranks, in place.

        Args:
            bucket: bucket of torch's DDP communication hook.

        Returns:
            A complete future of the bucket's buffer.
        """
        buffer, size = bucket.buffer(), dist.get_world_size(self._group)
        pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True)) if self.active else []
        gradients = {self._names[id(p)]: gradient for p, gradient in pairs if id(p) in self._names}
        if not gradients:
            dist.all_reduce(buffer.div_(size), group=self._group)
            return _done(buffer)
        others = [gradient for p, gradient in pairs if id(p) not in self._names]
        if others:
            flat = torch.cat([other.reshape(-1) for other in others]).div_(size)
            dist.all_reduce(flat, group=self._group)
            for other, mean in zip(others, flat.split([other.numel() for other in others]), strict=True):
                other.copy_(mean.view(other.shape))
        matrices = [self._matrices[name] for name in gradients]
        self._before |= {name: (m.lost, m.basis) for name, m in zip(gradients, matrices, strict=True)}
        lefts = _summed(
            [m.project(gradient) for m, gradient in zip(matrices, gradients.values(), strict=True)], self._group
        )
        for matrix, left in zip(matrices, lefts, strict=True):
            matrix.orthogonalise(left)
        rights = _summed([matrix.project_back() for matrix in matrices], self._group)
        for matrix, gradient, right in zip(matrices, gradients.values(), rights, strict=True):
            gradient.copy_(matrix.restore(right).div_(size).view(gradient.shape))
        return _done(buffer)

    def undo(self, parameters: Iterable[Tensor]) -> None:
        """Restore the state of parameters from before the newest average, because no rank had a gradient for them.

        Args:
            parameters: those without a gradient on any rank.
        """
        for name in [self._names[id(parameter)] for parameter in parameters if id(parameter) in self._names]:
            if name in self._before:
                matrix = self._matrices[name]
                matrix.lost, matrix.basis = self._before[name]

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the error and the basis of each compressed parameter, by parameter name."""
        return {name: {"lost": m.lost.clone(), "basis": m.basis.clone()} for name, m in self._matrices.items()}

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load the result of `state`; unknown parameters and bases of another shape are skipped.

        Args:
            state: state by parameter name, {"lost": [rows, columns], "basis": [columns, rank]}.
        """
        for name, saved in state.items():
            matrix = self._matrices.get(name)
            if matrix is not None and saved["basis"].shape == matrix.basis.shape:
                matrix.lost = saved["lost"].to(matrix.lost, copy=True)
                matrix.basis = saved["basis"].to(matrix.basis, copy=True)


def average_as(
    encoding: tuple[torch.dtype, dist.ProcessGroup | None], bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:  # fmt: skip
    """Average the gradients of a bucket over all ranks, in place, in a dtype with fewer bytes.

    torch has such hooks, too; its hook for bfloat16 requires NCCL, although gloo can sum bfloat16.

    Args:
        encoding: dtype of the sums, and process group of DDP; None for all ranks.
        bucket: bucket of torch's DDP communication hook.

    Returns:
        A future of the bucket's buffer.
    """
    (dtype, group), buffer = encoding, bucket.buffer()
    encoded = buffer.to(dtype).div_(dist.get_world_size(group))
    work = dist.all_reduce(encoded, group=group, async_op=True)
    assert work is not None
    averaged: torch.futures.Future[Tensor] = work.get_future().then(lambda done: buffer.copy_(done.value()[0]))
    return averaged


def average_as_factors(averager: LowRankAverager, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average the gradients of a bucket over all ranks, in place, as low-rank factors.

    Args:
        averager: state of this rank.
        bucket: bucket of torch's DDP communication hook.

    Returns:
        A complete future of the bucket's buffer.
    """
    return averager.average(bucket)


# DDP compares a hook's annotations with types, and annotations are strings in this module.
for _hook in (average_as, average_as_factors):
    _hook.__annotations__.update({"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]})


def _summed(parts: list[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Sum matrices over the ranks into new tensors.

    Each sum is a separate allocation: the alignment of a matrix in memory affects how a product with it is rounded.
    """
    flat = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(flat, group=group)
    sums = flat.split([part.numel() for part in parts])
    return [total.clone().view(part.shape) for total, part in zip(sums, parts, strict=True)]


def _done(buffer: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future
