"""A worker's side: its parameters, and the links to all servers."""

from __future__ import annotations

import contextlib
import math
import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final, Literal, TypeVar, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabricx.comm.links import LOST, Hello, Link, Store, connect, meet_over_gloo
from fabricx.errors import ServerLost
from fabricx.exchange.arrival import Arrival
from fabricx.exchange.boxes import Boxes, Filled, dtype_of, pieces_by_parameter, settle_sums, watch
from fabricx.exchange.compression import Codec
from fabricx.exchange.layout import divide
from fabricx.exchange.messages import (
    Apply,
    Ask,
    Begin,
    Close,
    Counts,
    Granted,
    Groups,
    Have,
    Norm,
    Open,
    Pull,
    Push,
    Reply,
    Settings,
    Tell,
)
from fabricx.exchange.rules import join_states, part_of, sliced

T = TypeVar("T")
START: Final = timedelta(minutes=5)  # how long a server may take to start
RESTART_S: Final = 60.0  # and to be started again


@final
class Client:
    """Brings gradients to the servers, and weights from them.

    Args:
        store: where servers have left their addresses.
        prefix: of the run's keys.
        worker: this worker's number.
        parameters: the same on all workers, in the same order.
        servers: how many there are.
        whole: a parameter is with one server.
        over_gloo: even where a server is on this machine.
        sums: the servers send sums of gradients, and workers step.
        views: gradients may stay in the links' vectors; see `Boxes[Link]`.
        tables: numbers of the parameters of whose gradients only some rows are there.
        compression, back, keep: of gradients, and of what comes back; see `Codec`.
        generation: of workers that go together.
    """

    def __init__(
        self, store: Store, prefix: str, worker: int, parameters: Sequence[Tensor], servers: int,
        *, whole: bool = False, over_gloo: bool = False, sums: bool = False, views: bool = False,
        tables: frozenset[int] = frozenset(), compression: str | None = None, back: str | None = None,
        keep: float = 0.01, generation: int = 0,
    ) -> None:  # fmt: skip
        self._generation = generation
        self._sums, self._views = sums, views
        self._parameters = list(parameters)
        self.waited_s = 0.0  # for servers to answer
        self.pushed_s = 0.0
        self.pushes: deque[tuple[int, int, float]] = deque(maxlen=4096)  # the newest: whose, which, when
        self._count = 0
        self._shards = divide([parameter.shape for parameter in parameters], servers, whole=whole, by_row=tables)
        self.dtype = dtype_of(parameters)
        self._store, self._prefix, self._worker, self._over_gloo = store, prefix, worker, over_gloo
        self._codecs = [(kind, feedback) for kind, feedback in ((compression, True), (back, False))]
        self._keep = keep
        self.partial = bool(tables) or back is not None  # may the weights here be less than those of the servers?
        self._restarts = False  # is a server that died started again?
        self.forgotten = 0  # how often the first server was started again: it knows of no lease that it had given
        self.hears = True  # is the gradient that comes next complete?
        self._threads: ThreadPoolExecutor | None = None
        self._arrivals: list[Arrival] = []
        self._coming: set[int] = set()  # parameters that are on their way
        self._pull = Pull()
        self._where = pieces_by_parameter(self._shards)
        self._unpin: list[Callable[[], None]] = []
        self._opened: Open | None = None
        self._addresses = [""] * servers
        self._boxes = [self._meet(number) for number in range(servers)]

    @property
    def _links(self) -> list[Link]:
        return [boxes.link for boxes in self._boxes]

    def _meet(self, number: int) -> Boxes[Link]:
        """Return a new link to a server; waits until it has an address at which it wasn't lost already."""
        key, shard = f"{self._prefix}/server/{number}", self._shards[number]
        back = None if self._sums else shard.size
        hello = Hello(self._worker, self.dtype, shard.room, back, self._generation)
        self._store.wait([key], START)
        deadline = time.monotonic() + RESTART_S
        while time.monotonic() < deadline:
            if (told := self._store.get(key).decode()) != self._addresses[number]:
                self._addresses[number] = told
                with contextlib.suppress(*LOST):  # it died just now
                    link = self._connect(key, told, hello)
                    if any(parameter.is_cuda for parameter in self._parameters):
                        self._unpin.append(link.pin())
                    codec, decoder = (
                        Codec(kind, keep=self._keep, feedback=feedback) if kind else None
                        for kind, feedback in self._codecs
                    )
                    return Boxes(link, shard, self._parameters, codec, views=self._views, back=decoder)
            time.sleep(0.02)
        raise ServerLost(f"server {number} has gone, and was not started again in {RESTART_S:.0f} s")

    def _connect(self, key: str, told: str, hello: Hello) -> Link:
        """Return a link to a server that has told the store where it is."""
        generation, _, address = told.partition(" ")
        link = None if self._over_gloo else connect(address, hello)
        if link is not None:
            return link
        place = f"{key}/{generation}/from"
        place = f"{place}/{self._store.add(place, 1)}"
        self._store.set(place, pickle.dumps(hello).hex())
        return meet_over_gloo(self._store, f"{place}/link", hello, server=False, timeout=timedelta(days=365))

    def _try(self, number: int, action: Callable[[Boxes[Link]], T]) -> T:
        """Return what comes of talking to a server; once more, if it had to be started again.

        Raises:
            ServerLost: it has gone for good.
        """
        if self._arrivals:
            self.finish_pull()
        lost = False
        while True:
            try:
                if lost:
                    self._boxes[number].link.close()
                    self._boxes[number] = self._meet(number)
                    self.forgotten += number == 0
                    if self._opened is not None:
                        self._boxes[number].link.send(self._opened)
                return action(self._boxes[number])
            except ServerLost:
                raise
            except LOST as error:
                if not self._restarts:
                    raise ServerLost(f"server {number} has gone, and what it kept can't be reached") from error
                lost = True

    def begin(
        self, settings: Settings, optimizers: Sequence[Optimizer] | None, version: int,
        *, velocity: Sequence[Tensor] | None = None, lost: Sequence[Tensor | None] = (),
    ) -> None:  # fmt: skip
        """Give the servers the weights and what steps them: the first worker does, and the others' messages wait."""
        self._restarts = bool(settings.snapshot_every)
        if self._worker:
            return
        for number, shard in enumerate(self._shards):
            copies, made = sliced(optimizers or [], self._parameters, shard)
            stepped = None if optimizers is None else copies
            # Answered, so that it isn't lost with a server that dies now: its snapshot is written by then.
            moving = None
            if velocity is not None:
                moving = torch.cat([part_of(velocity[part.parameter], part).reshape(-1) for part in shard.parts])
            before = lost[number] if lost else None
            self._asked(number, Begin(settings, stepped, made, shard, self.dtype, version, moving, before))

    def _say(self, number: int, message: Any) -> None:
        self._try(number, lambda boxes: boxes.link.send(message))

    def _asked(self, number: int, message: Any) -> Any:
        """Return a server's answer."""

        def ask(boxes: Boxes[Link]) -> Any:
            boxes.link.send(message)
            return boxes.link.recv()

        return self._try(number, ask)

    def watch(self) -> Callable[[], None]:
        """Let gradients go as soon as they are complete, while `hears`; returns what ends that."""
        return watch(self._parameters, self._shards, self._put)

    def _put(self, server: int, number: int, parameter: Tensor) -> None:
        if self.hears:
            self._boxes[server].put(number, parameter)

    def push(
        self, gradients: Sequence[Tensor | None], *, clock: int = 0, parts: int = 1, leases: tuple[int, ...] = (0,),
        groups: Groups | None = None, hold: bool = False, share: float = 1.0,
    ) -> None:  # fmt: skip
        """Bring gradients, by parameter; None for all of them is a lease without a gradient. Waits for nothing."""
        empty = all(gradient is None for gradient in gradients)

        def send(boxes: Boxes[Link]) -> None:
            filled = Filled() if empty else boxes.fill(gradients)
            push = Push(clock, parts, leases, empty, filled.missing, filled.rows, groups, hold, filled.scale, share)
            boxes.link.send(push)

        begun = time.perf_counter()
        for number in range(len(self._boxes)):
            self._try(number, send)
        self.pushed_s += time.perf_counter() - begun
        self._count += 1
        self.pushes.append((self._worker, self._count, time.monotonic()))

    def pull(
        self, targets: Sequence[Tensor], version: int = 0, *, to_train: bool = False, one_by_one: bool = False
    ) -> Reply:
        """Bring weights into tensors, by parameter; returns the answer of the first server.

        A gradient of them follows if `to_train`; then rows of tables are left for when it is known which. Where that
        may have to wait for other workers, servers are asked `one_by_one`: two workers that each wait at the other's
        server would wait for ever.
        """
        pull = Pull(version, to_train, rows={} if to_train else None)

        def give(boxes: Boxes[Link], reply: Reply) -> None:
            boxes.give_weights(targets, tables=not to_train)

        return self._pulled(lambda boxes: pull, give, one_by_one=one_by_one)[0]

    def begin_pull(self, version: int = 0) -> None:
        """Let the weights come, for a gradient, while something else is done; `bring` waits for some of them."""
        self.finish_pull()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(len(self._boxes), thread_name_prefix="fabricx-pull")
        self._pull = Pull(version, to_train=True, rows={})
        self._coming = set(range(len(self._parameters)))
        try:
            self._arrivals = [Arrival(boxes, self._pull, self._threads) for boxes in self._boxes]
        except LOST:
            self._pull_again()

    def bring(self, numbers: set[int]) -> None:
        """Wait for some parameters, by number, and bring them, if they are on their way."""
        wanted = numbers & self._coming
        if not wanted:
            return
        begun = time.perf_counter()
        try:
            for parameter in wanted:
                for server, number in self._where.get(parameter, ()):
                    self._arrivals[server].wait_for(number)
                    self._boxes[server].give_piece(number, self._parameters)
            self._coming -= wanted
        except LOST:
            self._pull_again()
        self.waited_s += time.perf_counter() - begun

    def finish_pull(self) -> tuple[Reply | None, set[int]]:
        """Wait for all that is on its way; returns the first server's answer, and what `bring` wasn't asked for."""
        left = set(self._coming)
        self.bring(left)
        arrivals, self._arrivals = self._arrivals, []
        try:
            replies = [arrival.reply() for arrival in arrivals]
        except LOST:
            replies = [self._pull_again()]
        return (replies[0] if replies else None), left

    def _pull_again(self) -> Reply:
        """Bring everything, since a server has gone in the middle of it."""
        self._coming, self._arrivals = set(), []
        return self.pull(self._parameters, self._pull.version, to_train=True)

    def pull_rows(self, ids: dict[int, Tensor]) -> None:
        """Bring rows of tables into the parameters: their numbers, shape [k], each once, by parameter."""
        self.bring(set(self._coming))
        counts: dict[Boxes[Link], dict[int, int]] = {}

        def wanted(boxes: Boxes[Link]) -> Pull:
            counts[boxes] = boxes.want_rows(ids)
            return Pull(dense=False, rows=counts[boxes])

        self._pulled(wanted, lambda boxes, reply: boxes.give_rows(self._parameters, counts[boxes]))

    def pull_sums(self, version: int) -> None:
        """Let the parameters' gradients be the sums of all workers'; None where nobody had one."""
        replies = self._pulled(lambda boxes: Pull(version), lambda boxes, reply: None)
        missing, counts = zip(*(reply.content for reply in replies), strict=True)
        rows = [boxes.rows_of_sums(mine) for boxes, mine in zip(self._boxes, counts, strict=True)]
        settle_sums(self._parameters, self._boxes, missing, rows)

    def _pulled(
        self, message: Callable[[Boxes[Link]], Pull], give: Callable[[Boxes[Link], Reply], None],
        *, one_by_one: bool = False,
    ) -> list[Reply]:  # fmt: skip
        """Ask all servers, and do something with each answer; returns those."""
        begun = time.perf_counter()
        asked: dict[Boxes[Link], Pull] = {}  # on whose links the answer is on its way

        def send(boxes: Boxes[Link]) -> None:
            pull = message(boxes)
            boxes.link.send(pull)
            asked[boxes] = pull

        def bring(boxes: Boxes[Link]) -> Reply:
            if boxes not in asked:
                send(boxes)
            reply: Reply = boxes.link.recv()
            if asked[boxes].dense:
                boxes.unpack(reply, sums=self._sums)
            give(boxes, reply)
            return reply

        if not one_by_one:
            for number in range(len(self._boxes)):
                self._try(number, send)
        replies = [self._try(number, bring) for number in range(len(self._boxes))]
        self.waited_s += time.perf_counter() - begun
        return replies

    def norm(self, clock: int, parameters: Sequence[Tensor]) -> float:
        """Return the 2-norm of some parameters' part of the gradient that is held for an update."""
        squares = 0.0
        for number, pieces in enumerate(self._numbers(parameters)):
            squares += sum(self._asked(number, Norm(clock, pieces)).content)
        return math.sqrt(squares)

    def apply(
        self, clock: int, scales: Sequence[tuple[list[Tensor], float]], limits: Sequence[tuple[list[Tensor], float]]
    ) -> None:  # fmt: skip
        """Make the update that is held, scaled and cut: (parameters, factor), (parameters, limit)."""
        scaled = [(self._numbers(parameters), factor) for parameters, factor in scales]
        limited = [(self._numbers(parameters), limit) for parameters, limit in limits]
        for n in range(len(self._boxes)):
            self._say(
                n, Apply(clock, [(pieces[n], f) for pieces, f in scaled], [(pieces[n], x) for pieces, x in limited])
            )

    def _numbers(self, parameters: Sequence[Tensor]) -> list[list[int]]:
        """Return the numbers of the pieces of some parameters, by server."""
        wanted = {id(parameter) for parameter in parameters}
        return [
            [n for n, piece in enumerate(shard.pieces) if id(self._parameters[piece.parameter]) in wanted]
            for shard in self._shards
        ]

    def open(self, section: int, leases: int, version: int, workers: tuple[int, ...]) -> None:
        """Begin a section of the data after so many updates, for those workers; every one says so."""
        self._opened = Open(section, leases, version, workers)
        for number in range(len(self._boxes)):
            self._say(number, self._opened)

    def ask(self, section: int, *, wait: bool) -> Granted:
        """Return this worker's next lease."""
        begun = time.perf_counter()
        granted: Granted = self._asked(0, Ask(section, wait))
        self.waited_s += time.perf_counter() - begun
        return granted

    def close_section(self, section: int) -> None:
        """Let no more leases of a section be given."""
        self._say(0, Close(section))

    def optimizer_states(self) -> list[list[dict[str, Any]]]:
        """Return what each optimizer remembers of each parameter, whole."""
        found: list[list[list[dict[str, Any]]]]
        found = [self._asked(number, Tell("state")).content for number in range(len(self._boxes))]
        parts = [shard.parts for shard in self._shards]
        return [
            [join_states(self._parameters[number], [pair for mine, server in zip(parts, found, strict=True)
                                   for pair in zip(mine, server[which], strict=True) if pair[0].parameter == number])
             for number in range(len(self._parameters))]
            for which in range(len(found[0]))
        ]  # fmt: skip

    def velocity(self) -> list[Tensor]:
        """Return the velocity of the servers' outer optimizer, by parameter."""
        return self._by_parameter("velocity")

    def weights(self) -> list[Tensor]:
        """Return the servers' weights, by parameter; what they reckon that this worker has stays."""
        return self._by_parameter("weights")

    def came(self) -> list[Tensor | None]:
        """Return what each server has sent of its weights, where differences from that follow."""
        return [boxes.came for boxes in self._boxes]

    def have(self, came: Sequence[Tensor | None]) -> None:
        """Go on with differences from what `came` has returned."""
        for number, weights in enumerate(came):
            if weights is not None:
                self._boxes[number].came = weights
                self._say(number, Have(weights))

    def _by_parameter(self, what: Literal["velocity", "weights"]) -> list[Tensor]:
        found = [torch.zeros(parameter.shape, dtype=self.dtype) for parameter in self._parameters]
        for number, shard in enumerate(self._shards):
            told = self._asked(number, Tell(what)).content
            for part, (start, stop) in zip(shard.parts, shard.spans, strict=True):
                part_of(found[part.parameter], part).view(-1).copy_(told[start:stop])
        return found

    @property
    def kept(self) -> list[Tensor]:
        """Return what compression will add to the next gradients of this worker, by server."""
        return [boxes.kept for boxes in self._boxes]

    @kept.setter
    def kept(self, lost: Sequence[Tensor]) -> None:
        for boxes, mine in zip(self._boxes, lost, strict=True):
            boxes.kept = mine

    def lost(self) -> list[Tensor | None]:
        """Return what the servers will add to the next sums."""
        return [self._asked(number, Tell("lost")).content for number in range(len(self._boxes))]

    def counts(self) -> list[Counts]:
        """Return what each server has seen."""
        return [self._asked(number, Tell("counts")).content for number in range(len(self._boxes))]

    @property
    def traffic(self) -> tuple[int, int]:
        """Return the bytes of vectors that were sent and received."""
        return sum(link.sent for link in self._links), sum(link.received for link in self._links)

    def close(self, *, done: bool = True) -> None:
        """Leave the servers; they end, if this was the last who had not `done`."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        for unpin in self._unpin:
            unpin()
        for link in self._links:
            if done:
                with contextlib.suppress(*LOST):
                    link.send(None)
            link.close()
