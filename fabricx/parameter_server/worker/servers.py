"""All servers of a worker: messages to each server, and the vectors shared with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from torch import Tensor

from fabricx.distributed.compression.codecs import make_codec
from fabricx.parameter_server.wire.link import GlooLink, Handshake
from fabricx.parameter_server.wire.partition import Shard, divide
from fabricx.parameter_server.wire.request_channel import Channel
from fabricx.parameter_server.worker.buffers import ExchangeBuffers, dtype_of
from fabricx.parameter_server.worker.server_locator import ServerLocator


@dataclass(frozen=True, kw_only=True)
class VectorOptions:
    """Contents of the vectors that a worker shares with servers.

    Attributes:
        whole: each parameter is on a single server.
        sums: servers send sums of gradients, and workers step.
        views: gradients may be views of the links' vectors; see `ExchangeBuffers`.
        tables: numbers of the parameters with sparse gradients.
        compression: compression of gradients, a key of `CODECS`; None for none.
        reply_compression: the same for replies.
        keep: see `Codec`.
    """

    whole: bool = False
    sums: bool = False
    views: bool = False
    tables: frozenset[int] = frozenset()
    compression: str | None = None
    reply_compression: str | None = None
    keep: float = 0.01


@final
class Servers:
    """Connections of a worker to all servers.

    Args:
        locator: connects to the servers.
        worker: number of this worker.
        generation: generation of workers in lockstep; None for workers at their own pace.
        parameters: the same on all workers, in the same order.
        servers: number of servers.
        options: contents of the vectors.

    Attributes:
        parameters: see Args.
        options: see Args.
        dtype: data type of the vectors.
        shards: part of the parameters of each server.
        buffers: vectors shared with each server, with the channel.
        before_message: called before each message; it completes a background pull, because replies arrive in order.
    """

    def __init__(
        self, locator: ServerLocator, worker: int, generation: int | None, parameters: Sequence[Tensor],
        servers: int, options: VectorOptions,
    ) -> None:  # fmt: skip
        self.parameters, self.options = list(parameters), options
        self.dtype = dtype_of(parameters)
        self.shards = divide([p.shape for p in parameters], servers, whole=options.whole, by_row=options.tables)
        self.before_message: Callable[[], None] = lambda: None
        self._locator, self._worker, self._generation = locator, worker, generation
        self._unpin: list[Callable[[], None]] = []
        self.buffers = [self._connect(number, shard) for number, shard in enumerate(self.shards)]

    def _connect(self, number: int, shard: Shard) -> ExchangeBuffers[Channel]:
        """Connect to a server."""
        options = self.options
        to_worker = None if options.sums else shard.room  # a sum replaces the gradient in the same memory
        handshake = Handshake(self._worker, self.dtype, shard.room, to_worker, self._generation)
        link = self._locator.connect(number, handshake)
        if any(parameter.is_cuda for parameter in self.parameters):
            self._unpin.append(link.pin())
        codec = None if options.compression is None else make_codec(options.compression, keep=options.keep)
        kind = options.reply_compression
        reply_codec = None if kind is None else make_codec(kind, keep=options.keep, feedback=False)
        again = replace(handshake, resumes=True)
        channel = Channel(link, lambda previous: self._locator.connect(number, again, previous))
        # Gloo sends from the vector in the background, so it must not change; shared memory is read after the push.
        views = options.views and not isinstance(link, GlooLink)
        return ExchangeBuffers(channel, shard, self.parameters, codec, views=views, reply_codec=reply_codec)

    def notify(self, number: int, message: Any) -> None:
        """Send a message that has no reply to a server.

        Args:
            number: the server's number.
            message: message of `wire/messages.py`.
        """
        self.before_message()
        self.buffers[number].link.send(message)

    def request(self, number: int, message: Any) -> Any:
        """Send a message to a server, and return the reply.

        Args:
            number: the server's number.
            message: message of `wire/messages.py`.
        """
        self.before_message()
        self.buffers[number].link.send(message)
        return self.buffers[number].link.recv()

    def numbers(self, parameters: Sequence[Tensor]) -> list[list[int]]:
        """Return the numbers of the pieces of parameters, by server.

        Args:
            parameters: any of the parameters.
        """
        wanted = {id(parameter) for parameter in parameters}
        return [
            [n for n, piece in enumerate(shard.pieces) if id(self.parameters[piece.parameter]) in wanted]
            for shard in self.shards
        ]

    @property
    def traffic(self) -> tuple[int, int]:
        """Return the bytes of vectors (sent, received)."""
        sent, received = zip(*(buffers.link.traffic for buffers in self.buffers), strict=True)
        return sum(sent), sum(received)

    def close(self, *, done: bool) -> None:
        """Disconnect.

        Args:
            done: this worker does not need the servers any more.
        """
        for unpin in self._unpin:
            unpin()
        for buffers in self.buffers:
            buffers.link.close(done=done)
