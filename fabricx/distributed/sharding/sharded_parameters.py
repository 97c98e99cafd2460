"""Parameters that each rank stores a part of between updates, and has whole while it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import Optimizer

from fabricx.distributed.sharding.grad_hooks import number_of_hooks
from fabricx.distributed.world import World

BUCKET_BYTES: Final = 100 * 2**20  # whole tensors that are gathered, or reduced, in a single collective


@dataclass
class _Sharded:
    """A parameter.

    Attributes:
        name: name in the module.
        names: all names of a tied parameter.
        whole: the original parameter; without memory while the module has the shard.
        shard: the rows of this rank, a DTensor.
        places: (module, name) of all modules that have the parameter.
    """

    name: str
    names: list[str]
    whole: nn.Parameter
    shard: nn.Parameter
    places: list[tuple[nn.Module, str]]


@final
class ShardedParameters:
    """Parts of the parameters of a module, by rows, as `fully_shard` divides them.

    In contrast to `fully_shard`, the caller determines when weights are gathered and gradients are reduced: each rank
    may compute any number of forwards and backwards in between, as stages of a pipeline do.

    Args:
        world: ranks that store the parts.
        module: its parameters become DTensors; whole parameters are the original objects again after `gather`.
        excluded: returns whether a parameter stays as it is.

    Attributes:
        gathered: whether the module has its whole parameters.
    """

    def __init__(self, world: World, module: nn.Module, excluded: Callable[[Tensor], bool]) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        self._world, self.gathered = world, True
        group = world.group if world.group is not None else dist.group.WORLD
        assert group is not None
        mesh = DeviceMesh.from_group(group, world.device.type, mesh_dim_names=("data",))
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        names: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
                places.setdefault(id(parameter), []).append((part, name))
        self._all = [
            _Sharded(name, names[id(parameter)], parameter, self._shard_of(parameter, mesh), places[id(parameter)])
            for name, parameter in module.named_parameters()
            if parameter.dim() and not excluded(parameter)
        ]
        self.release()

    def _shard_of(self, parameter: nn.Parameter, mesh: Any) -> nn.Parameter:
        from torch.distributed.tensor import DTensor, Shard

        local = self._own(parameter.detach()).clone()
        shape, stride = parameter.shape, torch.empty(parameter.shape, device="meta").stride()
        shard = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
        return nn.Parameter(shard, parameter.requires_grad)

    def _own(self, whole: Tensor) -> Tensor:
        """Return the rows of this rank; the last ranks may have fewer rows, or none."""
        rows = -(-whole.shape[0] // self._world.size)
        return whole[self._world.rank * rows : (self._world.rank + 1) * rows]

    def shards(self) -> dict[str, nn.Parameter]:
        """Return the parts of this rank by name, as DTensors; a tied parameter has several names."""
        return {name: member.shard for member in self._all for name in member.names}

    @torch.no_grad()
    def gather(self) -> None:
        """Restore whole parameters in the module; all ranks call it.

        Raises:
            ValueError: a part has a gradient hook, which would never be called.
        """
        if self.gathered:
            return
        for member in self._all:
            if number_of_hooks(member.shard):
                raise ValueError(
                    f"{member.name} has a gradient hook, which is not called for the parts of sharded weights; use "
                    "data=ddp"
                )
        for bucket in _buckets(self._all):
            parts = self._world.all_gather(torch.cat([self._padded(member) for member in bucket]))
            sizes = [self._size(member.whole) for member in bucket]
            for member, part in zip(bucket, parts.split(sizes, dim=1), strict=True):
                member.whole.data = part.reshape(-1)[: member.whole.numel()].view(member.whole.shape)
        for member in self._all:
            member.whole.requires_grad_(member.shard.requires_grad)
            _place(member, member.whole)
        self.gathered = True

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the gradients of the whole parameters over the ranks, into the gradients of the parts; all ranks call it.

        All ranks have gradients of the same parameters.
        """
        from torch.distributed.tensor import DTensor

        for bucket in _buckets([member for member in self._all if member.whole.grad is not None]):
            sizes = [self._size(member.whole) for member in bucket]
            gradients = [member.whole.grad for member in bucket if member.whole.grad is not None]
            parts = torch.cat([self._by_rank(gradient) for gradient in gradients], dim=1)
            for member, flat in zip(bucket, self._world.reduce_scatter(parts).split(sizes), strict=True):
                shard: Any = member.shard
                local = flat[: _local(shard).numel()].view(_local(shard).shape).clone()
                total = DTensor.from_local(
                    local,
                    shard.device_mesh,
                    shard.placements,
                    run_check=False,
                    shape=shard.shape,
                    stride=shard.stride(),
                )
                member.shard.grad = total if member.shard.grad is None else member.shard.grad + total
                member.whole.grad = None

    @torch.no_grad()
    def release(self, *, keep_gradients: bool = False) -> None:
        """Restore the parts in the module; changes of this rank's rows by users' code are kept.

        Args:
            keep_gradients: of the whole parameters, to which backwards after the next `gather` add theirs.
        """
        if not self.gathered:
            return
        for member in self._all:
            member.shard.requires_grad_(member.whole.requires_grad)
            _local(member.shard).copy_(self._own(member.whole.detach()))
            if not keep_gradients:
                member.whole.grad = None
            member.whole.data = member.whole.new_zeros(()).expand(member.whole.shape)
            _place(member, member.shard)
        self.gathered = False

    def replace_in(self, optimizers: Sequence[Optimizer]) -> None:
        """Let optimizers step the parts in place of the whole parameters, without states.

        Args:
            optimizers: optimizers of the whole parameters.
        """
        self._replace(optimizers, {id(member.whole): member.shard for member in self._all})

    def undo(self, optimizers: Sequence[Optimizer]) -> None:
        """Give the module and the optimizers the original parameters, whose values are lost, without states.

        Args:
            optimizers: optimizers of the module.
        """
        for member in self._all:
            member.whole.data = torch.empty(member.whole.shape, dtype=member.whole.dtype, device=member.whole.device)
            member.whole.grad = None
            _place(member, member.whole)
        self._replace(optimizers, {id(member.shard): member.whole for member in self._all})
        self._all, self.gathered = [], True

    def _replace(self, optimizers: Sequence[Optimizer], others: dict[int, nn.Parameter]) -> None:
        for optimizer in optimizers:
            optimizer.state.clear()
            for group in optimizer.param_groups:
                group["params"] = [others.get(id(parameter), parameter) for parameter in group["params"]]

    def _size(self, whole: Tensor) -> int:
        """Return the number of elements of a rank's rows, with padding."""
        return -(-whole.shape[0] // self._world.size) * (whole.numel() // max(whole.shape[0], 1))

    def _padded(self, member: _Sharded) -> Tensor:
        """Return the rows of this rank, with padding, shape [elements]."""
        local = _local(member.shard).reshape(-1)
        return F.pad(local, (0, self._size(member.whole) - local.numel()))

    def _by_rank(self, gradient: Tensor) -> Tensor:
        """Return a gradient as the rows of each rank, with padding, shape [size, ...]."""
        flat = gradient.reshape(-1)
        padding = self._world.size * self._size(gradient) - flat.numel()
        return F.pad(flat, (0, padding)).view(self._world.size, -1)


def _local(shard: Any) -> Tensor:
    local: Tensor = shard.to_local()
    return local


def _place(member: _Sharded, parameter: nn.Parameter) -> None:
    for part, name in member.places:
        setattr(part, name, parameter)


def _buckets(parameters: Sequence[_Sharded]) -> Iterator[list[_Sharded]]:
    """Yield lists of parameters of the same dtype, of at most `BUCKET_BYTES` unless a parameter is larger."""
    bucket: list[_Sharded] = []
    size = 0
    for member in parameters:
        if bucket and (size + member.whole.nbytes > BUCKET_BYTES or member.whole.dtype != bucket[0].whole.dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(member)
        size += member.whole.nbytes
    if bucket:
        yield bucket
