"""A worker's side: its parameters, and the links to all servers."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabricx.comm.links import LOST, Hello, Link, Store, connect, meet_over_gloo
from fabricx.errors import ServerLost
from fabricx.exchange.compression import Codec
from fabricx.exchange.layout import Piece, cut
from fabricx.exchange.messages import (
    Apply,
    Ask,
    Begin,
    Close,
    Counts,
    Granted,
    Groups,
    Norm,
    Open,
    Pull,
    Push,
    Reply,
    Settings,
    Tell,
)
from fabricx.exchange.rules import sliced

START = timedelta(minutes=5)  # how long a server may take to start


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
        same: all workers pull the same sums, each before the next one is made.
        compression, keep: of gradients; see `Codec`.
    """

    def __init__(
        self, store: Store, prefix: str, worker: int, parameters: Sequence[Tensor], servers: int,
        *, whole: bool = False, over_gloo: bool = False, same: bool = False,
        compression: str | None = None, keep: float = 0.01,
    ) -> None:  # fmt: skip
        self._same = same
        self._parameters = list(parameters)
        self.waited_s = 0.0  # for servers to answer
        self.missing: set[int] = set()  # numbers of parameters that had no gradient in the newest sum
        self._pieces = cut([parameter.numel() for parameter in parameters], servers, whole=whole)
        double = any(parameter.dtype == torch.float64 for parameter in parameters)
        self._dtype = torch.float64 if double else torch.float32
        self._links = [self._meet(store, f"{prefix}/server/{number}", worker, over_gloo) for number in range(servers)]
        self._boxes = [
            _Boxes(link, pieces, Codec(compression, keep=keep) if compression else None)
            for link, pieces in zip(self._links, self._pieces, strict=True)
        ]

    def _meet(self, store: Store, key: str, worker: int, over_gloo: bool) -> Link:
        number = int(key.rpartition("/")[2])
        size = sum(piece.stop - piece.start for piece in self._pieces[number])
        hello = Hello(worker, size, self._dtype, same=self._same)
        store.wait([key], START)
        link = None if over_gloo else connect(store.get(key).decode(), hello)
        if link is not None:
            return link
        key = f"{key}/from/{worker}"
        store.set(key, f"{hello.size} {str(hello.dtype).removeprefix('torch.')}")
        return meet_over_gloo(store, f"{key}/link", hello, server=False, timeout=timedelta(days=365))

    def begin(self, settings: Settings, optimizers: Sequence[Optimizer] | None, version: int) -> None:
        """Give the servers the weights and what steps them; one worker does, the others' messages wait until then."""
        for link, pieces in zip(self._links, self._pieces, strict=True):
            cuts = [(self._parameters[piece.parameter], piece.start, piece.stop) for piece in pieces]
            copies, made = sliced(optimizers or [], cuts)
            ends = list(itertools.accumulate(piece.numel() for piece in made))
            spans = list(zip([0, *ends], ends, strict=False))
            stepped = None if optimizers is None else copies
            link.send(Begin(settings, stepped, made, link.hello.size, self._dtype, version, spans))

    def push(
        self, gradients: Sequence[Tensor | None], *, clock: int = 0, parts: int = 1, lease: int = 0,
        groups: Groups | None = None, hold: bool = False,
    ) -> None:  # fmt: skip
        """Bring gradients, by parameter; None for all of them is a lease without a gradient. Waits for nothing."""
        empty = all(gradient is None for gradient in gradients)
        for boxes in self._boxes:
            missing, size, scale = boxes.fill(gradients) if not empty else (frozenset[int](), 0, 1.0)
            with _alive():
                boxes.link.send(Push(clock, parts, lease, empty, missing, groups, hold, scale), vector=size)

    def pull(
        self, targets: Sequence[Tensor], version: int = 0, *, to_train: bool = False, one_by_one: bool = False
    ) -> int:
        """Bring weights (or sums) into tensors, by parameter; returns the version that the oldest part has.

        A gradient of them follows if `to_train`. Where that may have to wait for other workers, servers are asked
        `one_by_one`: two workers that each wait at the other's server would wait for ever.
        """
        begun = time.perf_counter()
        versions = []
        self.missing = set(range(len(self._parameters)))
        with _alive():
            for link in self._links if not one_by_one else ():
                link.send(Pull(version, to_train))
            for boxes in self._boxes:
                if one_by_one:
                    boxes.link.send(Pull(version, to_train))
                reply: Reply = boxes.link.recv()
                versions.append(reply.version)
                boxes.empty(targets)
                self.missing -= boxes.present(reply.content)
        self.waited_s += time.perf_counter() - begun
        return min(versions)

    def norm(self, clock: int, parameters: Sequence[Tensor]) -> float:
        """Return the 2-norm of some parameters' part of the gradient that is held for an update."""
        squares = 0.0
        for link, pieces in zip(self._links, self._numbers(parameters), strict=True):
            with _alive():
                link.send(Norm(clock, pieces))
                squares += sum(link.recv().content)
        return math.sqrt(squares)

    def apply(
        self, clock: int, scales: Sequence[tuple[list[Tensor], float]], limits: Sequence[tuple[list[Tensor], float]]
    ) -> None:  # fmt: skip
        """Make the update that is held, scaled and cut: (parameters, factor), (parameters, limit)."""
        cut_scales = [(self._numbers(parameters), factor) for parameters, factor in scales]
        cut_limits = [(self._numbers(parameters), limit) for parameters, limit in limits]
        for number, link in enumerate(self._links):
            with _alive():
                link.send(
                    Apply(clock, [(p[number], f) for p, f in cut_scales], [(p[number], x) for p, x in cut_limits])
                )

    def _numbers(self, parameters: Sequence[Tensor]) -> list[list[int]]:
        """Return the numbers of the pieces of some parameters, by server."""
        wanted = {id(parameter) for parameter in parameters}
        return [
            [n for n, piece in enumerate(pieces) if id(self._parameters[piece.parameter]) in wanted]
            for pieces in self._pieces
        ]

    def open(self, section: int, leases: int) -> None:
        """Begin a section of the data; every worker says so."""
        for link in self._links:
            with _alive():
                link.send(Open(section, leases))

    def ask(self, section: int, *, wait: bool) -> Granted:
        """Return this worker's next lease."""
        begun = time.perf_counter()
        with _alive():
            self._links[0].send(Ask(section, wait))
            granted: Granted = self._links[0].recv()
        self.waited_s += time.perf_counter() - begun
        return granted

    def close_section(self, section: int) -> None:
        """Let no more leases of a section be given."""
        with _alive():
            self._links[0].send(Close(section))

    def optimizer_states(self) -> list[list[dict[str, Any]]]:
        """Return what each optimizer remembers of each parameter, whole."""
        found: list[list[list[dict[str, Any]]]] = []
        for link in self._links:
            with _alive():
                link.send(Tell("state"))
                found.append(link.recv().content)
        return [
            [self._joined(number, [(pieces, server[which]) for pieces, server in zip(self._pieces, found, strict=True)])
             for number in range(len(self._parameters))]
            for which in range(len(found[0]))
        ]  # fmt: skip

    def counts(self) -> list[Counts]:
        """Return what each server has seen."""
        told = []
        for link in self._links:
            with _alive():
                link.send(Tell("counts"))
                told.append(link.recv().content)
        return told

    @property
    def traffic(self) -> tuple[int, int]:
        """Return the bytes of vectors that were sent and received."""
        return sum(link.sent for link in self._links), sum(link.received for link in self._links)

    def close(self) -> None:
        """Leave the servers."""
        for link in self._links:
            link.close()

    def _joined(self, number: int, servers: list[tuple[list[Piece], list[dict[str, Any]]]]) -> dict[str, Any]:
        """Put together what servers remember of the pieces of one parameter."""
        parameter = self._parameters[number]
        states = [
            (piece, state)
            for pieces, mine in servers
            for piece, state in zip(pieces, mine, strict=True)
            if piece.parameter == number and state
        ]
        if not states:
            return {}
        joined: dict[str, Any] = {}
        for key, first in states[0][1].items():
            if isinstance(first, Tensor) and first.numel() == states[0][0].stop - states[0][0].start and first.dim():
                whole = torch.cat([state[key].reshape(-1) for _, state in states])
                joined[key] = whole.view(parameter.shape).to(parameter.device)
            else:
                joined[key] = first
        return joined


