"""Pulls of weights, rows and sums from all servers, at once or in the background."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import final

from torch import Tensor

from fabricx.parameter_server.optimizer_parts import flat_part
from fabricx.parameter_server.wire.messages import INITIAL_HISTORY, Pull, Reply, SetReceivedWeights
from fabricx.parameter_server.wire.partition import Shard
from fabricx.parameter_server.wire.request_channel import Channel
from fabricx.parameter_server.worker.buffers import ExchangeBuffers, write_summed_gradients
from fabricx.parameter_server.worker.exchange import ExchangeStatistics
from fabricx.parameter_server.worker.gradient_hooks import pieces_by_parameter
from fabricx.parameter_server.worker.prefetch import PrefetchTask
from fabricx.parameter_server.worker.servers import Servers

Arrived = Callable[[Reply, set[int]], None]  # (reply of the first server, numbers of the parameters written last)


@final
class WeightPulls:
    """Pulls from all servers.

    Args:
        servers: this worker's servers.
        statistics: this worker's statistics, updated in place.

    Attributes:
        partial: the weights of this worker may lack updates of the servers' weights.
        lacks_rows: tables of this worker may lack updates that its other weights have.
    """

    def __init__(self, servers: Servers, statistics: ExchangeStatistics) -> None:
        self.partial = bool(servers.options.tables) or servers.options.reply_compression is not None
        self.lacks_rows = True
        self._servers, self._statistics = servers, statistics
        self._threads: ThreadPoolExecutor | None = None
        self._prefetches: list[PrefetchTask] = []
        self._pending: set[int] = set()  # parameters that the background pull has not written yet
        self._arrived: Arrived = lambda reply, late: None
        self._where = pieces_by_parameter(servers.shards)
        servers.before_message = self.finish

    def pull(
        self, targets: Sequence[Tensor], version: int = 0, *, to_train: bool = False, one_by_one: bool = False
    ) -> Reply:
        """Pull weights from all servers; returns the reply of the first server.

        Args:
            targets: tensors to write, by parameter, in its shape.
            version: minimum version.
            to_train: a gradient of these weights will follow; rows of tables are then pulled when they are looked up.
            one_by_one: request from the next server after the reply of the previous server. Required if a pull may wait
                for other workers: two workers that wait at each other's server would wait forever.
        """

        def message(buffers: ExchangeBuffers[Channel]) -> Pull:
            return Pull(version, to_train, rows={}) if to_train else Pull(version, since=buffers.tables)

        def write(buffers: ExchangeBuffers[Channel], reply: Reply) -> None:
            if to_train:
                buffers.write_weights(targets)
                return
            history, counts = reply.content
            buffers.write_weights(targets)
            buffers.write_tables(targets, counts)
            buffers.tables = history, reply.version

        reply = self._pull_all(message, write, one_by_one=one_by_one)[0]
        self.lacks_rows = to_train or (self.lacks_rows and targets is not self._servers.parameters)
        return reply

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

        parameters = self._servers.parameters
        self._pull_all(wanted, lambda buffers, reply: buffers.write_rows(parameters, counts[buffers]))

    def pull_tables(self) -> None:
        """Pull all rows of tables that have changed since this worker had complete tables into the parameters."""
        parameters = self._servers.parameters

        def write(buffers: ExchangeBuffers[Channel], reply: Reply) -> None:
            history, counts = reply.content
            buffers.write_tables(parameters, counts)
            buffers.tables = history, reply.version

        self._pull_all(lambda buffers: Pull(dense=False, since=buffers.tables), write)
        self.lacks_rows = False

    def pull_sums(self, version: int) -> None:
        """Write the sums of gradients to `parameter.grad`; see `Exchange.pull_sums`.

        Args:
            version: number of the update.
        """
        replies = self._pull_all(lambda buffers: Pull(version), lambda buffers, reply: None)
        missing, counts = zip(*(reply.content for reply in replies), strict=True)
        buffers = self._servers.buffers
        rows = [source.received_rows(count) for source, count in zip(buffers, counts, strict=True)]
        write_summed_gradients(self._servers.parameters, buffers, missing, rows)

    def _pull_all(
        self, message: Callable[[ExchangeBuffers[Channel]], Pull],
        write: Callable[[ExchangeBuffers[Channel], Reply], None], *, one_by_one: bool = False,
    ) -> list[Reply]:  # fmt: skip
        """Request from all servers, call `write` for each reply, and return the replies."""
        begun = time.perf_counter()
        self._statistics.pulls += 1
        self.finish()
        replies = []
        asked: list[Pull] = []
        for buffers in self._servers.buffers if not one_by_one else ():
            asked.append(message(buffers))
            buffers.link.send(asked[-1])
        for number, buffers in enumerate(self._servers.buffers):
            if one_by_one:
                asked.append(message(buffers))
                buffers.link.send(asked[-1])
            reply: Reply = buffers.link.recv()
            if asked[number].dense:
                buffers.unpack(reply, sums=self._servers.options.sums)
            write(buffers, reply)
            replies.append(reply)
        self._statistics.waited_s += time.perf_counter() - begun
        return replies

    # -- in the background ----------------------------------------------------------------------------------------

    def begin(self, version: int, arrived: Arrived) -> None:
        """Start to pull weights into the parameters in the background, for a gradient.

        Args:
            version: minimum version.
            arrived: called when all weights are written, with the reply of the first server and the numbers of the
                parameters that no `await_parameters` had requested before.
        """
        self.finish()
        buffers = self._servers.buffers
        if self._threads is None:
            self._threads = ThreadPoolExecutor(len(buffers), thread_name_prefix="fabricx-pull")
        pull = Pull(version, to_train=True, rows={})
        self.lacks_rows = True
        self._arrived = arrived
        self._pending = set(range(len(self._servers.parameters)))
        self._prefetches = [PrefetchTask(source, replace(pull), self._threads) for source in buffers]

    def await_parameters(self, numbers: set[int]) -> None:
        """Wait for parameters of the background pull, and write them.

        Args:
            numbers: numbers of the parameters; parameters that are not pending are ignored.
        """
        wanted = numbers & self._pending
        if not wanted:
            return
        begun = time.perf_counter()
        self._statistics.pulls += 1
        for parameter in wanted:
            for server, number in self._where.get(parameter, ()):
                self._prefetches[server].wait_for(number)
                self._servers.buffers[server].write_piece(number, self._servers.parameters)
        self._pending -= wanted
        self._statistics.waited_s += time.perf_counter() - begun

    def finish(self) -> None:
        """Complete the background pull, if any."""
        if not self._prefetches:
            return
        late = set(self._pending)
        self.await_parameters(late)
        prefetches, self._prefetches = self._prefetches, []
        replies = [prefetch.reply() for prefetch in prefetches]
        self._arrived(replies[0], late)

    # -- weights to which replies refer ---------------------------------------------------------------------------

    def begun_at(self, version: int) -> None:
        """Record that this worker has the tables with which the servers begin.

        Args:
            version: number of updates made before.
        """
        for buffers in self._servers.buffers:
            buffers.tables = INITIAL_HISTORY, version

    def begin_differences(self) -> None:
        """Report the weights of this worker, with which the servers begin: the first compressed reply differs from it.

        A run that resumes then receives the same replies as one that was not interrupted.
        """
        servers = self._servers
        if servers.options.reply_compression is not None:
            pieces = [Shard(shard.pieces) for shard in servers.shards]
            own = [parameter.detach().to("cpu", servers.dtype) for parameter in servers.parameters]
            self.set_received_weights([flat_part(own, part) for part in pieces])

    def forget_tables(self) -> None:
        """Pull whole tables next: this worker does not have the tables with which the servers have begun."""
        for buffers in self._servers.buffers:
            buffers.tables = None

    def received_weights(self) -> list[Tensor | None]:
        """Return the weights received from each server, flat, to which compressed differences refer; None without."""
        return [buffers.received_weights for buffers in self._servers.buffers]

    def set_received_weights(self, received: Sequence[Tensor | None]) -> None:
        """Restore the weights to which compressed differences refer, on this worker and on the servers.

        Args:
            received: result of `received_weights`.
        """
        for number, weights in enumerate(received):
            if weights is not None:
                self._servers.buffers[number].received_weights = weights
                self._servers.notify(number, SetReceivedWeights(weights))

    def close(self) -> None:
        """End the threads of background pulls."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
