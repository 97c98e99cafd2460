"""PowerSGD in the gradient buckets of torch's DDP: low-rank factors in place of full gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor


@final
class LowRankAverager:
    """Averages gradients of DDP buckets with PowerSGD and error feedback, whose state is kept per parameter.

    State per parameter, in place of per bucket, stays valid when DDP rebuilds its buckets. A bucket is reduced
    synchronously, in the order in which DDP provides the buckets, which is the same on all ranks. torch's PowerSGD hook
    starts its second and third all-reduce when the previous all-reduce has ended, and its state fits only one bucket
    layout.

    Source: Vogels et al., "PowerSGD", NeurIPS 2019, algorithm 1, except that a worker's error is the difference to the
    worker's own contribution.

    Args:
        parameters: trainable parameters by name.
        rank: rank of the low-rank factors.

    Attributes:
        active: compress; if False, buckets are averaged without compression.
    """

    def __init__(self, parameters: Mapping[str, Tensor], rank: int) -> None:
        self.active = False
        self._names = {id(p): name for name, p in parameters.items() if _is_worth_it(p, rank)}
        self._lost: dict[str, Tensor] = {}
        self._basis: dict[str, Tensor] = {}
        self._before: dict[str, tuple[Tensor, Tensor]] = {}
        for name in self._names.values():
            parameter = parameters[name]
            rows, columns = len(parameter), parameter[0].numel()
            like: dict[str, Any] = {"dtype": torch.promote_types(parameter.dtype, torch.float32)}
            self._lost[name] = torch.zeros(rows, columns, device=parameter.device, **like)
            chance = torch.Generator().manual_seed(columns)
            self._basis[name] = torch.randn(columns, rank, generator=chance).to(parameter.device, **like)

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Average the gradients of a bucket over all ranks, in place.

        Args:
            bucket: of torch's DDP communication hook.

        Returns:
            A complete future of the bucket's buffer.
        """
        buffer, size = bucket.buffer(), dist.get_world_size()
        pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True)) if self.active else []
        thin = [(self._names[id(p)], gradient) for p, gradient in pairs if id(p) in self._names]
        if not thin:
            dist.all_reduce(buffer.div_(size))
            return _done(buffer)
        others = [gradient for p, gradient in pairs if id(p) not in self._names]
        if others:
            flat = torch.cat([other.reshape(-1) for other in others]).div_(size)
            dist.all_reduce(flat)
            for other, mean in zip(others, flat.split([other.numel() for other in others]), strict=True):
                other.copy_(mean.view(other.shape))
        corrected = [self._lost[name] + gradient.reshape(self._lost[name].shape) for name, gradient in thin]
        lefts = _summed([matrix @ self._basis[name] for matrix, (name, _) in zip(corrected, thin, strict=True)])
        sides = [torch.linalg.qr(left)[0] for left in lefts]
        factors = [matrix.T @ side for matrix, side in zip(corrected, sides, strict=True)]
        rights = _summed(factors)
        for (name, gradient), matrix, side, factor, right in zip(thin, corrected, sides, factors, rights, strict=True):
            self._before[name] = self._lost[name], self._basis[name]
            self._lost[name], self._basis[name] = matrix - side @ factor.T, right
            gradient.copy_((side @ right.T).div_(size).view(gradient.shape))
        return _done(buffer)

    def undo(self, parameters: Iterable[Tensor]) -> None:
        """Restore the state of parameters from before the newest average, because no rank had a gradient for them.

        Args:
            parameters: those without a gradient on any rank.
        """
        for name in [self._names[id(parameter)] for parameter in parameters if id(parameter) in self._names]:
            if name in self._before:
                self._lost[name], self._basis[name] = self._before[name]

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the error and the basis of each compressed parameter, by parameter name."""
        return {name: {"lost": lost.clone(), "basis": self._basis[name].clone()} for name, lost in self._lost.items()}

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load the result of `state`; unknown parameters and bases of another shape are skipped.

        Args:
            state: by parameter name, {"lost": [rows, columns], "basis": [columns, rank]}.
        """
        for name, saved in state.items():
            if name in self._lost and saved["basis"].shape == self._basis[name].shape:
                self._lost[name] = saved["lost"].to(self._lost[name], copy=True)
                self._basis[name] = saved["basis"].to(self._basis[name], copy=True)


def _summed(parts: list[Tensor]) -> list[Tensor]:
    """Sum matrices over the ranks into new tensors.

    Each sum is a separate allocation: the alignment of a matrix in memory affects how a product with it is rounded.
    """
    flat = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(flat)
    sums = flat.split([part.numel() for part in parts])
    return [total.clone().view(part.shape) for total, part in zip(sums, parts, strict=True)]


def _done(buffer: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


def _is_worth_it(parameter: Tensor, rank: int) -> bool:
    if parameter.dim() < 2 or not parameter.numel():
        return False
    rows, columns = len(parameter), parameter[0].numel()
    return (rows + columns) * rank < rows * columns
