"""A worker's client: its parameters, and requests to all servers."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final, Literal, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabricx.core.averaging import AverageRule
from fabricx.distributed.generations import membership
from fabricx.errors import ServerLost
from fabricx.parameter_server.optimizer_parts import ServerOptimizers, flat_part, part_of, sliced
from fabricx.parameter_server.server.changed_rows import BEGUN
from fabricx.parameter_server.wire.channel import (
    LOST,
    NETWORK,
    READY,
    Gloo,
    Handshake,
    Link,
    SharedMemory,
    Store,
    connect,
    meet_over_gloo,
)
from fabricx.parameter_server.wire.codecs import Codec
from fabricx.parameter_server.wire.messages import (
    Apply,
    Ask,
    Average,
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
    Turn,
)
from fabricx.parameter_server.wire.partition import divide
from fabricx.parameter_server.wire.request_channel import Channel
from fabricx.parameter_server.worker.buffers import (
    ExchangeBuffers,
    Filled,
    dtype_of,
    pieces_by_parameter,
    settle_sums,
    watch,
)
from fabricx.parameter_server.worker.prefetch import PrefetchTask

START: Final = timedelta(minutes=5)  # how long a server may take to start
RESTART_S: Final = 60.0  # and to be started again


@final
class Client:
    """Brings gradients to the servers, and weights from them.

    Args:
        store: where servers have left their addresses.
        prefix: of the run's keys.
        secret: the run's key.
        worker: this worker's number.
        parameters: the same on all workers, in the same order.
        servers: how many there are.
        whole: a parameter is with one server.
        over_gloo: even where a server is on this machine.
        sums: the servers send sums of gradients, and workers step.
        views: gradients may stay in the links' vectors; see `ExchangeBuffers`.
        tables: numbers of the parameters of whose gradients only some rows are there.
        compression, back, keep: of gradients, and of what comes back; see `Codec`.
        generation: of workers that go together; None where each goes by itself.
    """

    def __init__(
        self, store: Store, prefix: str, secret: bytes, worker: int, parameters: Sequence[Tensor], servers: int,
        *, whole: bool = False, over_gloo: bool = False, sums: bool = False, views: bool = False,
        tables: frozenset[int] = frozenset(), compression: str | None = None, back: str | None = None,
        keep: float = 0.01, generation: int | None = 0,
    ) -> None:  # fmt: skip
        self._generation = generation
        self._sums, self._views = sums, views
        self._parameters = list(parameters)
        self.waited_s = 0.0  # for servers to answer
        self.pushed_s = 0.0
        self.pushes: deque[tuple[int, int, float]] = deque(maxlen=4096)  # the newest: whose, which, when
        self._count = 0
        self.brought = 0  # how often weights came
        self._shards = divide([parameter.shape for parameter in parameters], servers, whole=whole, by_row=tables)
        self.dtype = dtype_of(parameters)
        self._store, self._prefix, self._worker, self._over_gloo = store, prefix, worker, over_gloo
        self._secret = secret
        self._codecs = [(kind, feedback) for kind, feedback in ((compression, True), (back, False))]
        self._keep = keep
        self.partial = bool(tables) or back is not None  # may the weights here be less than those of the servers?
        self._restarts = False  # is a server that died started again?
        self._ordered = False  # do updates come to all servers in one order?
        self.hears = True  # is the gradient that comes next complete?
        self._threads: ThreadPoolExecutor | None = None
        self._arrivals: list[PrefetchTask] = []
        self._coming: set[int] = set()  # parameters that are on their way
        self._pull = Pull()
        self._where = pieces_by_parameter(self._shards)
        self._unpin: list[Callable[[], None]] = []
        self._addresses = [""] * servers
        self._boxes = [self._meet(number) for number in range(servers)]

    @property
    def _links(self) -> list[Channel]:
        return [boxes.link for boxes in self._boxes]

    def _meet(self, number: int) -> ExchangeBuffers[Channel]:
        """Return what this worker and a server have in common."""
        shard = self._shards[number]
        back = None if self._sums else shard.room
        hello = Handshake(self._worker, self.dtype, shard.room, back, self._generation)
        link = self._linked(number, hello)
        if any(parameter.is_cuda for parameter in self._parameters):
            self._unpin.append(link.pin())
        codec, decoder = (
            Codec(kind, keep=self._keep, feedback=feedback) if kind else None for kind, feedback in self._codecs
        )
        again = replace(hello, resumes=True)
        channel = Channel(link, lambda before: self._linked(number, again, before))
        # What gloo is sending must not change; in shared memory it is read when the push is complete.
        views = self._views and not isinstance(link, Gloo)
        return ExchangeBuffers(channel, shard, self._parameters, codec, views=views, back=decoder)

    def _linked(self, number: int, hello: Handshake, before: Link | None = None) -> Link:
        """Return a link to a server, as soon as it can be reached; after `before` only if what it keeps outlives it.

        Raises:
            ServerLost: it can't be reached, or what it kept was lost with it.
        """
        if before is not None and not self._restarts:
            raise ServerLost(f"server {number} has gone, and what it kept can't be reached")
        key = f"{self._prefix}/server/{number}"
        self._store.wait([key], START)
        deadline = time.monotonic() + RESTART_S
        while time.monotonic() < deadline:
            self._check_generation()
            with contextlib.suppress(*LOST):  # it died just now
                if (link := self._link_at(self._store.get(key).decode(), number, hello, before)) is not None:
                    return link
            time.sleep(0.02)
        raise ServerLost(f"server {number} has gone, and was not started again in {RESTART_S:.0f} s")

    def _link_at(self, told: str, number: int, hello: Handshake, before: Link | None) -> Link | None:
        """Return a link to a server that has told the store where it is; None if it isn't there any more."""
        generation, reach, address = told.split(" ", 2)
        link = None if self._over_gloo else connect(address, hello, self._secret, before)
        if link is not None or reach != NETWORK or isinstance(before, SharedMemory):
            return link
        if told == self._addresses[number]:
            return None  # gloo would wait for it
        self._addresses[number] = told
        place = f"{self._prefix}/server/{number}/{generation}/from"
        place = f"{place}/{self._store.add(place, 1)}"
        self._store.set(place, hello.dumps(self._secret, place).hex())
        if not self._comes_to_meet(f"{place}/{READY}", told, number):
            return None
        return meet_over_gloo(self._store, f"{place}/link", hello, self._secret, server=False, before=before)

    def _comes_to_meet(self, ready: str, told: str, number: int) -> bool:
        """Wait until a server meets this worker; returns False if another process has its place by then.

        Args:
            ready: key of the store that the server sets.
            told: address of the server, as the store had it.
            number: of the server.

        Raises:
            Broken: this worker's generation has ended.
            ServerLost: the server has died, or has not answered, and none was started in its place.
        """
        deadline = time.monotonic() + RESTART_S
        while not self._store.check([ready]):
            self._check_generation()
            if self._store.get(f"{self._prefix}/server/{number}").decode() != told:
                return False
            if time.monotonic() >= deadline:
                raise ServerLost(f"server {number} has not met worker {self._worker} in {RESTART_S:.0f} s")
            time.sleep(0.02)
        return True

    def _check_generation(self) -> None:
        """Raise `PeerLost` where workers go together and their generation has ended."""
        if self._generation is not None:
            membership().check(self._generation)

    def begin(
        self, settings: Settings, optimizers: Sequence[Optimizer] | None, version: int,
        *, velocity: Sequence[Tensor] | None = None, lost: Sequence[Tensor | None] = (),
    ) -> None:  # fmt: skip
        """Give the servers the weights and what steps them: the first worker does, and the others' messages wait."""
        self._restarts = bool(settings.snapshot_every)
        for boxes in self._boxes:
            boxes.tables = BEGUN, version
        self._ordered = settings.orders_updates and len(self._boxes) > 1
        if self._worker:
            return
        for number, shard in enumerate(self._shards):
            copies, made = sliced(optimizers or [], self._parameters, shard)
            stepped = None if optimizers is None else copies
            moving = None if velocity is None else flat_part(velocity, shard)
            before = lost[number] if lost else None
            self._asked(number, Begin(settings, stepped, made, shard, self.dtype, version, moving, before))

    def _say(self, number: int, message: Any) -> None:
        self.finish_pull()
        self._boxes[number].link.send(message)

    def _asked(self, number: int, message: Any) -> Any:
        """Return a server's answer."""
        self._say(number, message)
        return self._boxes[number].link.recv()

    def watch(self) -> Callable[[], None]:
        """Let gradients go as soon as they are complete, while `hears`; returns what ends that."""
        return watch(self._parameters, self._shards, self._put)

    def _put(self, server: int, number: int, parameter: Tensor) -> None:
        if self.hears:
            self._boxes[server].put(number, parameter)

    def push(
        self, gradients: Sequence[Tensor | None], *, clock: int = 0, parts: int = 1, leases: tuple[int, ...] = (0,),
        groups: Groups | None = None, hold: bool = False, share: float = 1.0, answered: bool = False,
        clips: Sequence[tuple[str, list[Tensor], float]] = (),
        logged: tuple[dict[str, Any], dict[str, Any]] | None = None,
    ) -> bool:  # fmt: skip
        """Bring gradients, by parameter; None for all of them is a lease without a gradient.

        Where a server that dies is started again, the one that deals is told last, when all others have the gradient,
        so that they have each lease that counts as done. Should this worker die before that, the lease is dealt again,
        and those that have its gradient ignore the second. Otherwise this waits for nothing, unless pushes are
        `answered` (see `Settings.may_drop`) or compressed: a link may have been cut since the lease was dealt, and what
        is kept for later gradients must not change with one that a server doesn't use.

        Args:
            clips: of the sum of all workers: "norm" or "value", parameters, the limit. A norm is that of one server.
            logged: see `Push`; for the server that deals.

        Returns:
            whether the gradient is used, where that is known.
        """
        empty = all(gradient is None for gradient in gradients)
        clipped = [(kind, self._numbers(parameters), limit) for kind, parameters, limit in clips]
        begun = time.perf_counter()
        self.finish_pull()
        if self._ordered and not self._turn().content:  # the lease is dealt again
            return False
        answered = answered or (self._restarts and self._codecs[0][0] is not None)
        for number in (*range(1, len(self._boxes)), 0):
            if not number and self._restarts:
                for other in self._boxes[1:]:
                    self._used(other, empty=empty)
            boxes = self._boxes[number]
            filled = Filled() if empty else boxes.fill(gradients)
            own = [(kind, pieces[number], limit) for kind, pieces, limit in clipped]
            confirm = self._restarts if number else answered
            boxes.link.send(
                Push(clock, parts, leases, empty, filled.missing, filled.rows, groups, hold, filled.scale, share, own,
                     confirm, None if number else logged)
            )  # fmt: skip
        used = self._used(self._boxes[0], empty=empty) if answered else True
        self.pushed_s += time.perf_counter() - begun
        self._count += 1
        self.pushes.append((self._worker, self._count, time.monotonic()))
        return used

    def _used(self, boxes: ExchangeBuffers[Channel], *, empty: bool) -> bool:
        """Wait until a server has handled a push; returns whether it uses the gradient, which is taken back if not."""
        used: bool = boxes.link.recv().used
        if not (used or empty):
            boxes.take_back()
        return used

    def pull(
        self, targets: Sequence[Tensor], version: int = 0, *, to_train: bool = False, one_by_one: bool = False
    ) -> Reply:
        """Bring weights into tensors, by parameter; returns the answer of the first server.

        A gradient of them follows if `to_train`; then rows of tables are left for when it is known which. Where that
        may have to wait for other workers, servers are asked `one_by_one`: two workers that each wait at the other's
        server would wait for ever.
        """

        def message(boxes: ExchangeBuffers[Channel]) -> Pull:
            return Pull(version, to_train, rows={}) if to_train else Pull(version, since=boxes.tables)

        def give(boxes: ExchangeBuffers[Channel], reply: Reply) -> None:
            if to_train:
                boxes.give_weights(targets, tables=False)
                return
            life, counts = reply.content
            boxes.give_weights(targets, tables=counts is None)
            boxes.give_changed(targets, counts or {})
            boxes.tables = life, reply.version

        return self._pulled(message, give, one_by_one=one_by_one)[0]

    def forget_tables(self) -> None:
        """Let whole tables come next: this worker doesn't have those that the servers began with."""
        for boxes in self._boxes:
            boxes.tables = None

    def begin_pull(self, version: int = 0) -> None:
        """Let the weights come, for a gradient, while something else is done; `bring` waits for some of them."""
        self.finish_pull()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(len(self._boxes), thread_name_prefix="fabricx-pull")
        self._pull = Pull(version, to_train=True, rows={})
        self._coming = set(range(len(self._parameters)))
        self._arrivals = [PrefetchTask(boxes, replace(self._pull), self._threads) for boxes in self._boxes]

    def bring(self, numbers: set[int]) -> None:
        """Wait for some parameters, by number, and bring them, if they are on their way."""
        wanted = numbers & self._coming
        if not wanted:
            return
        begun = time.perf_counter()
        self.brought += 1
        for parameter in wanted:
            for server, number in self._where.get(parameter, ()):
                self._arrivals[server].wait_for(number)
                self._boxes[server].give_piece(number, self._parameters)
        self._coming -= wanted
        self.waited_s += time.perf_counter() - begun

    def finish_pull(self) -> tuple[Reply | None, set[int]]:
        """Wait for all that is on its way; returns the first server's answer, and what `bring` wasn't asked for."""
        if not self._arrivals:
            return None, set()
        left = set(self._coming)
        self.bring(left)
        arrivals, self._arrivals = self._arrivals, []
        replies = [arrival.reply() for arrival in arrivals]
        return replies[0], left

    def pull_rows(self, ids: dict[int, Tensor]) -> None:
        """Bring rows of tables into the parameters: their numbers, shape [k], each once, by parameter."""
        self.bring(set(self._coming))
        counts: dict[ExchangeBuffers[Channel], dict[int, int]] = {}

        def wanted(boxes: ExchangeBuffers[Channel]) -> Pull:
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
        self, message: Callable[[ExchangeBuffers[Channel]], Pull],
        give: Callable[[ExchangeBuffers[Channel], Reply], None], *, one_by_one: bool = False,
    ) -> list[Reply]:  # fmt: skip
        """Ask all servers, and do something with each answer; returns those."""
        begun = time.perf_counter()
        self.brought += 1
        self.finish_pull()
        replies = []
        asked: list[Pull] = []
        for boxes in self._boxes if not one_by_one else ():
            asked.append(message(boxes))
            boxes.link.send(asked[-1])
        for number, boxes in enumerate(self._boxes):
            if one_by_one:
                asked.append(message(boxes))
                boxes.link.send(asked[-1])
            reply: Reply = boxes.link.recv()
            if asked[number].dense:
                boxes.unpack(reply, sums=self._sums)
            give(boxes, reply)
            replies.append(reply)
        self.waited_s += time.perf_counter() - begun
        return replies

    def norm(self, clock: int, parameters: Sequence[Tensor]) -> float:
        """Return the 2-norm of some parameters' part of the gradient that is held for an update."""
        squares = 0.0
        for number, pieces in enumerate(self._numbers(parameters)):
            squares += sum(self._asked(number, Norm(clock, pieces)).content)
        return math.sqrt(squares)

    def apply(
        self, clock: int, scales: Sequence[tuple[list[Tensor], float]], limits: Sequence[tuple[list[Tensor], float]],
        groups: Groups | None = None,
    ) -> None:  # fmt: skip
        """Make the update that is held.

        Args:
            clock: number of the update.
            scales: (parameters, factor) to multiply with first.
            limits: (parameters, limit) to cut the elements to then.
            groups: hyperparameters of this update; None for those that came with the gradient.
        """
        scaled = [(self._numbers(parameters), factor) for parameters, factor in scales]
        limited = [(self._numbers(parameters), limit) for parameters, limit in limits]
        for n in range(len(self._boxes)):
            own_scales, own_limits = [(pieces[n], f) for pieces, f in scaled], [(pieces[n], x) for pieces, x in limited]
            self._say(n, Apply(clock, own_scales, own_limits, groups))

    def _numbers(self, parameters: Sequence[Tensor]) -> list[list[int]]:
        """Return the numbers of the pieces of some parameters, by server."""
        wanted = {id(parameter) for parameter in parameters}
        return [
            [n for n, piece in enumerate(shard.pieces) if id(self._parameters[piece.parameter]) in wanted]
            for shard in self._shards
        ]

    def open(self, section: int, leases: int, version: int, workers: tuple[int, ...]) -> None:
        """Begin a section of the data after so many updates, for those workers; every one says so."""
        for number in range(len(self._boxes)):
            self._say(number, Open(section, leases, version, workers))

    def ask(self, section: int, *, wait: bool) -> Granted:
        """Return this worker's next lease."""
        begun = time.perf_counter()
        granted: Granted = self._asked(0, Ask(section, wait))
        self.waited_s += time.perf_counter() - begun
        return granted

    def take_turn(self) -> int:
        """Return the number of the update that this worker's next push makes; others wait until it is there."""
        return self._turn().version

    def _turn(self) -> Reply:
        begun = time.perf_counter()
        reply: Reply = self._asked(0, Turn())
        self.waited_s += time.perf_counter() - begun
        return reply

    def close_section(self, section: int) -> None:
        """Let no more leases of a section be given."""
        self._say(0, Close(section))

    def server_optimizers(self) -> list[ServerOptimizers]:
        """Return the optimizers as each server has them."""
        return [self._asked(number, Tell("optimizers")).content for number in range(len(self._boxes))]

    def velocity(self) -> list[Tensor]:
        """Return the velocity of the servers' outer optimizer, by parameter."""
        return self._by_parameter("velocity")

    def weights(self) -> list[Tensor]:
        """Return the servers' weights, by parameter; what they reckon that this worker has stays."""
        return self._by_parameter("weights")

    def keep_average(self, rule: AverageRule, step: int, averages: Sequence[Tensor]) -> None:
        """Let the servers keep a moving average of the weights; returns when each has begun to.

        Args:
            rule: how it follows the weights.
            step: weight updates of the run so far.
            averages: as they are now, by parameter.
        """
        for number, shard in enumerate(self._shards):
            self._asked(number, Average(rule, step, flat_part(averages, shard).cpu()))

    def averages(self) -> tuple[list[Tensor], int]:
        """Return the servers' moving averages by parameter, and steps of the average since they began."""
        told = [self._asked(number, Tell("average")).content for number in range(len(self._boxes))]
        return self._parts([values for values, _ in told]), told[0][1]

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
        return self._parts([self._asked(number, Tell(what)).content for number in range(len(self._boxes))])

    def _parts(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Return the servers' vectors, in their precision, by parameter."""
        found = [torch.zeros(parameter.shape, dtype=vectors[0].dtype) for parameter in self._parameters]
        for vector, shard in zip(vectors, self._shards, strict=True):
            for part, (start, stop) in zip(shard.parts, shard.spans, strict=True):
                target = part_of(found[part.parameter], part)
                target.copy_(vector[start:stop].view(target.shape))
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

    def logged(self, section: int) -> dict[str, Any]:
        """Return what was logged with the gradients of a section that the server which deals has used."""
        sums: dict[str, Any] = self._asked(0, Tell("logged", section)).content
        return sums

    @property
    def traffic(self) -> tuple[int, int]:
        """Return the bytes of vectors that were sent and received."""
        sent, received = zip(*(link.traffic for link in self._links), strict=True)
        return sum(sent), sum(received)

    def close(self, *, done: bool = True) -> None:
        """Leave the servers; they end, if this was the last who had not `done`."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        for unpin in self._unpin:
            unpin()
        for link in self._links:
            link.close(done=done)
