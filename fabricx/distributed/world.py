"""A rank's place among the ranks that train together, and their basic collectives."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Concatenate, Final, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fabricx.distributed import authentication, autograd_collectives, heartbeat, peers
from fabricx.distributed.generations import gone, membership

P = ParamSpec("P")
R = TypeVar("R")
_CPU = torch.device("cpu")
WAITED_S: Final = [0.0]  # seconds that this process has spent in the collectives here, which are mostly waiting
_LEFT: list[Any] = []  # process groups of generations before, which strategies may still refer to
_CURRENT: list[World] = []  # the world that this process has joined, if any
MEET: Final = timedelta(seconds=4)  # how long members of a later generation may take to find each other
CONFIRM: Final = timedelta(seconds=20)  # how long they may take to compare their connections then
OPERATION: Final = timedelta(minutes=30)  # how long a collective may take
KEYLESS: Final = (
    "\n  without a key, processes on several machines exchange plain data and tensors only, as anything else could "
    "run code: umask 077; openssl rand -hex 32 > key; then set FABRICX_KEY_FILE=key (a path) for all processes "
    "(docs/security.md)"
)
DEPARTURE_S: Final = 60.0  # ranks have all done the same collectives: they differ by moments, and by users' hooks


def _counted(method: Callable[Concatenate[World, P], R]) -> Callable[Concatenate[World, P], R]:
    """Count the time that a collective takes; an error of one that was aborted is that somebody is gone."""

    @functools.wraps(method)
    def counted(world: World, /, *arguments: P.args, **options: P.kwargs) -> R:
        began = time.monotonic()
        try:
            found = method(world, *arguments, **options)
        except Exception:
            world.settle()  # what has come may be anything, and so may the error be
            raise
        else:
            world.settle()
            return found
        finally:
            WAITED_S[0] += time.monotonic() - began

    return counted


@dataclass(frozen=True)
class World:
    """One rank's view of all ranks.

    Every process group belongs to a generation: it is built over a store prefixed with its number, so that nothing of
    an earlier one can be mistaken for it. A world of one rank needs no group; everything works and costs nothing.

    Attributes:
        rank, size: which process of how many.
        local_rank, local_size: which process of how many on this machine.
        node_rank: which machine.
        generation: number of this membership, counted from 0.
        job: number of the run in this world; keys in the store carry it.
        store: where ranks find each other, hosted by none of them; its threads never wait for each other.
        secret: key of this run, under which its processes sign what they send each other; b"" where the launcher of
            several machines gave none.
        device: what this rank works on.
        backend: torch's library for collectives.
        newcomer: others train already, and this rank isn't in their group yet: its rank is its number among all that
            ever were, its size 1, and its local size that of the group to be.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    generation: int = 0
    job: int = 0
    store: dist.Store | None = None
    secret: bytes = field(default=b"", repr=False)
    device: torch.device = _CPU
    backend: str = "gloo"
    newcomer: bool = False

    @property
    def main_rank(self) -> bool:
        """Return whether this is the rank that writes files and speaks to people."""
        return self.rank == 0

    @property
    def silent(self) -> bool:
        """Return whether collectives that were aborted end without an error, and with any result; NCCL's do."""
        return "nccl" in self.backend

    def settle(self) -> None:
        """Wait until this rank's device has done all that it was given to do, where none of that can be trusted else.

        Raises:
            Broken: somebody has left the group, so that collectives may have been aborted meanwhile.
        """
        own = membership()
        if not (self.silent and own.changes):
            return
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        own.stay(self.generation)

    def join(self, timeout: timedelta = OPERATION) -> None:
        """Build the process group of this generation, and wait until all its members have."""
        assert self.store is not None
        own = membership()
        if own.changes:
            own.building(self.generation, self.store, silent=self.silent)
        if own.changes and self.silent:
            # Else torch ends the process when an operation fails, while the others can still go on without its peer.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
            os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
        before = self._checked_ports()
        with own.opening():
            dist.init_process_group(
                self.backend,
                store=dist.PrefixStore(f"gen{self.generation}", self.store),
                rank=self.rank,
                world_size=self.size,
                timeout=timeout,
            )
        self._confirm("all", range(self.size), before, timeout)
        _CURRENT[:] = [self]
        heartbeat.joined()

    def _checked_ports(self) -> set[int]:
        """Return where this process listens already, before a group is built."""
        if self.size == 1 or self.silent:
            return set()
        peers.check_eager()
        return peers.ports()

    def _confirm(self, name: str, ranks: Sequence[int], before: set[int], timeout: timedelta) -> None:
        """Check that a group that was just built has connections of its ranks only; all of them call it."""
        if len(ranks) == 1 or not self.secret or self.silent:
            return
        assert self.store is not None
        links = dist.PrefixStore(f"links{self.generation}/{name}", self.store)
        limit = max(timeout, CONFIRM)
        peers.confirm(links, ranks.index(self.rank), len(ranks), peers.ports() - before, limit, self._stay)

    def _stay(self) -> None:
        membership().check(self.generation)

    def follow(self) -> None:
        """Leave the group of the generation before, if any, and join this one; all its members do.

        Raises:
            RuntimeError: one of them didn't come.
        """
        self.leave_groups()
        # A peer that dies meanwhile is waited for; gloo takes five times as long as it is told.
        self.join(MEET)
        dist.distributed_c10d._set_pg_timeout(OPERATION)  # type: ignore[attr-defined]

    @staticmethod
    def leave_groups() -> None:
        """Leave all process groups, if any; `forget_left` is to follow."""
        if dist.is_initialized():
            _LEFT.extend(dist.distributed_c10d._world.pg_map)
            dist.destroy_process_group()

    @staticmethod
    def forget_left() -> None:
        """Wait until groups that were left have ended; nothing of their operations can change a tensor after that.

        The end of an operation may take the interpreter's lock. What a strategy has built on a group (DDP's reducer)
        would wait for it with that lock held, and nothing would go on in this process; Python's own reference, which is
        the last one here, gives the lock back first.
        """
        _LEFT.clear()

    def group_of_mine(self, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """Build a group for each of several parts of the ranks, on all ranks; returns the one that this rank is in.

        Raises:
            RuntimeError: a rank didn't come.
            AuthenticationError: another program has connected in the place of one.
        """
        found: list[Any] = []
        before, timeout = self._checked_ports(), MEET if self.generation else OPERATION
        with membership().opening():
            for ranks in parts:
                group = dist.new_group(list(ranks), timeout=timeout)
                if self.rank in ranks:
                    found.append((ranks, group))
        own, group = found[0]
        if self.store is not None:
            number = self.store.add(f"groups/{self.generation}/{self.rank}", 1)  # each rank builds the same ones
            self._confirm(f"{number}/{'-'.join(map(str, own))}", own, before, timeout)
        mine: dist.ProcessGroup = group
        dist.distributed_c10d._set_pg_timeout(OPERATION, mine)  # type: ignore[attr-defined]
        return mine

    def key(self, name: str) -> str:
        """Return a key of the store that belongs to this run."""
        return f"job{self.job}/{name}"

    @_counted
    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()

    def await_departure(self, timeout_s: float = DEPARTURE_S) -> None:
        """Wait until all ranks have finished their last collective; called by each rank after its own.

        A rank that has its result closes its connections, and what another rank has not yet read from them can be lost
        (a reset of the connection drops received data). So ranks report in the store, which is no rank's, and leave
        when all have. One that dies meanwhile isn't waited for where a supervisor sees that; else torchrun ends this
        process, or `timeout_s` the wait.
        """
        if self.size == 1 or self.store is None:
            return
        own, name = membership(), f"departure/{self.generation}"
        store, deadline = self.store, time.monotonic() + timeout_s
        left = dict(enumerate(own.members(self.generation, self.size)))
        with contextlib.suppress(OSError, dist.DistError):  # who hosts the store has gone: nobody can be waited for
            store.set(self.key(f"{name}/{self.rank}"), "done")
            while left and time.monotonic() < deadline and not own.outdated(self.generation):
                for rank, worker in list(left.items()):
                    if store.check([self.key(f"{name}/{rank}")]) or store.check([gone(worker)]):
                        del left[rank]
                time.sleep(0.001 if left else 0.0)

    @_counted
    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
        """Join a tensor of all ranks, in place; shape stays."""
        if self.size > 1:
            kinds = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
            dist.all_reduce(tensor, kinds[op])
        return tensor

    def join_moments(self, optimizer: Optimizer) -> None:
        """Give all ranks the mean of what their optimizers remember, where each has stepped by itself.

        A rank that has not stepped yet remembers nothing, and takes over what the others do.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        joined = {
            (number, name): value
            for number, parameter in enumerate(parameters)
            for name, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim()
        }
        rest = {
            (number, name): value
            for number, parameter in enumerate(parameters)
            for name, value in optimizer.state.get(parameter, {}).items()
            if (number, name) not in joined
        }
        told = self.gather_objects(({key: (v.shape, v.dtype) for key, v in joined.items()}, rest))
        for number, name in sorted(set().union(*(rests for _, rests in told)) - rest.keys()):
            found = next(rests[number, name] for _, rests in told if (number, name) in rests)
            optimizer.state[parameters[number]][name] = found
        kinds = {key: kind for moments, _ in told for key, kind in moments.items()}
        for key in sorted(kinds):
            shape, dtype = kinds[key]
            own = joined.get(key)
            if own is None:
                own = torch.zeros(shape, dtype=dtype, device=parameters[key[0]].device)
                optimizer.state[parameters[key[0]]][key[1]] = own
            self.all_reduce(own).div_(sum(key in moments for moments, _ in told))

    @_counted
    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Take over the tensor of one rank, in place."""
        if self.size > 1:
            raw = tensor.detach().contiguous()
            dist.broadcast(raw.view(torch.uint8) if raw.dtype is torch.bool else raw, src)  # gloo knows no bool
            if raw.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(raw)
        return tensor

    @_counted
    def shift(self, sent: Tensor, received: Tensor, by: int) -> None:
        """Send a tensor to the rank that is so many places further, and receive the one from as far before.

        Either may be empty, on both of its ends; `by` isn't a multiple of the number of ranks.
        """
        room = torch.empty_like(received, device=self.device) if self.device.type != "cpu" else received
        operations = []
        if sent.numel():
            operations.append(dist.P2POp(dist.isend, sent.to(self.device), (self.rank + by) % self.size))
        if room.numel():
            operations.append(dist.P2POp(dist.irecv, room, (self.rank - by) % self.size))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        if room is not received:
            received.copy_(room)

    @_counted
    def all_gather(self, tensor: Tensor, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all ranks, shape [size, ...]; with `sync_grads`, gradients flow back."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        if sync_grads:
            return autograd_collectives.gather(tensor)
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.stack(parts)

    @_counted
    def gather_objects(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks, by rank, on every rank.

        Raises:
            TypeError: on every rank: the object of one can't be sent; without a key on several machines only plain data
                and tensors can, and those arrive in main memory.
            AuthenticationError: a message does not come from a process of this run.
            ValueError: there is no key, and a message is not plain data; nothing in it was executed.
        """
        if self.size == 1:
            return [obj]
        message, _ = self._packed("gather", obj)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._wire) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([message.numel()], device=self._wire))
        lengths = [int(size) for size in sizes]
        room = torch.zeros(max(lengths), dtype=torch.uint8, device=self._wire)
        room[: message.numel()] = message
        parts = [torch.empty_like(room) for _ in lengths]
        dist.all_gather(parts, room)
        return [
            self._unpacked("gather", rank, part[:length])
            for rank, (part, length) in enumerate(zip(parts, lengths, strict=True))
        ]

    @_counted
    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Return the object of one rank, on every rank; errors are those of `gather_objects`."""
        if self.size == 1:
            return obj
        sends = self.rank == src
        message, refused = self._packed("broadcast", obj) if sends else (None, "")
        size = torch.tensor([0 if message is None else message.numel()], device=self._wire)
        dist.broadcast(size, src)
        if message is None:
            message = torch.empty(int(size), dtype=torch.uint8, device=self._wire)
        dist.broadcast(message, src)
        if refused:
            raise TypeError(refused)
        return obj if sends else self._unpacked("broadcast", src, message)

    @property
    def _wire(self) -> torch.device:
        """Return the device whose tensors the default group exchanges."""
        return self.device if self.silent else _CPU

    def _packed(self, kind: str, obj: Any) -> tuple[Tensor, str]:
        """Return an object of this rank as signed bytes: an address in a store or a port may be another program's.

        Where it can't be sent, the bytes are the reason, which all ranks raise, and the reason is returned as well.
        """
        context, refused = [kind, self.generation, self.rank], ""
        try:
            signed = authentication.dumps(self.secret, context, ("", obj))
        except Exception as error:
            refused = f"an object of rank {self.rank} can't be sent to other ranks: {error}" + (
                "" if self.secret else KEYLESS
            )
            signed = authentication.dumps(self.secret, context, (refused, None))
        return torch.frombuffer(bytearray(signed), dtype=torch.uint8).to(self._wire), refused

    def _unpacked(self, kind: str, rank: int, message: Tensor) -> Any:
        """Return the object that a rank has packed."""
        signed = message.cpu().numpy().tobytes()
        refused, obj = authentication.loads(self.secret, [kind, self.generation, rank], signed)
        if refused:
            raise TypeError(refused)
        return obj


def current() -> World | None:
    """Return the world that this process has joined, or None."""
    return _CURRENT[0] if _CURRENT else None


def leave() -> None:
    """Leave the world that this process has joined, if any."""
    if _CURRENT:
        _CURRENT.clear()
        dist.destroy_process_group()
