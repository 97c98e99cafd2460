"""Simulation of workers and a parameter server without processes, with a virtual clock and a deterministic order."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import Tensor

from fabricx.parameter_server.server.server import Server
from fabricx.parameter_server.wire.messages import LeaseReply, OpenSection, Pull, Push, Reply, RequestLease, ServerInit

Gradient = Callable[[int, Tensor], Tensor]  # (lease, flat weights) -> flat gradient
Duration = Callable[[int, int], float]  # (worker, lease) -> virtual seconds of the gradient's computation


@final
class SimulatedWorker:
    """Worker of the simulation: acquires a lease, pulls weights, computes a gradient and pushes it.

    Args:
        number: number of the worker.
        section: section of the data to train.
        size: number of weights.
        gradient: computes a gradient.
        duration: duration of a gradient's computation.
    """

    def __init__(self, number: int, section: int, size: int, gradient: Gradient, duration: Duration) -> None:
        self.number = number
        self.message: Any = RequestLease(section, True)  # the pending request
        self.inbox, self.outbox = torch.zeros(size), torch.zeros(size)  # named from the server's view
        self.trained: list[int] = []
        self._section = section
        self._gradient, self._duration = gradient, duration
        self._granted = LeaseReply(None)

    def answered(self, answer: Any) -> float | None:
        """Process an answer of the server.

        Args:
            answer: answer to `message`.

        Returns:
            virtual seconds until the next message, or None if no message follows.
        """
        lease = self._granted.lease
        if isinstance(answer, LeaseReply):
            self._granted = answer
            self.message = Pull(to_train=True, rows={})
            return None if answer.lease is None else 0.0
        if isinstance(answer, Reply):
            assert lease is not None
            self.inbox.copy_(self._gradient(lease, self.outbox))
            self.message = Push(self._granted.clock, self._granted.parts, (lease,), share=1 / self._granted.parts)
            return self._duration(self.number, lease)
        assert lease is not None
        self.trained.append(lease)
        self.message = RequestLease(self._section, True)
        return 0.0


def simulate(
    begin: ServerInit, leases: int, gradient: Gradient, duration: Duration = lambda worker, lease: 1.0,
    deaths: Iterable[tuple[float, int]] = (), server: Server | None = None,
) -> tuple[Server, list[SimulatedWorker], float]:  # fmt: skip
    """Train a section of the data.

    Args:
        begin: initial message to the server.
        leases: number of parts of the data.
        gradient: computes a worker's gradient.
        duration: duration of a gradient's computation.
        deaths: (virtual seconds, number of the worker) of each death.
        server: a server that has processed `begin`; None for a new server.

    Returns:
        the server, the workers, and the duration in virtual seconds.
    """
    if server is None:
        server = Server(begin.settings.workers)
        server.handle(0, begin, torch.empty(0), torch.empty(0))
    server.handle(0, OpenSection(0, leases), torch.empty(0), torch.empty(0))
    workers = [
        SimulatedWorker(number, 0, begin.shard.size, gradient, duration) for number in range(begin.settings.workers)
    ]
    arrivals = [(0.0, number, number) for number in range(len(workers))]
    arrivals += [(death_s, -1, number) for death_s, number in deaths]
    heapq.heapify(arrivals)
    waiting: list[int] = []
    order, now = len(workers), 0.0
    dead: set[int] = set()
    while arrivals:
        now, tie, number = heapq.heappop(arrivals)
        if tie == -1:
            server.remove_worker(number)
            dead.add(number)
        else:
            waiting.append(number)
        while (ready := next((w for w in waiting if server.ready(w, workers[w].message)), None)) is not None:
            waiting.remove(ready)
            worker = workers[ready]
            if ready in dead:
                continue
            seconds = worker.answered(server.handle(ready, worker.message, worker.inbox, worker.outbox))
            if seconds is not None:
                order += 1
                heapq.heappush(arrivals, (now + seconds, order, ready))
    return server, workers, now
