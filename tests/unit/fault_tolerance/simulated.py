"""Ranks as threads of a process, in a process group that can lose members at any moment, and their supervisor.

The loop, recovery, the data order and slots are the code of real processes. Collectives and the pipes to the
supervisor are simulated, so that a schedule of deaths takes a fraction of a second.
"""

from __future__ import annotations

import gc
import queue
import random
import threading
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fabricx as fx
from fabricx.core.strategy import Strategy, Traits
from fabricx.core.strategy_parts import Elastic
from fabricx.distributed.membership import generations
from fabricx.distributed.membership.generations import Membership
from fabricx.distributed.store.client import PrivateStore
from fabricx.distributed.world import World
from fabricx.fault_tolerance.controller import ElasticController, ElasticPolicy
from fabricx.trainer.run_request import Job
from fabricx.trainer.set_up import execute

TIMEOUT_S = 30.0  # for anything that has to happen


class Killed(BaseException):
    """Simulates a kill: fabricx does not catch it."""


class Dismissed(BaseException):
    """Simulates the end of a superfluous process."""


NOBODY = generations.Generation(10**6, ())  # a group without workers


def _leave() -> None:
    raise Dismissed


class Group:
    """The collectives of a generation: the n-th calls of all members form a collective."""

    def __init__(self, size: int, rng: random.Random) -> None:
        self.size, self.rng = size, rng
        self.changed = threading.Condition()
        self.broken = False
        self.values: dict[int, dict[int, Any]] = {}
        self.done = [0] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Exchange values of all members; an aborted exchange may be complete on some members."""
        with self.changed:
            number = self.done[rank]
            self.done[rank] += 1
            values = self.values.setdefault(number, {})
            values[rank] = value
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.broken or len(values) == self.size, TIMEOUT_S), (
                "a rank waits for ever"
            )
            if self.broken and (len(values) < self.size or self.rng.random() < 0.5):
                raise RuntimeError("Connection closed by peer")
            return [values[member] for member in range(self.size)]

    def break_off(self) -> None:
        with self.changed:
            self.broken = True
            self.changed.notify_all()


@dataclass
class Machine:
    """State that all ranks share.

    Attributes:
        rng: selects the workers and times of deaths.
        kills: number of workers that may still die.
        folder: for records of workers.
        store: of the run.
    """

    rng: random.Random
    kills: int
    folder: Path
    store: PrivateStore
    groups: dict[int, Group] = field(default_factory=dict)
    broken: set[int] = field(default_factory=set)
    messages: queue.Queue[tuple[int, str, Any]] = field(default_factory=queue.Queue)
    lock: threading.Lock = field(default_factory=threading.Lock)
    building: threading.Lock = field(
        default_factory=threading.Lock
    )  # of random weights: all threads draw from the same stream
    safe: Callable[[int], bool] = lambda worker: True
    often: float = 0.02
    log: list[str] = field(default_factory=list)

    def group(self, generation: int, size: int) -> Group:
        """Return the group of a generation, for a member of it."""
        with self.lock:
            group = self.groups.setdefault(generation, Group(size, self.rng))
            group.broken = group.broken or generation in self.broken
            return group

    def break_off(self, generation: int) -> None:
        """Make all present and later calls in a generation's group fail."""
        with self.lock:
            self.broken.add(generation)
            group = self.groups.get(generation)
        if group is not None:
            group.break_off()

    def point(self, where: str) -> None:
        """Kill the calling worker, if the schedule demands it."""
        worker = generations.membership().worker
        with self.lock:
            if not self.kills or self.rng.random() >= self.often or not self.safe(worker):
                return
            self.kills -= 1
            self.log.append(f"worker {worker} dies {where}")
        raise Killed


@dataclass(frozen=True)
class Threads(World):
    """A world of ranks that are threads."""

    machine: Any = None

    def _exchange(self, value: Any, kind: str) -> list[Any]:
        if self.newcomer:
            return [value]
        self.machine.point(f"before {kind}")
        values: list[Any] = self.machine.group(self.generation, self.size).exchange(self.rank, value)
        self.machine.point(f"after {kind}")
        return values

    def follow(self) -> None:
        generations.membership().joined = self.generation  # type: ignore[attr-defined]
        self._exchange(None, "joining")

    def barrier(self) -> None:  # without deaths: after the last barrier no rank would detect them
        if not self.newcomer:
            self.machine.group(self.generation, self.size).exchange(self.rank, None)

    def all_reduce(self, tensor: Tensor, op: Any = "sum") -> Tensor:
        stacked = torch.stack(self._exchange(tensor.detach().clone(), "a reduction"))
        kinds: dict[str, Callable[[Tensor], Tensor]] = {
            "sum": lambda parts: parts.sum(0), "max": lambda parts: parts.amax(0), "min": lambda parts: parts.amin(0)
        }  # fmt: skip
        tensor.detach().copy_(kinds[op](stacked))
        return tensor

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        tensor.detach().copy_(self._exchange(tensor.detach().clone(), "a broadcast")[src])
        return tensor

    def all_gather(self, tensor: Tensor, sync_grads: bool = False) -> Tensor:
        return torch.stack(self._exchange(tensor.detach().clone(), "a gathering"))

    def gather_objects(self, obj: Any) -> list[Any]:
        return self._exchange(obj, "a gathering")

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        return self._exchange(obj, "a broadcast")[src]


class Summed(Strategy, Elastic):
    """The guarantees of ddp, by a reduction after each backward."""

    traits = Traits(elastic=True)

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        self._sum()

    def backward_without_data(self, example: tuple[Any, ...] = ()) -> bool:
        self._sum()
        return True

    def _sum(self) -> None:
        if not self.ends_window:
            return
        assert self.module is not None
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        flat = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).reshape(-1) for p in parameters])
        self.world.all_reduce(flat)
        for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter).clone()

    def world_changed(self, world: World) -> None:
        self.world = world


