"""A worker's client of all parameter servers."""

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
from fabricx.distributed.codecs import make_codec
from fabricx.distributed.generations import membership
from fabricx.errors import ServerLost
from fabricx.parameter_server.optimizer_parts import ServerOptimizers, flat_part, part_of, sliced
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
from fabricx.parameter_server.wire.messages import (
    BEGUN,
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
    register_grad_hooks,
    write_summed_gradients,
)
from fabricx.parameter_server.worker.prefetch import PrefetchTask

START: Final = timedelta(minutes=5)  # maximum time for a server to start
RESTART_S: Final = 60.0  # maximum time for a server to restart


@final
class Client:
    """Pushes gradients to all servers, and pulls weights or sums of gradients.

    Args:
        store: store in which servers publish their addresses.
        prefix: of the run's keys.
        secret: key of the run.
        worker: number of this worker.
        parameters: the same on all workers, in the same order.
        servers: number of servers.
        whole: each parameter is on a single server.
        over_gloo: use gloo also for servers on this machine.
        sums: servers send sums of gradients, and workers step.
        views: gradients may be views of the links' vectors; see `ExchangeBuffers`.
        tables: numbers of the parameters with sparse gradients.
        compression, back, keep: of gradients, and of replies; see `Codec`.
        generation: of workers in lockstep; None for workers at their own pace.

    Attributes:
        waited_s: seconds of waiting for replies.
        pushed_s: seconds of pushing.
        pushes: newest pushes: (worker, number, time on the monotonic clock).
        pulls: number of pulls.
        partial: the weights of this worker may lack updates of the servers' weights.
        sends_early: the gradients of the present backward are final, and can be sent as soon as they are computed.
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
        self.waited_s = 0.0
        self.pushed_s = 0.0
        self.pushes: deque[tuple[int, int, float]] = deque(maxlen=4096)
        self._count = 0
        self.pulls = 0
        self._shards = divide([parameter.shape for parameter in parameters], servers, whole=whole, by_row=tables)
        self.dtype = dtype_of(parameters)
        self._store, self._prefix, self._worker, self._over_gloo = store, prefix, worker, over_gloo
        self._secret = secret
        self._codecs = [(kind, feedback) for kind, feedback in ((compression, True), (back, False))]
        self._keep = keep
        self.partial = bool(tables) or back is not None
        self._restarts = False  # dead servers are restarted
        self._ordered = False  # all servers receive updates in the same order
        self.sends_early = True
        self._threads: ThreadPoolExecutor | None = None
        self._prefetches: list[PrefetchTask] = []
        self._pending: set[int] = set()  # parameters that a prefetch has not delivered yet
        self._pull = Pull()
        self._where = pieces_by_parameter(self._shards)
        self._unpin: list[Callable[[], None]] = []
        self._addresses = [""] * servers
        self._buffers = [self._connect(number) for number in range(servers)]

    @property
    def _links(self) -> list[Channel]:
        return [buffers.link for buffers in self._buffers]

    def _connect(self, number: int) -> ExchangeBuffers[Channel]:
        """Return the buffers and the link between this worker and a server."""
        shard = self._shards[number]
        back = None if self._sums else shard.room
        hello = Handshake(self._worker, self.dtype, shard.room, back, self._generation)
        link = self._link(number, hello)
        if any(parameter.is_cuda for parameter in self._parameters):
            self._unpin.append(link.pin())
        codec, decoder = (
            make_codec(kind, keep=self._keep, feedback=feedback) if kind else None for kind, feedback in self._codecs
        )
        again = replace(hello, resumes=True)
        channel = Channel(link, lambda before: self._link(number, again, before))
        # Gloo sends from the vector in the background, so it must not change; shared memory is read after the push.
        views = self._views and not isinstance(link, Gloo)
        return ExchangeBuffers(channel, shard, self._parameters, codec, views=views, back=decoder)

    def _link(self, number: int, hello: Handshake, before: Link | None = None) -> Link:
        """Connect to a server as soon as it can be reached.

        Raises:
            ServerLost: the server can't be reached; or `before` has ended and the server's state is lost.
        """
        if before is not None and not self._restarts:
            raise ServerLost(f"server {number} has ended, and its state is lost")
        key = f"{self._prefix}/server/{number}"
        self._store.wait([key], START)
        deadline = time.monotonic() + RESTART_S
        while time.monotonic() < deadline:
            self._check_generation()
            with contextlib.suppress(*LOST):  # the server has died while connecting
                if (link := self._link_at(self._store.get(key).decode(), number, hello, before)) is not None:
                    return link
            time.sleep(0.02)
        raise ServerLost(f"server {number} has ended, and was not restarted within {RESTART_S:.0f} s")

    def _link_at(self, published: str, number: int, hello: Handshake, before: Link | None) -> Link | None:
        """Connect to a server at its published address; returns None if the server has ended."""
        generation, reach, address = published.split(" ", 2)
        link = None if self._over_gloo else connect(address, hello, self._secret, before)
        if link is not None or reach != NETWORK or isinstance(before, SharedMemory):
            return link
        if published == self._addresses[number]:
            return None  # the address of the link that has ended: gloo would wait for the dead server
        self._addresses[number] = published
        key = f"{self._prefix}/server/{number}/{generation}/from"
        key = f"{key}/{self._store.add(key, 1)}"
        self._store.set(key, hello.dumps(self._secret, key).hex())
        if not self._await_server(f"{key}/{READY}", published, number):
            return None
        return meet_over_gloo(self._store, f"{key}/link", hello, self._secret, server=False, before=before)

    def _await_server(self, ready: str, published: str, number: int) -> bool:
        """Wait until a server is ready to connect; returns False if the server was restarted meanwhile.

        Args:
            ready: store key that the server sets.
            published: address of the server.
            number: of the server.

        Raises:
            PeerLost: this worker's generation has ended.
            ServerLost: the server has died or has not answered, and was not restarted.
        """
        deadline = time.monotonic() + RESTART_S
        while not self._store.check([ready]):
            self._check_generation()
            if self._store.get(f"{self._prefix}/server/{number}").decode() != published:
                return False
            if time.monotonic() >= deadline:
                raise ServerLost(f"server {number} has not answered worker {self._worker} within {RESTART_S:.0f} s")
            time.sleep(0.02)
        return True

    def _check_generation(self) -> None:
        """Raise `PeerLost` if the workers are in lockstep and their generation has ended."""
        if self._generation is not None:
            membership().check(self._generation)

    def begin(
        self, settings: Settings, optimizers: Sequence[Optimizer] | None, version: int,
        *, velocity: Sequence[Tensor] | None = None, lost: Sequence[Tensor | None] = (),
    ) -> None:  # fmt: skip
        """Initialise the servers with weights and optimizers; the first worker does, and messages of the others wait.

        Args:
            settings: behaviour of the servers.
            optimizers: of the user, over the parameters; None if servers only sum.
            version: number of updates made before.
            velocity: of the outer optimizer, by parameter; None for zero.
            lost: error feedback of the servers' compressed sums, by server.
        """
        self._restarts = bool(settings.snapshot_every)
        for buffers in self._buffers:
            buffers.tables = BEGUN, version
        self._ordered = settings.orders_updates and len(self._buffers) > 1
        if self._worker:
            return
        for number, shard in enumerate(self._shards):
            copies, pieces = sliced(optimizers or [], self._parameters, shard)
            stepped = None if optimizers is None else copies
            moving = None if velocity is None else flat_part(velocity, shard)
            before = lost[number] if lost else None
            self._request(number, Begin(settings, stepped, pieces, shard, self.dtype, version, moving, before))

    def _send(self, number: int, message: Any) -> None:
        self.finish_pull()
        self._buffers[number].link.send(message)

    def _request(self, number: int, message: Any) -> Any:
        """Send a message and return the reply."""
        self._send(number, message)
        return self._buffers[number].link.recv()

    def register_grad_hooks(self) -> Callable[[], None]:
        """Register hooks that send complete gradients while `sends_early`; returns a function that removes them."""
        return register_grad_hooks(self._parameters, self._shards, self._put)

    def _put(self, server: int, number: int, parameter: Tensor) -> None:
        if self.sends_early:
            self._buffers[server].post_piece(number, parameter)

    def push(
        self, gradients: Sequence[Tensor | None], *, clock: int = 0, parts: int = 1, leases: tuple[int, ...] = (0,),
        groups: Groups | None = None, hold: bool = False, share: float = 1.0, answered: bool = False,
        clips: Sequence[tuple[str, list[Tensor], float]] = (),
        logged: tuple[dict[str, Any], dict[str, Any]] | None = None,
    ) -> bool:  # fmt: skip
        """Push gradients to all servers.

        If dead servers are restarted, the server that grants leases receives the push last, when all other servers have
        confirmed it: they then have every lease that counts as complete. If this worker dies before that, the lease is
        granted again, and servers that have its gradient ignore the second one. Otherwise this does not wait, unless
        pushes are `answered` (see `Settings.may_drop`) or compressed: a link may have been lost since the lease was
        granted, and the error feedback must not include a gradient that a server does not use.

        Args:
            gradients: by parameter; None for a parameter without a gradient. Without any gradient, the lease counts as
                complete.
            clock, parts, leases, hold, share: see `Push`.
            groups: hyperparameters; None for no change.
            answered: wait for a reply whether the gradient is used.
            clips: clipping of the sum over workers: ("norm" or "value", parameters, limit). A norm is that of a single
                server.
            logged: see `Push`; for the server that grants leases.

        Returns:
            False if the gradient is known not to be used.
        """
        empty = all(gradient is None for gradient in gradients)
        clipped = [(kind, self._numbers(parameters), limit) for kind, parameters, limit in clips]
        begun = time.perf_counter()
        self.finish_pull()
        if self._ordered and not self._turn().content:  # the gradient would not be used, and the lease is granted again
            return False
        answered = answered or (self._restarts and self._codecs[0][0] is not None)
        for number in (*range(1, len(self._buffers)), 0):
            if not number and self._restarts:
                for other in self._buffers[1:]:
                    self._confirmed(other, empty=empty)
            buffers = self._buffers[number]
            filled = Filled() if empty else buffers.post_gradients(gradients)
            own_clips = [(kind, pieces[number], limit) for kind, pieces, limit in clipped]
            confirm = self._restarts if number else answered
            buffers.link.send(
                Push(clock, parts, leases, empty, filled.missing, filled.rows, groups, hold, filled.scale, share,
                     own_clips, confirm, None if number else logged)
            )  # fmt: skip
        used = self._confirmed(self._buffers[0], empty=empty) if answered else True
        self.pushed_s += time.perf_counter() - begun
        self._count += 1
        self.pushes.append((self._worker, self._count, time.monotonic()))
        return used

    def _confirmed(self, buffers: ExchangeBuffers[Channel], *, empty: bool) -> bool:
        """Wait for the reply to a push; if the gradient is not used, revert the error feedback."""
        used: bool = buffers.link.recv().used
        if not (used or empty):
            buffers.undo_feedback()
        return used

    def pull(
        self, targets: Sequence[Tensor], version: int = 0, *, to_train: bool = False, one_by_one: bool = False
    ) -> Reply:
        """Pull weights from all servers; returns the reply of the first server.

        Args:
            targets: tensors to write, by parameter.
            version: minimum version.
            to_train: a gradient of these weights will follow; rows of tables are then pulled when they are looked up.
            one_by_one: request from the next server after the reply of the previous server. Required if a pull may wait
                for other workers: two workers that wait at each other's server would wait forever.
        """

        def message(buffers: ExchangeBuffers[Channel]) -> Pull:
            return Pull(version, to_train, rows={}) if to_train else Pull(version, since=buffers.tables)

        def write(buffers: ExchangeBuffers[Channel], reply: Reply) -> None:
            if to_train:
                buffers.write_weights(targets, tables=False)
                return
            life, counts = reply.content
            buffers.write_weights(targets, tables=counts is None)
            buffers.write_changed_rows(targets, counts or {})
            buffers.tables = life, reply.version

        return self._pull_all(message, write, one_by_one=one_by_one)[0]

    def forget_tables(self) -> None:
        """Pull whole tables next: this worker does not have the tables with which the servers have begun."""
        for buffers in self._buffers:
            buffers.tables = None

    def begin_pull(self, version: int = 0) -> None:
        """Start to pull weights in the background, for a gradient; `await_parameters` waits for some of them.

        Args:
            version: minimum version.
        """
        self.finish_pull()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(len(self._buffers), thread_name_prefix="fabricx-pull")
        self._pull = Pull(version, to_train=True, rows={})
        self._pending = set(range(len(self._parameters)))
        self._prefetches = [PrefetchTask(buffers, replace(self._pull), self._threads) for buffers in self._buffers]

    def await_parameters(self, numbers: set[int]) -> None:
        """Wait for parameters that are being pulled, and write them.

        Args:
            numbers: of the parameters; others than pending ones are ignored.
        """
        wanted = numbers & self._pending
        if not wanted:
            return
        begun = time.perf_counter()
        self.pulls += 1
        for parameter in wanted:
            for server, number in self._where.get(parameter, ()):
                self._prefetches[server].wait_for(number)
                self._buffers[server].write_piece(number, self._parameters)
        self._pending -= wanted
        self.waited_s += time.perf_counter() - begun

    def finish_pull(self) -> tuple[Reply | None, set[int]]:
        """Wait for the background pull; returns the first server's reply, and the parameters still pending."""
        if not self._prefetches:
            return None, set()
        late = set(self._pending)
        self.await_parameters(late)
        prefetches, self._prefetches = self._prefetches, []
        replies = [prefetch.reply() for prefetch in prefetches]
        return replies[0], late

    def pull_rows(self, ids: dict[int, Tensor]) -> None:
        """Pull rows of tables into the parameters.

        Args:
            ids: unique row ids, shape [k], by parameter number.
        """
        self.await_parameters(set(self._pending))
        counts: dict[ExchangeBuffers[Channel], dict[int, int]] = {}

        def wanted(buffers: ExchangeBuffers[Channel]) -> Pull:
            counts[buffers] = buffers.post_row_ids(ids)
            return Pull(dense=False, rows=counts[buffers])

        self._pull_all(wanted, lambda buffers, reply: buffers.write_rows(self._parameters, counts[buffers]))

    def pull_sums(self, version: int) -> None:
        """Pull the sums of gradients into `parameter.grad`; None for parameters without a gradient on any worker.

        Args:
            version: number of the update.
        """
        replies = self._pull_all(lambda buffers: Pull(version), lambda buffers, reply: None)
        missing, counts = zip(*(reply.content for reply in replies), strict=True)
        rows = [buffers.received_rows(count) for buffers, count in zip(self._buffers, counts, strict=True)]
        write_summed_gradients(self._parameters, self._buffers, missing, rows)

    def _pull_all(
        self, message: Callable[[ExchangeBuffers[Channel]], Pull],
        write: Callable[[ExchangeBuffers[Channel], Reply], None], *, one_by_one: bool = False,
    ) -> list[Reply]:  # fmt: skip
        """Request from all servers, call `write` for each reply, and return the replies."""
        begun = time.perf_counter()
        self.pulls += 1
        self.finish_pull()
        replies = []
        asked: list[Pull] = []
        for buffers in self._buffers if not one_by_one else ():
            asked.append(message(buffers))
            buffers.link.send(asked[-1])
        for number, buffers in enumerate(self._buffers):
            if one_by_one:
                asked.append(message(buffers))
                buffers.link.send(asked[-1])
            reply: Reply = buffers.link.recv()
            if asked[number].dense:
                buffers.unpack(reply, sums=self._sums)
            write(buffers, reply)
            replies.append(reply)
        self.waited_s += time.perf_counter() - begun
        return replies

    def norm(self, clock: int, parameters: Sequence[Tensor]) -> float:
        """Return the 2-norm of a held gradient.

        Args:
            clock: number of the update.
            parameters: part of the gradient.
        """
        squares = 0.0
        for number, pieces in enumerate(self._numbers(parameters)):
            squares += sum(self._request(number, Norm(clock, pieces)).content)
        return math.sqrt(squares)

    def apply(
        self, clock: int, scales: Sequence[tuple[list[Tensor], float]], limits: Sequence[tuple[list[Tensor], float]],
        groups: Groups | None = None,
    ) -> None:  # fmt: skip
        """Make a held update.

        Args:
            clock: number of the update.
            scales: (parameters, factor), applied first.
            limits: (parameters, limit) for the elements, applied second.
            groups: hyperparameters of this update; None for those of the push.
        """
        scaled = [(self._numbers(parameters), factor) for parameters, factor in scales]
        limited = [(self._numbers(parameters), limit) for parameters, limit in limits]
        for n in range(len(self._buffers)):
            own_scales, own_limits = [(pieces[n], f) for pieces, f in scaled], [(pieces[n], x) for pieces, x in limited]
            self._send(n, Apply(clock, own_scales, own_limits, groups))

    def _numbers(self, parameters: Sequence[Tensor]) -> list[list[int]]:
        """Return the numbers of the pieces of parameters, by server."""
        wanted = {id(parameter) for parameter in parameters}
        return [
            [n for n, piece in enumerate(shard.pieces) if id(self._parameters[piece.parameter]) in wanted]
            for shard in self._shards
        ]

    def open(self, section: int, leases: int, version: int, workers: tuple[int, ...]) -> None:
        """Begin a section of the data; every worker calls it.

        Args:
            section: number of the section.
            leases: number of leases.
            version: present version of the weights.
            workers: numbers of the workers.
        """
        for number in range(len(self._buffers)):
            self._send(number, Open(section, leases, version, workers))

    def ask(self, section: int, *, wait: bool) -> Granted:
        """Request this worker's next lease.

        Args:
            section: number of the section.
            wait: wait for a lease or the end of the section; this worker holds no lease.
        """
        begun = time.perf_counter()
        granted: Granted = self._request(0, Ask(section, wait))
        self.waited_s += time.perf_counter() - begun
        return granted

    def take_turn(self) -> int:
        """Return the number of the update of this worker's next push, for which other workers wait."""
        return self._turn().version

    def _turn(self) -> Reply:
        begun = time.perf_counter()
        reply: Reply = self._request(0, Turn())
        self.waited_s += time.perf_counter() - begun
        return reply

    def close_section(self, section: int) -> None:
        """End the distribution of leases of a section.

        Args:
            section: number of the section.
        """
        self._send(0, Close(section))

    def server_optimizers(self) -> list[ServerOptimizers]:
        """Return the optimizers of each server."""
        return [self._request(number, Tell("optimizers")).content for number in range(len(self._buffers))]

    def velocity(self) -> list[Tensor]:
        """Return the velocity of the servers' outer optimizer, by parameter."""
        return self._by_parameter("velocity")

    def weights(self) -> list[Tensor]:
        """Return the servers' weights, by parameter, without effect on compressed differences."""
        return self._by_parameter("weights")

    def keep_average(self, rule: AverageRule, step: int, averages: Sequence[Tensor]) -> None:
        """Start moving averages of the weights on all servers; returns when all have started.

        Args:
            rule: decay of the average.
            step: weight updates of the run so far.
            averages: present averages, by parameter.
        """
        for number, shard in enumerate(self._shards):
            self._request(number, Average(rule, step, flat_part(averages, shard).cpu()))

    def averages(self) -> tuple[list[Tensor], int]:
        """Return the servers' moving averages by parameter, and the number of updates of the average."""
        replies = [self._request(number, Tell("average")).content for number in range(len(self._buffers))]
        return self._parts([values for values, _ in replies]), replies[0][1]

    def received_weights(self) -> list[Tensor | None]:
        """Return the weights received from each server, to which compressed differences refer; None without."""
        return [buffers.received_weights for buffers in self._buffers]

    def set_received_weights(self, received: Sequence[Tensor | None]) -> None:
        """Restore the weights to which compressed differences refer, here and on the servers.

        Args:
            received: result of `received_weights`.
        """
        for number, weights in enumerate(received):
            if weights is not None:
                self._buffers[number].received_weights = weights
                self._send(number, Have(weights))

    def _by_parameter(self, what: Literal["velocity", "weights"]) -> list[Tensor]:
        return self._parts([self._request(number, Tell(what)).content for number in range(len(self._buffers))])

    def _parts(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Return the servers' vectors by parameter, in their dtype."""
        whole = [torch.zeros(parameter.shape, dtype=vectors[0].dtype) for parameter in self._parameters]
        for vector, shard in zip(vectors, self._shards, strict=True):
            for part, (start, stop) in zip(shard.parts, shard.spans, strict=True):
                target = part_of(whole[part.parameter], part)
                target.copy_(vector[start:stop].view(target.shape))
        return whole

    @property
    def kept(self) -> list[Tensor]:
        """Return this worker's error feedback of compressed gradients, by server."""
        return [buffers.kept for buffers in self._buffers]

    @kept.setter
    def kept(self, lost: Sequence[Tensor]) -> None:
        for buffers, error in zip(self._buffers, lost, strict=True):
            buffers.kept = error

    def lost(self) -> list[Tensor | None]:
        """Return the servers' error feedback of compressed sums."""
        return [self._request(number, Tell("lost")).content for number in range(len(self._buffers))]

    def counts(self) -> list[Counts]:
        """Return the statistics of each server."""
        return [self._request(number, Tell("counts")).content for number in range(len(self._buffers))]

    def logged(self, section: int) -> dict[str, Any]:
        """Return the metric sums of the used gradients of a section.

        Args:
            section: number of the section.
        """
        sums: dict[str, Any] = self._request(0, Tell("logged", section)).content
        return sums

    @property
    def traffic(self) -> tuple[int, int]:
        """Return the bytes of vectors (sent, received)."""
        sent, received = zip(*(link.traffic for link in self._links), strict=True)
        return sum(sent), sum(received)

    def close(self, *, done: bool = True) -> None:
        """Disconnect from the servers, which end when all workers are done.

        Args:
            done: this worker has finished.
        """
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        for unpin in self._unpin:
            unpin()
        for link in self._links:
            link.close(done=done)
