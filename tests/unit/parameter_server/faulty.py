"""Workers and several servers in a single thread; processes may die and links may end between any two messages.

Each lease's gradient adds 1 to an element of each server's weights, which thus counts the uses of the lease.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from fabricx.distributed.compression.codecs import make_codec
from fabricx.parameter_server.optimizer_parts import sliced
from fabricx.parameter_server.server.journal import Journal
from fabricx.parameter_server.server.server import Server
from fabricx.parameter_server.wire.messages import (
    LeaseReply,
    OpenSection,
    Pull,
    Push,
    ReadState,
    Reply,
    RequestLease,
    ServerInit,
    Settings,
    TakeTurn,
)
from fabricx.parameter_server.wire.partition import Shard, divide

NONE: Final = torch.empty(0)
Step = Generator[tuple[str, int, Any], Any, None]  # of a worker: "send", "ask" or "meet", the server, the message


@dataclass
class Sent:
    """A message in transit with its vector; without a message, the end of the link."""

    number: int
    message: Any
    vector: Tensor


@dataclass
class End:
    """Shared state of a worker and a server.

    Attributes:
        number: of the newest message.
        queue: messages that the server has not handled.
        unanswered: messages that are sent again over a new link.
        answers: in transit to the worker.
        linked: the link exists.
        outbox: the worker's outbox, from the server's point of view.
        came: weights of the worker.
    """

    outbox: Tensor
    came: Tensor
    number: int = 0
    queue: deque[Sent | None] = field(default_factory=deque)
    unanswered: list[Sent] = field(default_factory=list)
    answers: deque[tuple[int, Any]] = field(default_factory=deque)
    linked: bool = True


class Faulty:
    """A run of two sections.

    Args:
        seed: of everything that happens.
        folder: for journals.
        servers, workers, leases: how many; leases of each section.
        every: leases of a round; None where gradients are brought.
        faults: how many of each kind may happen, at most: deaths of servers and workers, and ends of links.
        settings: of the servers.
    """

    def __init__(
        self, seed: int, folder: Path, *, servers: int = 2, workers: int = 3, leases: int = 12,
        every: int | None = None, faults: tuple[int, int, int] = (2, 1, 1), **settings: Any,
    ) -> None:  # fmt: skip
        self.rng = random.Random(seed)
        self.folder, self.leases, self.every = folder, leases, every
        self.settings = Settings(workers, **{"snapshot_every": 5, "outer": "sum" if every else None, **settings})
        self.faults = dict(zip(("server", "worker", "link"), faults, strict=True))
        size = 2 * leases  # of both sections
        self.shards: list[Shard] = divide([[size]] * servers, servers)
        self.servers = [Server(workers, grants=number == 0) for number in range(servers)]
        self.journals = [self._journal(number) for number in range(servers)]
        parameters = [nn.Parameter(torch.zeros(size)) for _ in range(servers)]
        stepped = [torch.optim.SGD(parameters, lr=1.0, momentum=0.0)]
        none = torch.empty(0)
        for number, server in enumerate(self.servers):
            copies, pieces = sliced(stepped, parameters, self.shards[number])
            begin = ServerInit(self.settings, None if every else copies, pieces, self.shards[number], torch.float32, 0)
            server.handle(0, begin, none, none)
            self.journals[number].snapshot_if_due(server, begin)
        self.ends: dict[int, list[End]] = {}
        self.steps: dict[int, Step] = {}
        self.requests: dict[int, tuple[str, int, Any]] = {}
        self.meeting: set[int] = set()
        self.sections: dict[int, int] = {}
        self.pushed: Counter[int] = Counter()
        self.log: list[str] = []
        for worker in range(workers):
            self._come(worker, 0)

    def _journal(self, number: int) -> Journal:
        return Journal([self.folder / f"{number}-{index}" for index in range(2)])

    # -- a worker -----------------------------------------------------------------------------------------------------

    def _come(self, worker: int, section: int) -> None:
        self.ends[worker] = [End(torch.zeros(s.size), torch.zeros(s.size)) for s in self.shards]
        for number, server in enumerate(self.servers):
            self.journals[number].record_joined(worker, resumes=False)
            server.add_worker(worker)
        self.sections[worker] = section
        self.steps[worker] = self._section(worker, section)
        self.requests[worker] = next(self.steps[worker])

    def _section(self, worker: int, section: int) -> Step:
        """Train a section as `Asynchronous` and `LocalRounds` do."""
        servers, samples = range(len(self.servers)), []
        present = tuple(sorted(self.ends))
        for server in servers:
            yield "send", server, OpenSection(section, self.leases, 0, present)
        while True:
            granted: LeaseReply = yield "ask", 0, RequestLease(section, not samples)
            if granted.lease is None and samples:
                yield from self._push(section, granted, samples)
                samples = []
                continue
            if granted.lease is None:
                break
            if granted.again and samples:
                yield from self._push(section, granted, samples)
                samples = []
            if not samples:
                bound = self.settings.max_staleness
                version = 0 if bound is None or not self.settings.aggregate else max(0, granted.clock - bound)
                for server in servers:
                    yield "ask", server, Pull(version, to_train=True, rows={})
            samples.append(granted.lease)
            if granted.again or len(samples) >= (self.every or 1):
                yield from self._push(section, granted, samples)
                samples = []
        yield "meet", 0, None

    def _push(self, section: int, granted: LeaseReply, samples: list[int]) -> Step:
        if self.settings.orders_updates and len(self.servers) > 1 and not (yield "ask", 0, TakeTurn()).content:
            return
        for server in range(1, len(self.servers)):
            yield (
                "ask",
                server,
                Push(granted.clock, granted.parts, tuple(samples), share=1 / granted.parts, confirm=True),
            )
        logged = {"numbers": [["sum"], float(sum(samples)), len(samples)]}
        share = 1 / granted.parts
        yield "send", 0, Push(granted.clock, granted.parts, tuple(samples), share=share, logged=(logged, {}))

    def _vector(self, worker: int, server: int, message: Any) -> Tensor:
        """Return the gradient of a push: -1 for each of its leases, so that SGD adds 1."""
        vector = torch.zeros(self.shards[server].room)
        if isinstance(message, Push):
            for lease in message.leases:
                vector[self.sections[worker] * self.leases + lease] = -1.0
        return vector

    def _advance(self, worker: int, answer: Any = None) -> None:
        try:
            self.requests[worker] = self.steps[worker].send(answer)
        except StopIteration:
            del self.requests[worker]

    def _send(self, worker: int) -> None:
        """Deliver a worker's next message."""
        kind, server, message = self.requests[worker]
        if kind == "meet":
            self.meeting.add(worker)
            return
        end = self.ends[worker][server]
        end.number += 1
        if isinstance(message, Pull):
            message = replace(message)
        sent = Sent(end.number, message, self._vector(worker, server, message))
        end.unanswered.append(sent)
        if end.linked:
            end.queue.append(sent)
        if kind == "send":
            self._advance(worker)
        else:
            self.requests[worker] = ("wait", server, message)

    def _hear(self, worker: int, server: int) -> None:
        """Deliver an answer to a worker."""
        end = self.ends[worker][server]
        number, answer = end.answers.popleft()
        [request] = [sent.message for sent in end.unanswered if sent.number == number]
        end.unanswered = [sent for sent in end.unanswered if sent.number > number]
        if isinstance(answer, Reply) and isinstance(request, Pull):
            self._unpack(end, server, answer)
        self._advance(worker, answer)

    def _unpack(self, end: End, server: int, reply: Reply) -> None:
        if reply.scale is None:
            end.came.copy_(end.outbox)
        else:
            codec = make_codec(self.settings.pull_compression or "", feedback=False)
            raw = end.outbox.view(torch.uint8)
            end.came.add_(codec.decode(raw, self.shards[server].dense, reply.scale, torch.float32))

    # -- a server -----------------------------------------------------------------------------------------------------

    def _deliverable(self) -> list[tuple[int, int]]:
        requests = []
        for worker, ends in self.ends.items():
            for number, end in enumerate(ends):
                if not end.queue:
                    continue
                sent, server = end.queue[0], self.servers[number]
                known = sent is None or server.repeated(worker, sent.number, sent.message)
                if known or (sent is not None and server.ready(worker, sent.message)):
                    requests.append((worker, number))
        return requests

    def _deliver(self, worker: int, number: int) -> None:
        """Handle a message on a server, as `serving` does; it may die before, after or during the message."""
        end, server, journal = self.ends[worker][number], self.servers[number], self.journals[number]
        sent = end.queue.popleft()
        if sent is None:
            if not end.linked:
                journal.record_left(worker)
                server.remove_worker(worker)
            self._forget_the_dead()
            return
        if not server.repeated(worker, sent.number, sent.message):
            journal.record_message(server, worker, sent.number, sent.message, sent.vector)
        if self._happens("server", 0.02):
            self._kill_server(number, torn=True)
            return
        outbox = end.outbox
        answer = server.handle_once(worker, sent.number, sent.message, sent.vector.clone(), outbox)
        journal.snapshot_if_due(server, sent.message)
        if self._happens("server", 0.02):
            self._kill_server(number)
            return
        if answer is not None and end.linked:
            end.answers.append((sent.number, answer))

    # -- faults -------------------------------------------------------------------------------------------------------

    def _happens(self, kind: str, chance: float) -> bool:
        if self.faults[kind] and self.rng.random() < chance:
            self.faults[kind] -= 1
            return True
        return False

    def _kill_server(self, number: int, *, torn: bool = False) -> None:
        """Restart a server; messages in transit are lost."""
        self.log.append(f"server {number} dies")
        before = self.servers[number]
        self.journals[number].close()
        server, journal = Server(self.settings.workers, grants=number == 0), self._journal(number)
        assert journal.replay(server)
        if not torn:
            assert server.version == before.version
            assert torch.equal(server.values, before.values)
        self.servers[number], self.journals[number] = server, journal
        for worker, ends in self.ends.items():
            ends[number].queue.clear()
            ends[number].answers.clear()
            ends[number].linked = False
            if worker not in self.steps:  # as reported by the supervisor
                journal.record_left(worker)
                server.remove_worker(worker)
        self._forget_the_dead()

    def _kill_worker(self, worker: int) -> None:
        """End a worker: its sent messages arrive, followed by the end of its links."""
        self.log.append(f"worker {worker} dies")
        del self.steps[worker], self.requests[worker]
        self.meeting.discard(worker)
        for number, end in enumerate(self.ends[worker]):
            if end.linked:
                end.queue.append(None)
            elif not end.queue:  # the supervisor reports the death to servers without a link
                self.journals[number].record_left(worker)
                self.servers[number].remove_worker(worker)
            end.linked = False

    def _forget_the_dead(self) -> None:
        for worker in [worker for worker in self.ends if worker not in self.steps]:
            if not any(end.queue for end in self.ends[worker]):
                del self.ends[worker]

    def _cut(self, worker: int, number: int) -> None:
        """End a link: some of the messages in transit still arrive."""
        self.log.append(f"link {worker}-{number} ends")
        end = self.ends[worker][number]
        for _ in range(self.rng.randint(0, len(end.queue))):
            end.queue.pop()
        end.queue.append(None)
        end.answers.clear()
        end.linked = False

    def _reconnect(self, worker: int, number: int) -> None:
        end = self.ends[worker][number]
        end.queue = deque()
        if self.rng.random() < 0.5:  # the server notices the end of the old link first
            self.journals[number].record_left(worker)
            self.servers[number].remove_worker(worker)
        self.journals[number].record_joined(worker, resumes=True)
        self.servers[number].add_worker(worker, resumes=True)
        for sent in end.unanswered:
            if isinstance(sent.message, Pull):
                sent.message.whole = True
            end.queue.append(sent)
        end.linked = True

    # -- the run ------------------------------------------------------------------------------------------------------

    def run(self) -> list[Tensor]:
        """Train two sections; returns the weights of each server."""
        for section in (0, 1):
            if section:
                for worker in list(self.steps):
                    self.sections[worker] = section
                    self.steps[worker] = self._section(worker, section)
                    self.requests[worker] = next(self.steps[worker])
                if len(self.steps) < self.settings.workers:
                    self._come(100 + section, section)
            self.meeting.clear()
            for _ in range(100_000):
                if not self._act():
                    break
            else:
                raise AssertionError("it never ends")
            assert self.meeting == set(self.steps), (self.log, self.requests)
            _, numbers, count = self.servers[0].handle(0, ReadState("logged", section), NONE, NONE).content["numbers"]
            assert (numbers, count) == (sum(range(self.leases)), self.leases), (self.log, numbers, count)
        for journal in self.journals:
            journal.close()
        return [server.values for server in self.servers]

    def _act(self) -> bool:
        """Execute a single event; returns False if no event is possible."""
        actions: list[tuple[Any, ...]] = []
        for worker, (kind, _, _) in self.requests.items():
            if kind != "wait" and worker not in self.meeting:
                actions.append((self._send, worker))
        actions += [(self._deliver, worker, number) for worker, number in self._deliverable()]
        for worker in self.steps:
            for number, end in enumerate(self.ends[worker]):
                if not end.linked:
                    actions.append((self._reconnect, worker, number))
                elif end.answers:
                    actions.append((self._hear, worker, number))
        if not actions:
            return False
        if self._happens("server", 0.01):
            self._kill_server(self.rng.randrange(len(self.servers)))
            return True
        if len(self.steps) > 1 and self._happens("worker", 0.01):
            self._kill_worker(self.rng.choice(sorted(self.steps)))
            return True
        if self._happens("link", 0.01):
            worker = self.rng.choice(sorted(self.steps))
            number = self.rng.randrange(len(self.servers))
            if self.ends[worker][number].linked:
                self._cut(worker, number)
            return True
        act, *arguments = self.rng.choice(actions)
        act(*arguments)
        return True