class _ByThread(threading.local):
    """The state of `generations`, per thread instead of per process."""

    def __init__(self) -> None:
        self.own = Membership()

    def __getitem__(self, index: int) -> Membership:
        return self.own


class Simulation:
    """Trains with several threads while some of them die; performs the tasks of the supervisor.

    Args:
        machine: state that the ranks share.
        make: a trainer, a module, and loaders to train and to validate on, for each worker.
        size: number of workers.
        waits: seconds for which survivors wait for a replacement.
    """

    def __init__(
        self, machine: Machine, make: Callable[[Machine], tuple[fx.Trainer, fx.Module, Any]], size: int, waits: float
    ) -> None:
        self.machine, self.make, self.size = machine, make, size
        self.failures: list[str] = []
        self.dying: set[int] = set()  # including workers whose death is not reported yet
        self.changes = ElasticController(ElasticPolicy(waits=waits, tries=100), size, self.failures)
        self.members: dict[int, Membership] = {}
        self.results: dict[int, Any] = {}
        self.threads: dict[int, threading.Thread] = {}
        machine.safe = self._safe

    def _safe(self, worker: int) -> bool:
        """Return whether a second worker has the state of the run, so that a worker may die."""
        left = set(self.changes.workers) - self.dying
        holding = self.changes._holding & left
        if not holding - {worker} or not self.changes._inside >= left or self.changes._ended:
            return False
        self.dying.add(worker)
        return True

    def run(self) -> list[Any]:
        """Train, and return the results of the members at the end, by rank."""
        for worker in range(self.size):
            self._start(worker, worker, newcomer=False)
        while not (self.changes.workers and all(worker in self.results for worker in self.changes.workers)):
            try:
                worker, kind, content = self.machine.messages.get(timeout=min(TIMEOUT_S, self.changes.due()))
            except queue.Empty:
                worker, kind, content = -1, "", None
                assert any(thread.is_alive() for thread in self.threads.values()), "all workers are gone"
            self._take(worker, kind, content)
            while (seat := self.changes.wanted()) is not None:
                worker = len(self.threads)
                self.changes.started(worker)
                self._start(worker, seat, newcomer=True)
            for workers, message, content in self.changes.messages():
                self._tell(workers, message, content)
        for worker, thread in self.threads.items():
            self._send_away(worker)  # it has joined too late
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), f"worker {worker} doesn't end"
        gc.collect()
        return [self.results[worker] for worker in self.changes.workers]

    def _take(self, worker: int, kind: str, content: Any) -> None:
        if kind == "result":
            self.results[worker] = content
        elif kind == "failed":
            raise AssertionError(f"worker {worker} failed:\n{content}")
        elif kind == "dead":
            self.machine.break_off(self.members[worker].joined)  # type: ignore[attr-defined]  # its sockets close
            assert self.changes.died(worker, "killed"), "the others can't go on"
        elif kind:
            self.changes.receive(worker, kind, content)

    def _send_away(self, worker: int) -> None:
        """End a worker in any wait; a real process would end immediately."""
        member: Any = self.members[worker]
        member.on_message("generation", NOBODY)
        member.on_message("broken", NOBODY.number - 1)
        self.machine.break_off(member.joined)

    def _tell(self, workers: Iterable[int], kind: str, content: Any) -> None:
        for worker in workers:
            member: Any = self.members[worker]
            if kind == "leave":
                self._send_away(worker)
            else:
                member.on_message(kind, content)
            if kind == "broken" and member.joined <= content:  # the thread that receives this message shuts the links
                self.machine.break_off(member.joined)

    def _start(self, worker: int, seat: int, *, newcomer: bool) -> None:
        thread = threading.Thread(
            target=self._work, args=(worker, seat, newcomer), name=f"worker-{worker}", daemon=True
        )
        self.threads[worker] = thread
        member = self.members[worker] = Membership(
            worker, str(self.machine.folder), lambda kind, content: self.machine.messages.put((worker, kind, content)),
            leave=_leave,
        )  # fmt: skip
        member.shut = lambda: self.machine.break_off(member.joined)  # type: ignore[method-assign, attr-defined]
        member.joined = 0  # type: ignore[attr-defined]  # the generation of its connections
        thread.start()

    def _work(self, worker: int, seat: int, newcomer: bool) -> None:
        generations._CURRENT.own = self.members[worker]  # type: ignore[attr-defined]
        store = self.machine.store
        world = Threads(
            rank=worker, size=1 if newcomer else self.size, local_rank=seat, local_size=self.size, store=store,
            newcomer=newcomer, machine=self.machine,
        )  # fmt: skip
        try:
            with self.machine.building:
                trainer, module, loaders = self.make(self.machine)
            execute(trainer, Job("fit", module, *loaders, None, None), replace(world))
            self.machine.messages.put((worker, "result", (trainer, module)))
        except Dismissed:
            pass
        except Killed:
            self.machine.messages.put((worker, "dead", None))
        except BaseException:
            self.machine.messages.put((worker, "failed", traceback.format_exc()))
        finally:
            vars(trainer.session.fault_tolerance)["slot"] = None  # the memory of an ended process


def install(monkeypatch: Any) -> None:
    """Use threads as workers during a test."""
    monkeypatch.setattr(generations, "_CURRENT", _ByThread())
    monkeypatch.setattr("fabricx.trainer.set_up.next_job", lambda: 0)
