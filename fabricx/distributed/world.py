"""Process groups of this rank among all ranks, and its basic collectives."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Concatenate, Final, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fabricx.distributed import autograd_collectives
from fabricx.distributed.activity import heartbeat
from fabricx.distributed.membership import lost_operations, process_groups
from fabricx.distributed.membership.generations import membership
from fabricx.distributed.membership.lost_peers import raise_peer_lost
from fabricx.distributed.messages import object_messages, peers
from fabricx.distributed.messages.tensor_bytes import as_bytes
from fabricx.distributed.place import Place

P = ParamSpec("P")
R = TypeVar("R")
_CPU = torch.device("cpu")
WAITED_S: Final = [0.0]  # seconds that this process has spent in the collectives of World, mostly waiting
_CURRENT: list[World] = []  # the world that this process has joined, if any
_SUBGROUPS: dict[tuple[Any, ...], Any] = {}  # groups along the axes of the present generation, by their ranks
MEET: Final = timedelta(seconds=4)  # time for members of a later generation to connect
CONFIRM: Final = timedelta(seconds=20)  # minimum time for ranks to compare their connections afterwards
OPERATION: Final = timedelta(minutes=30)  # timeout of a collective


def _counted(method: Callable[Concatenate[World, P], R]) -> Callable[Concatenate[World, P], R]:
    """Add a collective's duration to `WAITED_S`; raise `PeerLost` if a peer was lost or the group was aborted."""

    @functools.wraps(method)
    def counted(world: World, /, *arguments: P.args, **options: P.kwargs) -> R:
        began = time.monotonic()
        try:
            output = method(world, *arguments, **options)
        except Exception as error:
            world.settle()  # after an abort, both the data and the error are meaningless
            raise_peer_lost(error, f"rank {world.rank} of {world.size}, {method.__name__}")
            raise
        else:
            world.settle()
            return output
        finally:
            WAITED_S[0] += time.monotonic() - began

    return counted


