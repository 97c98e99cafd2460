"""The control plane of launches with many ranks, in virtual time: `python -m tests.bench.simulation`.

Each rank is a program that runs the project's own code: the rendezvous of a launch, the client of the store, the
agreement on a stop, and the departure. The store's state machine is also real. Only connections are simulated: a
message has the latency of a network, and the server processes messages sequentially, with CPU times that were
measured on a real server. Prints the waiting times of ranks, and the load of the server.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final, final
from unittest.mock import patch

from greenlet import getcurrent, greenlet

from fabricx.distributed import departure, stop_consensus
from fabricx.distributed.departure import await_departure
from fabricx.distributed.stop_consensus import Agreement
from fabricx.distributed.store import client as store
from fabricx.distributed.store.client import PrivateStore
from fabricx.distributed.store.server import UNPROVEN
from fabricx.distributed.store.state import StoreState, Wait
from fabricx.distributed.world import World
from fabricx.launch import launch_store
from fabricx.launch.launch_store import Launch, meet

from .control_plane import KEY, measured, opened
from .virtual_time import VirtualTime

STEPS: Final = 10
STEP_S: Final = 1.0
SPREAD_S: Final = 2.0  # time within which the processes of a launch have imported torch
TRAIN_S: Final = 60.0  # begin of training
LEAVE_S: Final = 200.0  # start of the departure
MANY: Final = 200  # connections of a measurement
WARM: Final = 20


@dataclass(frozen=True)
class Costs:
    """CPU time of a store's server, and the network.

    Attributes:
        accept: seconds of a connection until the server has sent its challenge.
        proof: seconds of the check of a connection's proof.
        request: seconds of a request and its immediate answer.
        answer: seconds of the answer to a request that has waited.
        byte: seconds per byte of a request or an answer.
        latency: seconds of a message in transit.
    """

    accept: float = 60e-6
    proof: float = 180e-6
    request: float = 30e-6
    answer: float = 15e-6
    byte: float = 2e-9
    latency: float = 50e-6


@final
class Server:
    """A store's server with a single thread, which works on messages in their order.

    Args:
        time: virtual time.
        costs: of the server.

    Attributes:
        state: the store's.
        busy: CPU seconds.
        sent: bytes of requests and answers.
        channels: open connections.
        waiting_most: largest number of connections that waited to be accepted.
    """

    def __init__(self, time: VirtualTime, costs: Costs) -> None:
        self.time, self.costs = time, costs
        self.state = StoreState(lambda: time.now)
        self.busy, self.sent, self.channels, self.waiting_most = 0.0, 0, 0, 0
        self._unproven: dict[Channel, None] = {}
        self._waiting: deque[Channel] = deque()  # to be accepted
        self._queue: deque[tuple[float, Callable[[], None]]] = deque()
        self._working = False
        self._tick = float("inf")

    def work(self, seconds: float, call: Callable[[], None]) -> None:
        """Call a function when the thread has finished all earlier work and this.

        Args:
            seconds: CPU time.
            call: the function.
        """
        self._queue.append((seconds, call))
        if not self._working:
            self._next()

    def _next(self) -> None:
        self._working = bool(self._queue)
        if self._working:
            seconds, call = self._queue.popleft()
            self.busy += seconds
            self.time.at(self.time.now + seconds, functools.partial(self._finish, call))

    def _finish(self, call: Callable[[], None]) -> None:
        call()
        self._next()

    def connect(self, channel: Channel) -> None:
        """Accept a connection if a slot for unproven connections is free; otherwise the connection waits."""
        self._waiting.append(channel)
        self.waiting_most = max(self.waiting_most, len(self._waiting))
        self._accept()

    def _accept(self) -> None:
        while self._waiting and len(self._unproven) < UNPROVEN:
            channel = self._waiting.popleft()
            self._unproven[channel] = None
            self.work(self.costs.accept, functools.partial(self._send, channel, b"challenge"))

    def admit(self, channel: Channel) -> None:
        """Receive the proof of a connection."""
        del self._unproven[channel]
        self.channels += 1
        self._send(channel, b"welcome")
        self._accept()

    def serve(self, channel: Channel, message: bytes) -> None:
        """Perform a request."""
        self.sent += len(message)
        if channel.closed:
            return
        answer = self.state.request(channel, message)
        if answer is not None:
            self._send(channel, answer)
        self._settle()

    def end(self, channel: Channel) -> None:
        """Read the end of a connection."""
        self.channels -= 1
        self.state.ended(channel)
        self._settle()

    def _settle(self) -> None:
        for caller, data in self.state.answers(self.channels):
            assert isinstance(caller, Channel)
            seconds = self.costs.answer + self.costs.byte * len(data)
            self.work(seconds, functools.partial(self._send, caller, data))
        deadline = self.state.next_deadline()
        if deadline is not None and (deadline < self._tick or self._tick <= self.time.now):
            self._tick = deadline
            self.time.at(deadline, self._settle)

    def _send(self, channel: Channel, data: bytes) -> None:
        self.sent += len(data)
        self.time.at(self.time.now + self.costs.latency, lambda: channel.receive(data))


@final
class Channel:
    """A connection, as `PrivateStore` uses it, and as `StoreState` sees it.

    Args:
        server: the other end.
        number: unique.
    """

    def __init__(self, server: Server, number: int) -> None:
        self.wait: Wait | None = None
        self.at_end: tuple[str, bytes] | None = None
        self.closed = False
        self._server, self._number = server, number
        self._received: deque[bytes] = deque()
        self._reader: greenlet | None = None

    def open(self) -> None:
        """Connect and prove the key."""
        server, time, costs = self._server, self._server.time, self._server.costs
        time.at(time.now + 2 * costs.latency, lambda: server.connect(self))
        self.recv_bytes()
        time.at(time.now + costs.latency, lambda: server.work(costs.proof, lambda: server.admit(self)))
        self.recv_bytes()

    def send_bytes(self, data: bytes) -> None:
        server, costs = self._server, self._server.costs
        seconds = costs.request + costs.byte * len(data)
        server.time.at(server.time.now + costs.latency, lambda: server.work(seconds, lambda: server.serve(self, data)))

    def recv_bytes(self) -> bytes:
        while not self._received:
            if self.closed:
                raise EOFError
            self._reader = getcurrent()
            self._server.time.pause()
        return self._received.popleft()

    def receive(self, data: bytes) -> None:
        """Receive a message of the server."""
        self._received.append(data)
        self._wake()

    def fileno(self) -> int:
        return self._number

    def close(self) -> None:
        """Close the connection, at either end or at the end of the process."""
        if not self.closed:
            self.closed = True
            server = self._server
            server.time.at(server.time.now + server.costs.latency, lambda: server.work(0.0, lambda: server.end(self)))
            self._wake()

    def _wake(self) -> None:
        if self._reader is not None:
            reader, self._reader = self._reader, None
            self._server.time.at(self._server.time.now, reader.switch)


@contextlib.contextmanager
def network(time: VirtualTime, servers: dict[str, Server]) -> Iterator[None]:
    """Replace time and connections in the project's code by virtual time and simulated servers.

    Args:
        time: virtual time.
        servers: by host name.
    """
    channels: dict[int, Channel] = {}
    numbers = itertools.count()

    def connect_to(address: tuple[str, int], key: bytes) -> Channel:
        channel = Channel(servers[address[0]], next(numbers))
        channels[channel.fileno()] = channel
        channel.open()
        return channel

    def start(key: bytes, local_key: bytes | None) -> tuple[str, int]:
        return "", 1

    stand_ins: list[tuple[Any, dict[str, Any]]] = [
        (store, {
            "authentication": _Names(connect_to=connect_to), "threading": time.threading, "_KEPT": [],
            "shut": lambda number: channels[number].close(),
        }),
        (stop_consensus, {"threading": time.threading}),
        (departure, {"time": time.time}),
        (launch_store, {"time": time.time, "store_host": _Names(start=start)}),
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        for module, names in stand_ins:
            for name, value in names.items():
                stack.enter_context(patch.object(module, name, value))
        yield


class _Names:
    def __init__(self, **names: Any) -> None:
        self.__dict__.update(names)


@dataclass(frozen=True)
class Phase:
    """Cost of a phase of a launch.

    Attributes:
        seconds: virtual time until the last rank has finished the phase.
        requests: of all ranks to the store.
        busy: CPU seconds of the store's server.
        sent: bytes of requests and answers.
    """

    seconds: float
    requests: int
    busy: float
    sent: int


@dataclass(frozen=True)
class Launched:
    """Cost of a launch.

    Attributes:
        join: from the start of the last process until all ranks have the store.
        train: `STEPS` steps.
        stop: from the boundary at which ranks stop until all have agreed.
        leave: the departure.
        boundary: steps between a request to stop and the stop.
        waiting: largest number of connections that waited to be accepted.
    """

    join: Phase
    train: Phase
    stop: Phase
    leave: Phase
    boundary: int
    waiting: int


@final
class _Run:
    """A launch, of which each rank is a program."""

    def __init__(self, ranks: int, costs: Costs, seed: int) -> None:
        self.ranks, self.time = ranks, VirtualTime()
        self.server, self.launcher = Server(self.time, costs), Server(self.time, costs)
        draw = random.Random(seed)
        self.starts = [SPREAD_S * draw.random() for _ in range(ranks)]
        self.delays = [STEP_S / 100 * draw.random() for _ in range(ranks)]  # of the end of a step
        self.counts = dict.fromkeys(("join", "train", "stop", "leave"), 0)
        self.ends: dict[str, float] = {}
        self.stops: set[int] = set()

    def reach(self, phase: str) -> None:
        """Record that a rank has finished a phase."""
        self.counts[phase] += 1
        if self.counts[phase] == self.ranks:
            self.ends[phase] = self.time.now

    def rank(self, number: int) -> None:
        """Run the program of a rank."""
        self.time.sleep(self.starts[number])
        launch = Launch(number, self.ranks, False, KEY, ("node0", "1", str(self.ranks), "run", "job"), "node0")
        shared, _ = meet(PrivateStore(("launcher", 0), KEY), launch)
        self.reach("join")
        world = World(rank=number, size=self.ranks, store=shared)
        agreement = Agreement(world, "signal")
        index = 0
        while not self.boundary(agreement, number, index):
            index += 1
            if index == STEPS:
                self.reach("train")
        self.stops.add(index)
        self.reach("stop")
        agreement.close()
        self.until(LEAVE_S)
        await_departure(world)
        self.reach("leave")

    def boundary(self, agreement: Agreement, number: int, index: int) -> bool:
        """Train a step, and return whether all ranks stop; a rank requests it after `STEPS` steps."""
        self.until(TRAIN_S + index * STEP_S + self.delays[(number + index) % self.ranks])
        if index == STEPS and number == self.ranks // 3:
            agreement.request("terminated")
        return agreement.at_boundary(index)

    def until(self, when: float) -> None:
        self.time.sleep(max(0.0, when - self.time.now))

    def launched(self) -> Launched:
        """Run the launch."""
        notes: list[tuple[int, float, int]] = [(0, 0.0, 0)]

        def note() -> None:
            notes.append((self.server.state.requests, self.server.busy, self.server.sent))

        for at in (TRAIN_S - STEP_S, TRAIN_S + (STEPS - 0.5) * STEP_S, LEAVE_S - STEP_S, 2 * LEAVE_S):
            self.time.at(at, note)
        with network(self.time, {"launcher": self.launcher, "node0": self.server, "localhost": self.server}):
            for number in range(self.ranks):
                self.time.begin(functools.partial(self.rank, number))
            self.time.run()
        assert set(self.counts.values()) == {self.ranks}, f"ranks that have finished each phase: {self.counts}"
        (stop,) = self.stops
        begins = [max(self.starts), TRAIN_S + (STEPS - 1) * STEP_S, TRAIN_S + stop * STEP_S, LEAVE_S]
        phases = [
            Phase(end - begin, *(after - before for before, after in zip(*pair, strict=True)))  # type: ignore[arg-type]
            for begin, end, pair in zip(begins, self.ends.values(), itertools.pairwise(notes), strict=True)
        ]
        join, train, halt, leave = phases
        return Launched(join, train, halt, leave, stop - STEPS, self.server.waiting_most)


def simulated(ranks: int, costs: Costs, seed: int = 0) -> Launched:
    """Return the cost of a launch.

    Args:
        ranks: processes of the launch.
        costs: of the store's server.
        seed: of the times at which processes start, and finish steps.
    """
    return _Run(ranks, costs, seed).launched()


def measured_costs() -> Costs:
    """Return the costs of a real server, with signed messages over TCP, and the default latency."""
    server = opened("")
    assert isinstance(server.address, tuple)

    def cpu(work: Callable[[], Any]) -> float:
        """Return the CPU seconds of the server for a piece of work."""
        server.since()
        work()
        time.sleep(0.2)  # the server's threads may work on
        return server.since()[1]

    address, keys = server.address, [f"key/{number}" for number in range(10 * MANY)]
    raw = [socket.create_connection(address) for _ in range(WARM)]  # also warms the server
    stores: list[PrivateStore] = []

    def answers() -> None:
        stores[0].set("late", "")
        for thread in threads:
            thread.join()

    try:
        accept = cpu(lambda: raw.extend(socket.create_connection(address) for _ in range(MANY))) / MANY
        for peer in raw:
            peer.close()
        connection = cpu(lambda: stores.extend(PrivateStore(address, KEY) for _ in range(MANY))) / MANY
        request = cpu(lambda: any(stores[0].set(key, "x" * 16) for key in keys)) / len(keys)  # type: ignore[func-returns-value]
        size = sum(2 * (len(key) + 4) + 20 for key in keys)  # of the request for all keys, and of its answer
        byte = max(0.0, cpu(lambda: all(stores[0].values(keys) for _ in range(10))) / 10 - request) / size
        threads = [threading.Thread(target=store.wait, args=(["late"], timedelta(minutes=1))) for store in stores[1:]]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        answer = cpu(answers) / len(threads)
    finally:
        server.process.communicate()
    return Costs(accept, max(0.0, connection - accept), request, answer, byte)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 1000, 4000, 10_000])
    parser.add_argument("--latency", type=float, default=Costs.latency, help="of a message, one way, seconds")
    parser.add_argument("--check", type=int, default=256, help="ranks of a real launch to compare with; 0 for none")
    args = parser.parse_args()
    costs = replace(measured_costs(), latency=args.latency)
    print(
        "CPU time of the store's server, microseconds: " + ", ".join(
            f"{name} {1e6 * seconds:.3g}" for name, seconds in dataclasses.asdict(costs).items()
        )
    )  # fmt: skip
    if args.check:
        real, model = measured(args.check, ""), simulated(args.check, costs)
        for name, phase in (("stop", model.stop), ("leave", model.leave)):
            requests, micros, _ = real[name]
            print(
                f"{args.check} ranks, {name}: {requests:.2f} requests of a rank, {requests * micros:.0f} us; "
                f"simulated {phase.requests / args.check:.2f}, {1e6 * phase.busy / args.check:.0f} us"
            )
    print(f"{'ranks':>6} {'joining':>28} {f'{STEPS} steps':>10} {'a stop':>28} {'departure':>28}")
    for ranks in args.ranks:
        result = simulated(ranks, costs)
        cells = [
            f"{phase.seconds:7.3f} s {phase.requests / ranks:4.1f} {1e6 * phase.busy / ranks:5.0f} us"
            for phase in (result.join, result.stop, result.leave)
        ]
        print(f"{ranks:>6} {cells[0]:>28} {result.train.requests:>10} {cells[1]:>28} {cells[2]:>28}", flush=True)


if __name__ == "__main__":
    main()
