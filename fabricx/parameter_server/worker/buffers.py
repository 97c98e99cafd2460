"""Buffers between a worker and a server: gradients to the server, sums or weights from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar, final

import torch
from torch import Tensor

from fabricx.distributed.compression.codecs import Codec
from fabricx.parameter_server.optimizer_parts import part_of
from fabricx.parameter_server.wire.messages import Reply
from fabricx.parameter_server.wire.partition import Rows, Shard, merge_spans

_SPARSE: Final = (
    "the gradient of a parameter of shape {shape} is sparse, but servers receive sparse gradients of nn.Embedding and "
    "nn.EmbeddingBag with sparse=True only: let the parameter be the weight of such a module, or set sparse=False"
)


class Vectors(Protocol):
    """The part of the link interface that buffers use."""

    inbox: Tensor
    outbox: Tensor

    def post(self, start: int, stop: int) -> None:
        """Send bytes [start, stop) of the outbox.

        Args:
            start: first byte.
            stop: byte after the last.
        """


@final
@dataclass(slots=True)
class Filled:
    """Description of the gradients in a worker's vector.

    Attributes:
        missing, rows, scale: see `Push`.
    """

    missing: frozenset[int] = frozenset()
    rows: dict[int, int] = field(default_factory=dict)
    scale: float = 1.0


L = TypeVar("L", bound=Vectors)


@final
class ExchangeBuffers(Generic[L]):
    """Vectors shared by a worker and a server.

    A vector contains the pieces of parameters, and after them the rows of tables. The pieces have the same positions in
    gradients and weights; the tables do not, because gradients have row ids before the rows (`Shard.rooms` for
    gradients, `Shard.spans` for weights).

    Args:
        link: between them.
        shard: the server's part of the parameters.
        parameters: all parameters of the model.
        codec: codec of gradients.
        reply_codec: codec of replies.
        views: gradients may be views of the link's vector, because none is kept until the next gradient.

    Attributes:
        link, shard: see Args.
        tables: (history, version) of the complete tables that this worker has.

    Raises:
        ValueError: a codec needs more bytes than the vector has.
    """

    def __init__(
        self, link: L, shard: Shard, parameters: Sequence[Tensor], codec: Codec | None, *, views: bool,
        reply_codec: Codec | None = None,
    ) -> None:  # fmt: skip
        self.link, self.shard = link, shard
        self.tables: tuple[str, int] | None = None
        dtype, rooms = link.outbox.dtype, shard.rooms[: len(shard.pieces)]
        for option, used in (("compression", codec), ("pull_compression", reply_codec)):
            if used is not None and (needed := used.bytes(shard.dense)) > shard.dense * dtype.itemsize:
                raise ValueError(
                    f"{option}: {type(used).__name__} needs {needed} bytes for a server's {shard.dense} elements, "
                    f"which have {shard.dense * dtype.itemsize} bytes: remove {option}, or use fewer servers"
                )
        # Uncompressed gradients, in the outbox itself if they are sent in this form; and the part of each piece.
        self._codec = codec
        self._plain = link.outbox[: shard.dense] if codec is None else torch.zeros(shard.dense, dtype=dtype)
        self._out = [self._plain[start:stop] for start, stop in rooms]
        self._feedback_before = torch.empty(0)  # error feedback before the newest gradient
        self._early: set[int] = set()  # pieces of the next gradient that were sent already
        self._views: dict[int, Tensor] = {}  # by piece that is a whole parameter: its room, used as `parameter.grad`
        # Uncompressed replies, in the inbox itself if they are sent in this form; and the part of each piece.
        self._reply_codec = reply_codec
        self._received = link.inbox[: shard.dense] if reply_codec is None else torch.zeros(shard.dense, dtype=dtype)
        self._in = [self._received[start:stop] for start, stop in rooms]
        self._has_weights = False  # weights were received, to which the next differences refer
        if views and codec is None and reply_codec is None:
            for number, (piece, room) in enumerate(zip(shard.pieces, self._out, strict=True)):
                parameter = parameters[piece.parameter]
                alike = parameter.device.type == "cpu" and parameter.dtype == room.dtype and parameter.is_contiguous()
                if alike and piece.size == parameter.numel():
                    self._views[number] = room.view(parameter.shape)

    # -- gradients to the server --------------------------------------------------------------------------------

    def post_piece(self, number: int, parameter: Tensor) -> None:
        """Send the final gradient of a piece at once.

        Args:
            number: number of the piece.
            parameter: parameter with a gradient.
        """
        gradient = parameter.grad
        if self._codec is not None or gradient is None or gradient.is_sparse or gradient.is_cuda:
            return  # gradients on a device are sent together: later changes can't be detected without synchronising it
        room, view = self._out[number], self._views.get(number)
        if gradient.data_ptr() != room.data_ptr():
            room.copy_(part_of(gradient, self.shard.pieces[number]).reshape(-1))
            if view is not None:
                parameter.grad = view
        self._early.add(number)
        self._post(*self.shard.rooms[number])

    def post_gradients(self, gradients: Sequence[Tensor | None]) -> Filled:
        """Send all gradients that were not sent early, or that have changed since.

        Args:
            gradients: gradients by parameter; None for no gradient.

        Returns:
            Description of the gradients.

        Raises:
            ValueError: a parameter that is not a table has a sparse gradient.
        """
        missing = []
        targets, sources = [], []
        unsent: list[tuple[int, int]] = []
        early, self._early = self._early, set()
        for number, (piece, room) in enumerate(zip(self.shard.pieces, self._out, strict=True)):
            gradient = gradients[piece.parameter]
            if gradient is None:
                missing.append(number)
                room.zero_()  # read by codecs, and by other workers if there are no servers
                continue
            if gradient.is_sparse:
                raise ValueError(_SPARSE.format(shape=list(gradient.shape)))
            source = part_of(gradient, piece).reshape(-1)
            in_place = source.data_ptr() == room.data_ptr()
            if number in early and (in_place or torch.equal(source.to(room.dtype), room)):
                continue
            if not in_place:
                targets.append(room)
                sources.append(source)
            unsent.append(self.shard.rooms[number])
        _copy_all(targets, sources)
        filled = Filled(frozenset(missing))
        if self._codec is None:
            for start, stop in merge_spans(unsent):
                self._post(start, stop)
        else:
            self._feedback_before = self._codec.lost
            absent = [self.shard.rooms[number] for number in missing]
            filled.scale = self._codec.encode(self._plain, self.link.outbox.view(torch.uint8), absent)
            self.link.post(0, self._codec.bytes(len(self._plain)))
        for number, rows in enumerate(self.shard.rows):
            gradient = gradients[rows.parameter]
            if gradient is not None:
                filled.rows[number] = self._fill_rows(number, rows, gradient)
        return filled

    def undo_feedback(self) -> None:
        """Revert the error feedback to its state before the newest gradient, which the server has not used."""
        if self._codec is not None:
            self._codec.lost = self._feedback_before

    def _post(self, start: int, stop: int) -> None:
        size = self.link.outbox.element_size()
        self.link.post(start * size, stop * size)

    def _fill_rows(self, number: int, rows: Rows, gradient: Tensor) -> int:
        """Send the rows of a gradient that belong to this server; returns their number."""
        sparse = gradient.coalesce() if gradient.is_sparse else gradient.to_sparse(1)
        ids, values = sparse.indices()[0], sparse.values().reshape(-1, rows.width)
        local = ids % rows.step == rows.first
        ids, values = ids[local], values[local]
        numbers, room = self.shard.rows_in(self.link.outbox, number, len(ids))
        numbers.copy_(ids // rows.step)
        room.copy_(values)
        start = self.shard.rooms[len(self.shard.pieces) + number][0]
        self._post(start, start + len(ids) * (1 + rows.width))
        return len(ids)

    def present(self, missing: frozenset[int]) -> set[int]:
        """Return the numbers of the parameters with a piece in this shard that is not missing.

        Args:
            missing: numbers of pieces.
        """
        return {piece.parameter for number, piece in enumerate(self.shard.pieces) if number not in missing}

    # -- sums and weights from the server -----------------------------------------------------------------------

    def unpack(self, reply: Reply, *, sums: bool) -> None:
        """Decode a reply: sums are absolute, weights are differences to the weights received before.

        Args:
            reply: the server's reply.
            sums: the reply contains sums.
        """
        if self._reply_codec is None:
            return
        self._has_weights = not sums
        if reply.scale is None:
            self._received.copy_(self.link.inbox[: self.shard.dense])
            return
        raw = self.link.inbox.view(torch.uint8)
        decoded = self._reply_codec.decode(raw, len(self._received), reply.scale, self._received.dtype)
        self._received.copy_(decoded) if sums else self._received.add_(decoded)

    @property
    def received_weights(self) -> Tensor | None:
        """Return the weights received so far, flat, if compressed differences refer to them; else None."""
        return self._received.clone() if self._has_weights else None

    @received_weights.setter
    def received_weights(self, weights: Tensor) -> None:
        self._has_weights = True
        self._received.copy_(weights)

    @property
    def error_feedback(self) -> Tensor:
        """Return the error feedback that will be added to the next gradient; empty without compression."""
        return torch.empty(0) if self._codec is None else self._codec.lost

    @error_feedback.setter
    def error_feedback(self, feedback: Tensor) -> None:
        if self._codec is not None:
            self._codec.lost = feedback

    def write_sums(self, parameters: Sequence[Tensor], missing: frozenset[int]) -> None:
        """Write the received sums to `parameter.grad`, which is allocated for parameters with several pieces.

        Args:
            parameters: parameters by number.
            missing: numbers of the pieces without a sum.
        """
        for number, (piece, received) in enumerate(zip(self.shard.pieces, self._in, strict=True)):
            parameter = parameters[piece.parameter]
            if number in missing:
                continue
            view = self._views.get(number)
            if view is not None and received.data_ptr() == view.data_ptr():
                parameter.grad = view
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            _copy_part(parameter.grad, piece.start, piece.stop, received)

    def received_rows(self, rows: dict[int, int]) -> dict[int, tuple[Tensor, Tensor]]:
        """Return the received rows by parameter: (ids, values).

        Args:
            rows: number of rows by table.
        """
        by_parameter = {}
        for number, count in rows.items():
            part = self.shard.rows[number]
            ids, values = self.shard.rows_in(self.link.inbox, number, count)
            by_parameter[part.parameter] = ids.long() * part.step + part.first, values.clone()
        return by_parameter

    def bytes_needed(self, number: int) -> int:
        """Return the number of bytes after which a piece is complete: all bytes, if replies are compressed.

        Args:
            number: number of the piece.
        """
        if self._reply_codec is not None:
            return self.link.inbox.nbytes
        return self.shard.rooms[number][1] * self.link.inbox.element_size()

    def write_piece(self, number: int, targets: Sequence[Tensor]) -> None:
        """Copy a received piece to its parameter.

        Args:
            number: number of the piece.
            targets: targets by parameter.
        """
        piece = self.shard.pieces[number]
        _copy_part(targets[piece.parameter], piece.start, piece.stop, self._in[number])

    def write_weights(self, targets: Sequence[Tensor]) -> None:
        """Copy received weights, without tables, to tensors.

        Args:
            targets: targets by parameter.
        """
        views, sources = [], []
        for (number, start, stop), source in zip(self.shard.pieces, self._in, strict=True):
            tensor = targets[number].detach()
            if tensor.is_contiguous():
                views.append(tensor.view(-1)[start:stop])
                sources.append(source)
            else:  # another memory format, which has no flat view
                _copy_part(tensor, start, stop, source)
        _copy_all(views, sources)

    def write_tables(self, targets: Sequence[Tensor], counts: dict[int, int] | None) -> None:
        """Copy received tables.

        Args:
            targets: targets by parameter.
            counts: number of changed rows by table, received with their ids; None if tables are complete.
        """
        if counts is not None:
            for number, count in counts.items():
                ids, values = self.shard.rows_in(self.link.inbox, number, count)
                self._write_rows(number, targets, ids, values)
            return
        for rows, (start, stop) in zip(self.shard.rows, self.shard.spans[len(self.shard.pieces) :], strict=True):
            table = part_of(targets[rows.parameter], rows)
            table.copy_(self.link.inbox[start:stop].view(table.shape))

    def post_row_ids(self, ids: dict[int, Tensor]) -> dict[int, int]:
        """Send the ids of requested rows; returns their number by table.

        Args:
            ids: row ids by parameter.
        """
        counts = {}
        for number, rows in enumerate(self.shard.rows):
            if rows.parameter not in ids:
                continue
            local = ids[rows.parameter]
            local = local[local % rows.step == rows.first] // rows.step
            numbers, _ = self.shard.rows_in(self.link.outbox, number, len(local))
            numbers.copy_(local)
            start = self.shard.rooms[len(self.shard.pieces) + number][0]
            self._post(start, start + len(local))
            counts[number] = len(local)
        return counts

    def write_rows(self, targets: Sequence[Tensor], counts: dict[int, int]) -> None:
        """Copy the requested rows to their tables.

        Args:
            targets: targets by parameter.
            counts: result of `post_row_ids`.
        """
        for number, count in counts.items():
            rows = self.shard.rows[number]
            ids, _ = self.shard.rows_in(self.link.outbox, number, count)
            start = self.shard.spans[len(self.shard.pieces) + number][0]
            values = self.link.inbox[start : start + count * rows.width].view(count, rows.width)
            self._write_rows(number, targets, ids, values)

    def _write_rows(self, number: int, targets: Sequence[Tensor], ids: Tensor, values: Tensor) -> None:
        rows = self.shard.rows[number]
        table = targets[rows.parameter].detach()
        indices = ids.long().to(table.device) * rows.step + rows.first
        table[indices] = values.view(len(ids), *table.shape[1:]).to(table)


def dtype_of(parameters: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype of the vectors: the widest of the parameters' dtypes, at least float32.

    Args:
        parameters: parameters of the model.
    """
    return torch.float64 if any(parameter.dtype == torch.float64 for parameter in parameters) else torch.float32