class _Boxes:
    """A link's vectors, cut into views of the pieces."""

    def __init__(self, link: Link, pieces: list[Piece], codec: Codec | None) -> None:
        self.link, self._pieces, self._codec = link, pieces, codec
        sizes = [piece.stop - piece.start for piece in pieces]
        self._plain = link.outbox if codec is None else torch.zeros_like(link.outbox)
        self._out = list(self._plain.split(sizes))
        self._in = list(link.inbox.split(sizes))

    def fill(self, gradients: Sequence[Tensor | None]) -> tuple[frozenset[int], int, float]:
        """Bring gradients into the outbox; returns the pieces that have none, the bytes, and the scale."""
        missing = []
        targets, sources = [], []
        for number, (piece, target) in enumerate(zip(self._pieces, self._out, strict=True)):
            gradient = gradients[piece.parameter]
            if gradient is None:
                target.zero_()
                missing.append(number)
            else:
                targets.append(target)
                sources.append(gradient.detach().reshape(-1)[piece.start : piece.stop])
        if targets:
            torch._foreach_copy_(targets, sources)
        if self._codec is None:
            return frozenset(missing), self._plain.nbytes, 1.0
        scale = self._codec.encode(self._plain, self.link.outbox.view(torch.uint8))
        return frozenset(missing), self._codec.bytes(len(self._plain)), scale

    def present(self, missing: frozenset[int]) -> set[int]:
        """Return the numbers of the parameters that have another piece here than those that are missing."""
        return {piece.parameter for number, piece in enumerate(self._pieces) if number not in missing}

    def empty(self, tensors: Sequence[Tensor]) -> None:
        """Copy the inbox into tensors."""
        if self._pieces:
            views = [tensors[piece.parameter].detach().view(-1)[piece.start : piece.stop] for piece in self._pieces]
            torch._foreach_copy_(views, self._in)


@contextlib.contextmanager
def _alive() -> Iterator[None]:
    """Say that a server is gone, rather than that a socket is."""
    try:
        yield
    except LOST as error:
        raise ServerLost("a parameter server has gone, and what it kept can't be reached") from error
