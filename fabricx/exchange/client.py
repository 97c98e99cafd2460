"""A worker's side: its parameters, and the links to all servers."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar, final

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
        self._store, self._prefix, self._worker, self._over_gloo = store, prefix, worker, over_gloo
        self._codec = (compression, keep)
        self._restarts = False  # is a server that died started again?
        self._opened: Open | None = None
        self._addresses = [""] * servers
        self._boxes = [self._meet(number) for number in range(servers)]

    @property
    def _links(self) -> list[Link]:
        return [boxes.link for boxes in self._boxes]

    def _meet(self, number: int) -> _Boxes:
        """Return a new link to a server; waits until it has an address at which it wasn't lost already."""
        key, pieces = f"{self._prefix}/server/{number}", self._pieces[number]
        hello = Hello(self._worker, sum(piece.stop - piece.start for piece in pieces), self._dtype, same=self._same)
        compression, keep = self._codec
        self._store.wait([key], START)
        deadline = time.monotonic() + RESTART_S
        while time.monotonic() < deadline:
            if (told := self._store.get(key).decode()) != self._addresses[number]:
                self._addresses[number] = told
                with contextlib.suppress(*LOST):  # it died just now
                    link = self._connect(key, told, hello)
                    return _Boxes(link, pieces, Codec(compression, keep=keep) if compression else None)
            time.sleep(0.02)
        raise ServerLost(f"server {number} has gone, and was not started again in {RESTART_S:.0f} s")

    def _connect(self, key: str, told: str, hello: Hello) -> Link:
        """Return a link to a server that has told the store where it is."""
        generation, _, address = told.partition(" ")
        link = None if self._over_gloo else connect(address, hello)
        if link is not None:
            return link
        place = f"{key}/{generation}/from/{self._worker}"
        self._store.set(place, f"{hello.size} {str(hello.dtype).removeprefix('torch.')}")
        return meet_over_gloo(self._store, f"{place}/link", hello, server=False, timeout=timedelta(days=365))

    def _try(self, number: int, action: Callable[[_Boxes], T]) -> T:
        """Return what comes of talking to a server; once more, if it had to be started again.

        Raises:
            ServerLost: it has gone for good.
        """
        lost = False
        while True:
            try:
                if lost:
                    self._boxes[number].link.close()
                    self._boxes[number] = self._meet(number)
                    if self._opened is not None:
                        self._boxes[number].link.send(self._opened)
                return action(self._boxes[number])
            except ServerLost:
                raise
            except LOST as error:
                if not self._restarts:
                    raise ServerLost(f"server {number} has gone, and what it kept can't be reached") from error
                lost = True

    def begin(self, settings: Settings, optimizers: Sequence[Optimizer] | None, version: int) -> None:
        """Give the servers the weights and what steps them: the first worker does, and the others' messages wait."""
        self._restarts = bool(settings.snapshot_every)
        if self._worker:
            return
        for number, pieces in enumerate(self._pieces):
            cuts = [(self._parameters[piece.parameter], piece.start, piece.stop) for piece in pieces]
            copies, made = sliced(optimizers or [], cuts)
            ends = list(itertools.accumulate(piece.numel() for piece in made))
            spans = list(zip([0, *ends], ends, strict=False))
            stepped = None if optimizers is None else copies
            size = ends[-1] if ends else 0
            # Answered, so that it isn't lost with a server that dies now: its snapshot is written by then.
            self._asked(number, Begin(settings, stepped, made, size, self._dtype, version, spans))

    def _say(self, number: int, message: Any) -> None:
        self._try(number, lambda boxes: boxes.link.send(message))

    def _asked(self, number: int, message: Any) -> Any:
        """Return a server's answer."""

        def ask(boxes: _Boxes) -> Any:
            boxes.link.send(message)
            return boxes.link.recv()

        return self._try(number, ask)

    def push(
        self, gradients: Sequence[Tensor | None], *, clock: int = 0, parts: int = 1, lease: int = 0,
        groups: Groups | None = None, hold: bool = False,
    ) -> None:  # fmt: skip
        """Bring gradients, by parameter; None for all of them is a lease without a gradient. Waits for nothing."""
        empty = all(gradient is None for gradient in gradients)

        def send(boxes: _Boxes) -> None:
            missing, size, scale = boxes.fill(gradients) if not empty else (frozenset[int](), 0, 1.0)
            boxes.link.send(Push(clock, parts, lease, empty, missing, groups, hold, scale), vector=size)

        for number in range(len(self._boxes)):
            self._try(number, send)

    def pull(
        self, targets: Sequence[Tensor], version: int = 0, *, to_train: bool = False, one_by_one: bool = False
    ) -> int:
        """Bring weights (or sums) into tensors, by parameter; returns the version that the first server's part has.

        A gradient of them follows if `to_train`. Where that may have to wait for other workers, servers are asked
        `one_by_one`: two workers that each wait at the other's server would wait for ever.
        """
        begun = time.perf_counter()
        versions = []
        self.missing = set(range(len(self._parameters)))
        asked: set[_Boxes] = set()  # links on which the answer is on its way

        def send(boxes: _Boxes) -> None:
            boxes.link.send(Pull(version, to_train))
            asked.add(boxes)

        def bring(boxes: _Boxes) -> None:
            if boxes not in asked:
                send(boxes)
            reply: Reply = boxes.link.recv()
            versions.append(reply.version)
            boxes.empty(targets)
            self.missing -= boxes.present(reply.content)

        if not one_by_one:
            for number in range(len(self._boxes)):
                self._try(number, send)
        for number in range(len(self._boxes)):
            self._try(number, bring)
        self.waited_s += time.perf_counter() - begun
        return versions[0]

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
            [n for n, piece in enumerate(pieces) if id(self._parameters[piece.parameter]) in wanted]
            for pieces in self._pieces
        ]

    def open(self, section: int, leases: int, version: int) -> None:
        """Begin a section of the data after so many updates; every worker says so."""
        self._opened = Open(section, leases, version)
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
        return [
            [self._joined(number, [(pieces, server[which]) for pieces, server in zip(self._pieces, found, strict=True)])
             for number in range(len(self._parameters))]
            for which in range(len(found[0]))
        ]  # fmt: skip

    def counts(self) -> list[Counts]:
        """Return what each server has seen."""
        return [self._asked(number, Tell("counts")).content for number in range(len(self._boxes))]

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
        views, sources = [], []
        for (number, start, stop), source in zip(self._pieces, self._in, strict=True):
            tensor = tensors[number].detach()
            if tensor.is_contiguous():
                views.append(tensor.view(-1)[start:stop])
                sources.append(source)
            else:  # of another memory format: no view of it is a vector
                flat = tensor.reshape(-1)
                flat[start:stop] = source
                tensor.copy_(flat.view(tensor.shape))
        if views:
            torch._foreach_copy_(views, sources)