@dataclass(frozen=True)
class World(Place):
    """This rank among all ranks, with basic collectives.

    Every process group belongs to a generation: its store keys are prefixed with the generation's number, so that
    messages of an earlier generation are never mistaken for its own. A world with a single rank builds no group, and
    its collectives cost nothing.

    Attributes:
        generation: number of this membership, counted from 0.
        store: rendezvous store, hosted outside the ranks; its threads never wait for each other.
        secret: key of this run, with which its processes sign their messages; b"" if the launcher of several machines
            has set none.
        device: device of this rank.
        backend: backend of torch.distributed.
        device_number: number of the device among those of the run; None if it is `local_rank`.
    """

    generation: int = 0
    store: dist.Store | None = None
    secret: bytes = field(default=b"", repr=False)
    device: torch.device = _CPU
    backend: str = "gloo"
    device_number: int | None = None

    @property
    def silent(self) -> bool:
        """Return whether aborted collectives end without an error and with undefined data, as with NCCL."""
        return "nccl" in self.backend

    def settle(self) -> None:
        """Synchronise the device and check that the group is intact, if aborted collectives are silent.

        Raises:
            PeerLost: a rank has left the group, so that collectives may have been aborted.
        """
        member = membership()
        if not (self.silent and member.changes):
            return
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        member.stay(self.generation)

    def join(self, timeout: timedelta = OPERATION) -> None:
        """Build the process group of this generation; returns when all members have joined.

        Args:
            timeout: timeout of the rendezvous and, until changed, of collectives.
        """
        assert self.store is not None
        member = membership()
        if member.changes:
            member.building(self.generation, self.store, silent=self.silent)
        if member.changes and self.silent:
            process_groups.survive_failed_operations()
        before = self._checked_ports()
        store = dist.PrefixStore(f"gen{self.generation}", self.store)
        process_groups.open_main(self.backend, store, self.rank, self.size, timeout)
        self._confirm("all", range(self.size), before, timeout)
        _SUBGROUPS.clear()
        _CURRENT[:] = [self]
        heartbeat.joined()

    def _checked_ports(self) -> set[int]:
        """Return the ports at which this process listens before a group is built."""
        if self.size == 1 or self.silent:
            return set()
        peers.check_eager()
        return peers.ports()

    def _confirm(self, name: str, ranks: Sequence[int], before: set[int], timeout: timedelta) -> None:
        """Check that a new group has connections of its ranks only; all ranks of the group call it."""
        if len(ranks) == 1 or not self.secret or self.silent:
            return
        assert self.store is not None
        links = dist.PrefixStore(f"links{self.generation}/{name}", self.store)
        limit = max(timeout, CONFIRM)
        peers.confirm(links, ranks.index(self.rank), len(ranks), peers.ports() - before, limit, self._stay)

    def _stay(self) -> None:
        membership().check(self.generation)

    def follow(self) -> None:
        """Leave the group of the previous generation, if any, and join this generation; all its members call it.

        Raises:
            RuntimeError: a member did not join within the timeout.
        """
        self.leave_groups()
        os.environ.update(self.variables)
        # Short timeout: a peer that dies meanwhile is waited for, and gloo waits five times the timeout.
        self.join(MEET)
        process_groups.set_timeout(OPERATION)

    @staticmethod
    def leave_groups() -> None:
        """Destroy all process groups, if any; call `release_left_groups` afterwards."""
        _SUBGROUPS.clear()
        process_groups.destroy_all()

    @staticmethod
    def release_left_groups() -> None:
        """Wait until destroyed groups have ended; afterwards none of their operations can write to a tensor."""
        process_groups.release_destroyed()

    def new_subgroup(self, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """Build a process group for each part of the ranks and return the group of this rank; all ranks call it.

        Args:
            parts: the ranks of each group; every rank is in exactly one part.

        Raises:
            RuntimeError: a rank did not join within the timeout.
            AuthenticationError: a foreign program has connected in place of a rank.
        """
        before, timeout = self._checked_ports(), MEET if self.generation else OPERATION
        members, group = process_groups.open_parts(parts, self.rank, timeout)
        if self.store is not None:
            number = self.store.add(f"groups/{self.generation}/{self.rank}", 1)  # the same on all ranks
            self._confirm(f"{number}/{'-'.join(map(str, members))}", members, before, timeout)
        process_groups.set_timeout(OPERATION, group)
        return group

    def along(self, name: str, parts: Sequence[Sequence[int]]) -> World:
        """Return this rank among the ranks along an axis; all ranks call it. The group remains for later runs.

        Args:
            name: name of the axis.
            parts: ranks of each group along the axis, in their order; every rank is in exactly one part.
        """
        number, ranks = next((n, list(part)) for n, part in enumerate(parts) if self.rank in part)
        group = None
        if 1 < len(ranks) < self.size:
            key = (self.generation, tuple(map(tuple, parts)))
            if key not in _SUBGROUPS:
                _SUBGROUPS[key] = self.new_subgroup(parts)
            group = _SUBGROUPS[key]
        coordinate = f"{self.coordinate}{name} {number}/"
        return replace(
            self, rank=ranks.index(self.rank), size=len(ranks), group=group, coordinate=coordinate, axes={}
        )  # fmt: skip

    @_counted
    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            self._wait(dist.barrier(self.group, async_op=True))

    @_counted
    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
        """Reduce a tensor over all ranks, in place.

        Args:
            tensor: same shape on all ranks.
            op: "sum", "max" or "min".
        """
        if self.size > 1:
            kinds = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
            self._wait(dist.all_reduce(tensor, kinds[op], self.group, async_op=True))
        return tensor

    @_counted
    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Copy the tensor of one rank to all ranks, in place.

        Args:
            tensor: same shape and dtype on all ranks.
            src: source rank.
        """
        if self.size > 1:
            raw = as_bytes(tensor)
            self._wait(dist.broadcast(raw, group=self.group, async_op=True, group_src=src))
            if raw.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(raw.view(tensor.dtype).reshape(tensor.shape))
        return tensor

    @_counted
    def shift(self, sent: Tensor, received: Tensor, by: int) -> None:
        """Send a tensor to rank `rank + by` and receive a tensor from rank `rank - by`, modulo the world size.

        Args:
            sent: tensor to send; if it is empty, the receiver's `received` must be empty, too.
            received: written in place.
            by: distance in ranks; not a multiple of the world size.
        """
        room = torch.empty_like(received, device=self.device) if self.device.type != "cpu" else received
        _end(self._shifted(sent.to(self.device), room, by))
        if room is not received:
            received.copy_(room)

    @_counted
    def begin_shift(self, sent: Tensor, received: Tensor, by: int) -> list[Any]:
        """Begin what `shift` does; neither tensor may be used before `end_shift`.

        Args:
            sent: contiguous tensor on the device of this rank.
            received: contiguous tensor on the device of this rank, written in place.
            by: distance in ranks; not a multiple of the world size.

        Returns:
            handles of torch, for `end_shift`.
        """
        return self._shifted(sent, received, by)

    @_counted
    def end_shift(self, works: Iterable[Any]) -> None:
        """Wait until the tensors of a `begin_shift` were sent and received.

        Args:
            works: result of `begin_shift`.
        """
        _end(works)

    def _shifted(self, sent: Tensor, received: Tensor, by: int) -> list[Any]:
        operations = []
        if sent.numel():
            operations.append(self._transfer(dist.isend, sent, by))
        if received.numel():
            operations.append(self._transfer(dist.irecv, received, -by))
        return list(dist.batch_isend_irecv(operations)) if operations else []

    def _transfer(self, operation: Any, tensor: Tensor, by: int) -> dist.P2POp:
        return dist.P2POp(operation, tensor, group=self.group, group_peer=(self.rank + by) % self.size)

    @_counted
    def all_gather(self, tensor: Tensor, sync_grads: bool = False) -> Tensor:
        """Gather the tensors of all ranks.

        Args:
            tensor: same shape on all ranks.
            sync_grads: make the operation differentiable.

        Returns:
            Tensor of shape [size, ...].
        """
        if self.size == 1:
            return tensor.unsqueeze(0)
        if sync_grads:
            return autograd_collectives.gather(tensor, self.group)
        gathered = tensor.new_empty((self.size, *tensor.shape))
        parts = [as_bytes(part) for part in gathered]
        self._wait(dist.all_gather(parts, as_bytes(tensor), self.group, async_op=True))
        return gathered

    @_counted
    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """Sum a tensor over all ranks, and return this rank's part of the sum.

        Args:
            parts: a part for each rank, shape [size, ...], contiguous.

        Returns:
            Tensor of shape [...].
        """
        if self.size == 1:
            return parts[0]
        flat = parts.reshape(-1)  # as gloo needs it
        part = flat.new_empty(flat.numel() // self.size)
        # torch 2.13 has a new name for it, and warns about the old one.
        scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        self._wait(scatter(part, flat, group=self.group, async_op=True))
        return part.view(parts.shape[1:])

    @_counted
    def gather_objects(self, obj: Any) -> list[Any]:
        """Gather the objects of all ranks on every rank, by rank.

        Args:
            obj: anything that can be pickled; without a key on several machines, plain data and tensors only, which
                arrive on the CPU.

        Raises:
            TypeError: on every rank: the object of one rank can't be sent.
            AuthenticationError: a message was not sent by a process of this run.
            ValueError: there is no key, and a message is not plain data; it was not executed.
        """
        if self.size == 1:
            return [obj]
        message, _ = self._packed("gather", obj)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._wire) for _ in range(self.size)]
        self._wait(
            dist.all_gather(sizes, torch.tensor([message.numel()], device=self._wire), self.group, async_op=True)
        )
        lengths = [int(length) for length in sizes]
        room = torch.zeros(max(lengths), dtype=torch.uint8, device=self._wire)
        room[: message.numel()] = message
        parts = [torch.empty_like(room) for _ in lengths]
        self._wait(dist.all_gather(parts, room, self.group, async_op=True))
        return [
            self._unpacked("gather", rank, part[:length])
            for rank, (part, length) in enumerate(zip(parts, lengths, strict=True))
        ]

    @_counted
    def gather_objects_on_main(self, obj: Any) -> list[Any]:
        """Gather the objects of all ranks on the main rank only, by rank; other ranks return an empty list.

        Args:
            obj: see `gather_objects`.

        Raises:
            TypeError: on every rank: the object of one rank can't be sent.
            AuthenticationError, ValueError: as in `gather_objects`, on the main rank.
        """
        if self.size == 1:
            return [obj]
        message, refused = self._packed("gather", obj)
        sizes = torch.zeros(self.size, dtype=torch.int64, device=self._wire)  # negative: an object can't be sent
        sizes[self.rank] = -message.numel() if refused else message.numel()
        self._wait(dist.all_reduce(sizes, group=self.group, async_op=True))
        lengths = sizes.abs().tolist()
        room = torch.zeros(max(lengths), dtype=torch.uint8, device=self._wire)
        room[: message.numel()] = message
        parts = [torch.empty_like(room) for _ in range(self.size)] if self.main_rank else None
        self._wait(dist.gather(room, parts, group=self.group, async_op=True, group_dst=0))
        if parts is None and bool((sizes < 0).any()):
            raise TypeError(refused or f"an object of rank {int((sizes < 0).nonzero()[0])} can't be sent to rank 0")
        return [
            self._unpacked("gather", rank, part[:length])
            for rank, (part, length) in enumerate(zip(parts or (), lengths, strict=parts is not None))
        ]

    @_counted
    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Send the object of one rank to all ranks.

        Args:
            obj: used on the source rank only.
            src: source rank.

        Raises:
            TypeError, ValueError: as in `gather_objects`.
        """
        if self.size == 1:
            return obj
        sends = self.rank == src
        message, refused = self._packed("broadcast", obj) if sends else (None, "")
        size = torch.tensor([0 if message is None else message.numel()], device=self._wire)
        self._wait(dist.broadcast(size, group=self.group, async_op=True, group_src=src))
        if message is None:
            message = torch.empty(int(size), dtype=torch.uint8, device=self._wire)
        self._wait(dist.broadcast(message, group=self.group, async_op=True, group_src=src))
        if refused:
            raise TypeError(refused)
        return obj if sends else self._unpacked("broadcast", src, message)

    def _wait(self, work: Any) -> None:
        """Wait for a collective."""
        if self.silent or not membership().changes:
            work.wait()
        else:
            lost_operations.wait(work, self.group or dist.group.WORLD, self.generation)

    @property
    def _wire(self) -> torch.device:
        """Return the device of tensors that the default group exchanges."""
        return self.device if self.silent else _CPU

    def _packed(self, kind: str, obj: Any) -> tuple[Tensor, str]:
        message, refused = object_messages.pack(self.secret, [kind, self.generation, self.rank], obj)
        return message.to(self._wire), refused

    def _unpacked(self, kind: str, rank: int, message: Tensor) -> Any:
        return object_messages.unpack(self.secret, [kind, self.generation, rank], message.cpu())


def _end(works: Iterable[Any]) -> None:
    heartbeat.waits_for("a shift along the ranks")
    try:
        for work in works:
            work.wait()
    finally:
        heartbeat.waits_for("")


def current() -> World | None:
    """Return the world that this process has joined, or None."""
    return _CURRENT[0] if _CURRENT else None


def leave() -> None:
    """Leave the world that this process has joined, if any."""
    if _CURRENT:
        _CURRENT.clear()
        _SUBGROUPS.clear()
        dist.destroy_process_group()