def write_summed_gradients(
    parameters: Sequence[Tensor], buffers: Sequence[ExchangeBuffers[Any]], missing: Sequence[frozenset[int]],
    rows: Sequence[dict[int, tuple[Tensor, Tensor]]],
) -> None:  # fmt: skip
    """Write received sums to `parameter.grad`; None for parameters without a gradient on any worker.

    Args:
        parameters: all parameters.
        buffers: buffers of each server.
        missing: numbers of the pieces without a gradient, by server.
        rows: rows of tables, by server: (ids, values) by parameter.
    """
    present: set[int] = set()
    by_table: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for source, absent, tables in zip(buffers, missing, rows, strict=True):
        present |= source.present(absent)
        source.write_sums(parameters, absent)
        for number, part in tables.items():
            by_table.setdefault(number, []).append(part)
    for number, parameter in enumerate(parameters):
        if number in by_table:
            ids, values = (torch.cat(column) for column in zip(*by_table[number], strict=True))
            shaped = values.view(len(ids), *parameter.shape[1:]).to(parameter)
            parameter.grad = torch.sparse_coo_tensor(ids[None], shaped, parameter.shape, check_invariants=False)
        elif number not in present:
            parameter.grad = None


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors; between pinned memory and a device asynchronously, with a single synchronisation."""
    if not targets:
        return
    if not any(tensor.is_cuda for tensor in (*targets, *sources)):
        torch._foreach_copy_(list(targets), list(sources))
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
    torch.cuda.current_stream().synchronize()


def _copy_part(tensor: Tensor, start: int, stop: int, source: Tensor) -> None:
    """Copy a piece to a tensor of any memory format and device."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        tensor.view(-1)[start:stop].copy_(source)
    else:
        flat = tensor.reshape(-1)
        flat[start:stop] = source.to(flat)
        tensor.copy_(flat.view(tensor.shape))
