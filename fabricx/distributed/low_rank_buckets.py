"""PowerSGD in the gradient buckets of torch's DDP: low-rank factors in place of full gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor


@final
class ThinSums:
    """Averages buckets by PowerSGD: what is lost is kept by parameter, not by bucket, so that it fits other buckets.

    A bucket is summed at once, in the order in which DDP hands them out: the same on all ranks. torch's own hook begins
    its second and third sum when the one before has ended, and its state is of one layout of buckets only.

    Source: Vogels et al., "PowerSGD", NeurIPS 2019, algorithm 1, with the worker's own part as what is lost.

    Args:
        parameters: by name, those that have gradients.
        rank: of the matrices.

    Attributes:
        active: compress; else buckets are averaged as they are.
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
        """Average a bucket's gradients over the ranks."""
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
        given = [self._lost[name] + gradient.reshape(self._lost[name].shape) for name, gradient in thin]
        lefts = _summed([mine @ self._basis[name] for mine, (name, _) in zip(given, thin, strict=True)])
        sides = [torch.linalg.qr(left)[0] for left in lefts]
        own = [mine.T @ side for mine, side in zip(given, sides, strict=True)]
        rights = _summed(own)
        for (name, gradient), mine, side, factor, right in zip(thin, given, sides, own, rights, strict=True):
            self._before[name] = self._lost[name], self._basis[name]
            self._lost[name], self._basis[name] = mine - side @ factor.T, right
            gradient.copy_((side @ right.T).div_(size).view(gradient.shape))
        return _done(buffer)

    def undo(self, parameters: Iterable[Tensor]) -> None:
        """Forget the newest averages of some parameters: no rank had a gradient of them."""
        for name in [self._names[id(parameter)] for parameter in parameters if id(parameter) in self._names]:
            if name in self._before:
                self._lost[name], self._basis[name] = self._before[name]

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return what is kept for the next gradients, by name."""
        return {name: {"lost": lost.clone(), "basis": self._basis[name].clone()} for name, lost in self._lost.items()}

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over what `state` has returned, of parameters that are here."""
        for name, saved in state.items():
            if name in self._lost and saved["basis"].shape == self._basis[name].shape:
                self._lost[name] = saved["lost"].to(self._lost[name], copy=True)
                self._basis[name] = saved["basis"].to(self._basis[name], copy=True)


def _summed(parts: list[Tensor]) -> list[Tensor]:
    """Return the sums of some matrices over the ranks; the parts stay.

    Each has memory of its own: where a matrix begins in memory decides how a product with it is rounded.
    """
    flat = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(flat)
    sums = flat.split([part.numel() for part in parts])
    return [found.clone().view(part.shape) for found, part in zip(sums, parts, strict=True)]


def _done(buffer: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


def _is_worth_it(parameter: Tensor, rank: int) -> bool:
    if parameter.dim() < 2 or not parameter.numel():
        return False
    rows, columns = len(parameter), parameter[0].numel()
    return (rows + columns) * rank < rows * columns
