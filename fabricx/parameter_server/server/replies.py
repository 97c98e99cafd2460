"""Replies of a server: weights, differences of weights, or sums of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from fabricx.distributed.compression.codecs import Codec, make_codec
from fabricx.parameter_server.gradients import Gradient
from fabricx.parameter_server.server.changed_rows import ChangedRows
from fabricx.parameter_server.wire.messages import INITIAL_HISTORY, Pull, Reply, ServerInit
from fabricx.parameter_server.wire.partition import merge_spans


@final
class Replies:
    """Builds replies to `Pull`, without the counts of updates, in the worker's vector.

    Args:
        init: initialisation of the server.

    Attributes:
        changed: changed rows of tables.
        seen: weights that a worker has, by worker, if differences or delay compensation need them.
    """

    def __init__(self, init: ServerInit) -> None:
        self._init = init
        self.seen: dict[int, Tensor] = {}
        self.changed = ChangedRows([rows.height for rows in init.shard.rows], init.version, INITIAL_HISTORY)
        self._codec: Codec | None = None
        self._scale: float | None = None  # of the newest compressed sum
        if (kind := init.settings.pull_compression) is not None:
            sums = init.optimizers is None and init.settings.outer is None
            # A difference of weights includes earlier errors.
            self._codec = make_codec(kind, keep=init.settings.keep, feedback=sums)
            self._codec.lost = torch.empty(0) if init.error_feedback is None else init.error_feedback

    @property
    def error_feedback(self) -> Tensor | None:
        """Return the error feedback of compressed sums; None without compression."""
        return None if self._codec is None else self._codec.lost

    def weights(self, worker: int, pull: Pull, values: Tensor, inbox: Tensor, outbox: Tensor) -> Reply:
        """Write weights to a worker's vector.

        Args:
            worker: number of the worker.
            pull: the request.
            values: the weights, flat.
            inbox: vector of the worker, with the ids of requested rows.
            outbox: vector for the reply.
        """
        shard = self._init.shard
        if pull.rows is None:
            if self._codec is not None and pull.dense:
                self.seen[worker] = values[: shard.dense].clone()
            if pull.since is not None and shard.rows and self.changed.known(pull.since):
                return self._changed_rows(pull, pull.since[1], values, outbox)
            first = 0 if pull.dense else shard.dense
            outbox[first : len(values)].copy_(values[first:])
            return self._reply([(first, len(values))], (self.changed.history, None))
        if pull.dense and self._codec is not None and worker in self.seen and not pull.whole:
            return self._difference(self._codec, self.seen[worker], values, outbox)
        spans = []
        if pull.dense:
            outbox[: shard.dense].copy_(values[: shard.dense])
            spans.append((0, shard.dense))
            if self._init.settings.compensation is not None or self._codec is not None:
                self.seen[worker] = values[: shard.dense].clone()
        for number, count in pull.rows.items():
            start, stop = shard.spans[len(shard.pieces) + number]
            width = shard.rows[number].width
            table, (ids, _) = values[start:stop].view(-1, width), shard.rows_in(inbox, number, count)
            end = start + count * width
            torch.index_select(table, 0, ids, out=outbox[start:end].view(count, width))
            spans.append((start, end))
        return self._reply(spans)

    def _changed_rows(self, pull: Pull, since: int, values: Tensor, outbox: Tensor) -> Reply:
        """Write the dense weights, if requested, and the changed rows of tables with their ids."""
        shard, counts = self._init.shard, {}
        spans = []
        if pull.dense:
            outbox[: shard.dense].copy_(values[: shard.dense])
            spans.append((0, shard.dense))
        for number, rows in enumerate(shard.rows):
            (start, stop), ids = shard.spans[len(shard.pieces) + number], self.changed.since(number, since)
            numbers, room = shard.rows_in(outbox, number, len(ids))
            numbers.copy_(ids)
            room.copy_(values[start:stop].view(-1, rows.width)[ids])
            init = shard.rooms[len(shard.pieces) + number][0]
            spans.append((init, init + len(ids) * (1 + rows.width)))
            counts[number] = len(ids)
        return self._reply(merge_spans(spans), (self.changed.history, counts))

    def _difference(self, codec: Codec, seen: Tensor, values: Tensor, outbox: Tensor) -> Reply:
        """Write the compressed difference between the weights and those of the worker."""
        size = len(seen)
        scale = codec.encode(values[:size] - seen, outbox.view(torch.uint8))
        seen.add_(codec.decode(outbox.view(torch.uint8), size, scale, seen.dtype))
        return Reply(spans=[(0, codec.bytes(size))], scale=scale)

    def sum(self, newest: Gradient, outbox: Tensor) -> Reply:
        """Write a sum of gradients to the vector that contained the worker's gradient and already has the dense sum.

        Args:
            newest: the sum.
            outbox: vector for the reply.
        """
        shard = self._init.shard
        spans = [room for number, room in enumerate(shard.rooms[: len(shard.pieces)]) if number not in newest.missing]
        for number, (ids, values) in newest.rows.items():
            row_ids, row_values = shard.rows_in(outbox, number, len(ids))
            row_ids.copy_(ids)
            row_values.copy_(values)
            start = shard.rooms[len(shard.pieces) + number][0]
            spans.append((start, start + row_ids.numel() + row_values.numel()))
        rows = {number: len(ids) for number, (ids, _) in newest.rows.items()}
        if self._scale is None:
            return self._reply(merge_spans(spans), (newest.missing, rows))
        reply = self._reply(spans[len(shard.pieces) - len(newest.missing) :], (newest.missing, rows))
        assert self._codec is not None
        reply.spans.insert(0, (0, self._codec.bytes(shard.dense)))
        reply.scale = self._scale
        return reply

    def compress_sum(self, vectors: list[Tensor], absent: Sequence[tuple[int, int]]) -> None:
        """Compress a sum in place, with the same bytes for all workers, if compression is enabled.

        Args:
            vectors: vectors of all workers, each with the sum.
            absent: spans of zeros without a sum; see `Codec.encode`.
        """
        if self._codec is None:
            return
        self._scale = self._codec.encode(vectors[0].clone(), vectors[0].view(torch.uint8), absent)
        size = self._codec.bytes(len(vectors[0]))
        for vector in vectors[1:]:
            vector.view(torch.uint8)[:size].copy_(vectors[0].view(torch.uint8)[:size])

    def _reply(self, spans: list[tuple[int, int]], content: Any = None) -> Reply:
        size = self._init.dtype.itemsize
        return Reply(content=content, spans=[(start * size, stop * size) for start, stop in spans])
