"""Workers and a server without processes under a virtual clock: a deterministic order of events."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import Tensor

from fabricx.parameter_server.server.server import Server
from fabricx.parameter_server.wire.messages import Ask, Begin, Granted, Open, Pull, Push, Reply

Gradient = Callable[[int, Tensor], Tensor]  # of a lease, at weights; both flat
Duration = Callable[[int, int], float]  # of a worker's gradient of a lease, in virtual seconds


@final
class FakeWorker:
    """What a worker does with its server: take a lease, bring the weights, compute, push."""

    def __init__(self, number: int, section: int, size: int, gradient: Gradient, duration: Duration) -> None:
        self.number = number
        self.message: Any = Ask(section, True)  # the one that it waits with
        self.inbox, self.outbox = torch.zeros(size), torch.zeros(size)  # as the server sees them
        self.trained: list[int] = []
        self._section = section
        self._gradient, self._duration = gradient, duration
        self._granted = Granted(None)

    def answered(self, answer: Any) -> float | None:
        """Go on after an answer; returns in how many seconds the next message comes, None if there is none."""
        lease = self._granted.lease
        if isinstance(answer, Granted):
            self._granted = answer
            self.message = Pull(to_train=True, rows={})
            return None if answer.lease is None else 0.0
        if isinstance(answer, Reply):
            assert lease is not None
            self.inbox.copy_(self._gradient(lease, self.outbox))
            self.message = Push(self._granted.clock, self._granted.parts, (lease,))
            return self._duration(self.number, lease)
        assert lease is not None
        self.trained.append(lease)
        self.message = Ask(self._section, True)
        return 0.0


def simulate(
    begin: Begin, leases: int, gradient: Gradient, duration: Duration = lambda worker, lease: 1.0,
    deaths: Iterable[tuple[float, int]] = (), server: Server | None = None,
) -> tuple[Server, list[FakeWorker], float]:  # fmt: skip
    """Train one section of the data.

    Args:
        begin: what the server is given.
        leases: parts of the data.
        gradient: what a worker computes.
        duration: how long that takes it.
        deaths: (when, who), in virtual seconds.
        server: one that has begun; a new one if not given.

    Returns:
        the server, the workers, and the virtual seconds that it took.
    """
    if server is None:
        server = Server(begin.settings.workers)
        server.handle(0, begin, torch.empty(0), torch.empty(0))
    server.handle(0, Open(0, leases), torch.empty(0), torch.empty(0))
    workers = [FakeWorker(number, 0, begin.shard.size, gradient, duration) for number in range(begin.settings.workers)]
    arrivals = [(0.0, number, number) for number in range(len(workers))]
    arrivals += [(when, -1, who) for when, who in deaths]
    heapq.heapify(arrivals)
    waiting: list[int] = []
    order, now = len(workers), 0.0
    dead: set[int] = set()
    while arrivals:
        now, tie, number = heapq.heappop(arrivals)
        if tie == -1:
            server.left(number)
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
