"""Exchange buffers between a worker and one server: parts of gradients and weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar, final

import torch
from torch import Tensor

from fabricx.parameter_server.optimizer_parts import part_of
from fabricx.parameter_server.wire.codecs import Codec
from fabricx.parameter_server.wire.messages import Reply
from fabricx.parameter_server.wire.partition import Rows, Shard, together

WORTH_A_CALL: Final = 1 << 15  # bytes of a gradient that is sent by itself; smaller ones go all together


class Vectors(Protocol):
    """What a link is to those who only fill its vectors."""

    inbox: Tensor
    outbox: Tensor

    def post(self, start: int, stop: int) -> None:
        """Let some bytes of the outbox go."""


@final
@dataclass(slots=True)
class Filled:
    """What a worker has put into its vector: see `Push`."""

    missing: frozenset[int] = frozenset()
    rows: dict[int, int] = field(default_factory=dict)
    scale: float = 1.0


L = TypeVar("L", bound=Vectors)


@final
class ExchangeBuffers(Generic[L]):
    """What one worker and one server have in common.

    Args:
        link: between them.
        shard: what the server keeps.
        parameters: all of the model's.
        codec: of gradients.
        back: of what comes back.
        views: gradients may stay in the link's vector: nobody keeps one until there is the next.
    """

    def __init__(
        self, link: L, shard: Shard, parameters: Sequence[Tensor], codec: Codec | None, *, views: bool,
        back: Codec | None = None,
    ) -> None:  # fmt: skip
        self.link, self.shard = link, shard
        self._codec = codec
        self._plain = link.outbox[: shard.dense] if codec is None else torch.zeros(shard.dense, dtype=link.outbox.dtype)
        rooms = shard.rooms[: len(shard.pieces)]
        self._out = [self._plain[start:stop] for start, stop in rooms]
        self._back = back
        self._came = link.inbox[: shard.dense] if back is None else torch.zeros(shard.dense, dtype=link.inbox.dtype)
        self._in = [self._came[start:stop] for start, stop in rooms]
        self._kept_before = torch.empty(0)  # by compression, before the newest gradient
        self._begun = False  # have weights come from which the next ones are differences?
        self.tables: tuple[str, int] | None = None  # life and version of the whole tables that this worker has
        self._early: set[int] = set()  # pieces that are on their way already
        self._views: dict[int, Tensor] = {}  # of pieces that are a parameter's whole gradient
        if views and codec is None and back is None:
            for number, (piece, room) in enumerate(zip(shard.pieces, self._out, strict=True)):
                parameter = parameters[piece.parameter]
                alike = parameter.device.type == "cpu" and parameter.dtype == room.dtype and parameter.is_contiguous()
                if alike and piece.size == parameter.numel():
                    self._views[number] = room.view(parameter.shape)

    # -- gradients, on their way there --------------------------------------------------------------------------

    def put(self, number: int, parameter: Tensor) -> None:
        """Let the gradient of a piece go at once: nothing will be added to it."""
        gradient = parameter.grad
        if self._codec is not None or gradient is None or gradient.is_sparse or gradient.is_cuda:
            return  # from a device, all go together: whether one has changed since can't be seen from here
        room, view = self._out[number], self._views.get(number)
        if gradient.data_ptr() != room.data_ptr():
            room.copy_(part_of(gradient, self.shard.pieces[number]).reshape(-1))
            if view is not None:
                parameter.grad = view
        self._early.add(number)
        self._post(*self.shard.rooms[number])

    def fill(self, gradients: Sequence[Tensor | None]) -> Filled:
        """Bring all gradients that aren't on their way, or have changed since."""
        missing = []
        targets, sources = [], []
        going: list[tuple[int, int]] = []
        early, self._early = self._early, set()
        for number, (piece, room) in enumerate(zip(self.shard.pieces, self._out, strict=True)):
            gradient = gradients[piece.parameter]
            if gradient is None:
                missing.append(number)
                room.zero_()  # workers without servers, and codecs, read all of it
                continue
            source = part_of(gradient, piece).reshape(-1)
            there = source.data_ptr() == room.data_ptr()
            if number in early and (there or torch.equal(source.to(room.dtype), room)):
                continue
            if not there:
                targets.append(room)
                sources.append(source)
            going.append(self.shard.rooms[number])
        _copy_all(targets, sources)
        filled = Filled(frozenset(missing))
        if self._codec is None:
            for start, stop in together(going):
                self._post(start, stop)
        else:
            self._kept_before = self._codec.lost
            filled.scale = self._codec.encode(self._plain, self.link.outbox.view(torch.uint8))
            self.link.post(0, self._codec.bytes(len(self._plain)))
        for number, rows in enumerate(self.shard.rows):
            gradient = gradients[rows.parameter]
            if gradient is not None:
                filled.rows[number] = self._fill_rows(number, rows, gradient)
        return filled

    def take_back(self) -> None:
        """Undo what the newest gradient has changed here: the server has not used it, and its data is dealt again."""
        if self._codec is not None:
            self._codec.lost = self._kept_before

    def _post(self, start: int, stop: int) -> None:
        size = self.link.outbox.element_size()
        self.link.post(start * size, stop * size)

    def _fill_rows(self, number: int, rows: Rows, gradient: Tensor) -> int:
        """Bring the rows of a gradient that are this server's; returns how many."""
        sparse = gradient.coalesce() if gradient.is_sparse else gradient.to_sparse(1)
        ids, values = sparse.indices()[0], sparse.values().reshape(-1, rows.width)
        own = ids % rows.step == rows.first
        ids, values = ids[own], values[own]
        numbers, room = self.shard.rows_in(self.link.outbox, number, len(ids))
        numbers.copy_(ids // rows.step)
        room.copy_(values)
        start = self.shard.rooms[len(self.shard.pieces) + number][0]
        self._post(start, start + len(ids) * (1 + rows.width))
        return len(ids)

    def present(self, missing: frozenset[int]) -> set[int]:
        """Return the numbers of the parameters that have another piece here than those that are missing."""
        return {piece.parameter for number, piece in enumerate(self.shard.pieces) if number not in missing}

    # -- sums and weights, on their way back ---------------------------------------------------------------------

    def unpack(self, reply: Reply, *, sums: bool) -> None:
        """Decode what has come: sums as they are, and weights as their differences from what was here before."""
        if self._back is None:
            return
        self._begun = not sums
        if reply.scale is None:
            self._came.copy_(self.link.inbox[: self.shard.dense])
            return
        raw = self.link.inbox.view(torch.uint8)
        decoded = self._back.decode(raw, len(self._came), reply.scale, self._came.dtype)
        self._came.copy_(decoded) if sums else self._came.add_(decoded)

    @property
    def came(self) -> Tensor | None:
        """Return the weights that came so far, flat, if differences from them follow."""
        return self._came.clone() if self._begun else None

    @came.setter
    def came(self, weights: Tensor) -> None:
        self._begun = True
        self._came.copy_(weights)

    @property
    def kept(self) -> Tensor:
        """Return what compression has lost so far, and will add to the next gradient; none if it doesn't compress."""
        return torch.empty(0) if self._codec is None else self._codec.lost

    @kept.setter
    def kept(self, lost: Tensor) -> None:
        if self._codec is not None:
            self._codec.lost = lost

    def give_sums(self, parameters: Sequence[Tensor], missing: frozenset[int]) -> None:
        """Let the gradients of parameters be what has come; a parameter of which pieces are elsewhere has a tensor."""
        for number, (piece, came) in enumerate(zip(self.shard.pieces, self._in, strict=True)):
            parameter = parameters[piece.parameter]
            if number in missing:
                continue
            view = self._views.get(number)
            if view is not None and came.data_ptr() == view.data_ptr():
                parameter.grad = view
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            _copy_part(parameter.grad, piece.start, piece.stop, came)

    def rows_of_sums(self, rows: dict[int, int]) -> dict[int, tuple[Tensor, Tensor]]:
        """Return the rows that have come, by parameter: their numbers in it, and their values."""
        found = {}
        for number, count in rows.items():
            part = self.shard.rows[number]
            ids, values = self.shard.rows_in(self.link.inbox, number, count)
            found[part.parameter] = ids.long() * part.step + part.first, values.clone()
        return found

    def needs(self, number: int) -> int:
        """Return how many bytes have to come until a piece is there: all, where they are compressed."""
        if self._back is not None:
            return self.link.inbox.nbytes
        return self.shard.rooms[number][1] * self.link.inbox.element_size()

    def give_piece(self, number: int, targets: Sequence[Tensor]) -> None:
        """Copy one piece into its tensor."""
        piece = self.shard.pieces[number]
        _copy_part(targets[piece.parameter], piece.start, piece.stop, self._in[number])

    def give_weights(self, targets: Sequence[Tensor], *, tables: bool) -> None:
        """Copy weights into tensors, by parameter; with `tables`, whole ones too."""
        views, sources = [], []
        for (number, start, stop), source in zip(self.shard.pieces, self._in, strict=True):
            tensor = targets[number].detach()
            if tensor.is_contiguous():
                views.append(tensor.view(-1)[start:stop])
                sources.append(source)
            else:  # of another memory format: no view of it is a vector
                _copy_part(tensor, start, stop, source)
        _copy_all(views, sources)
        if tables:
            for rows, (start, stop) in zip(self.shard.rows, self.shard.spans[len(self.shard.pieces) :], strict=True):
                table = part_of(targets[rows.parameter], rows)
                table.copy_(self.link.inbox[start:stop].view(table.shape))

    def give_changed(self, targets: Sequence[Tensor], counts: dict[int, int]) -> None:
        """Copy rows that came with their numbers into their tables."""
        for number, count in counts.items():
            ids, values = self.shard.rows_in(self.link.inbox, number, count)
            self._give_rows(number, targets, ids, values)

    def want_rows(self, ids: dict[int, Tensor]) -> dict[int, int]:
        """Write down the numbers of the rows that are wanted, by parameter; returns how many of which table."""
        counts = {}
        for number, rows in enumerate(self.shard.rows):
            if rows.parameter not in ids:
                continue
            own = ids[rows.parameter]
            own = own[own % rows.step == rows.first] // rows.step
            numbers, _ = self.shard.rows_in(self.link.outbox, number, len(own))
            numbers.copy_(own)
            start = self.shard.rooms[len(self.shard.pieces) + number][0]
            self._post(start, start + len(own))
            counts[number] = len(own)
        return counts

    def give_rows(self, targets: Sequence[Tensor], counts: dict[int, int]) -> None:
        """Copy the rows that were wanted into their tables."""
        for number, count in counts.items():
            rows = self.shard.rows[number]
            ids, _ = self.shard.rows_in(self.link.outbox, number, count)
            start = self.shard.spans[len(self.shard.pieces) + number][0]
            values = self.link.inbox[start : start + count * rows.width].view(count, rows.width)
            self._give_rows(number, targets, ids, values)

    def _give_rows(self, number: int, targets: Sequence[Tensor], ids: Tensor, values: Tensor) -> None:
        rows = self.shard.rows[number]
        table = targets[rows.parameter].detach()
        places = ids.long().to(table.device) * rows.step + rows.first
        table[places] = values.view(len(ids), *table.shape[1:]).to(table)


def dtype_of(parameters: Sequence[Tensor]) -> torch.dtype:
    """Return the type in which parameters travel: the widest."""
    return torch.float64 if any(parameter.dtype == torch.float64 for parameter in parameters) else torch.float32


def watch(
    parameters: Sequence[Tensor], shards: Sequence[Shard], put: Callable[[int, int, Tensor], None]
) -> Callable[[], None]:  # fmt: skip
    """Call `put(server, number of the piece, parameter)` when a large gradient is there; returns what ends that."""
    where = pieces_by_parameter(shards)

    def put_all(places: list[tuple[int, int]], parameter: Tensor) -> None:
        for server, number in places:
            put(server, number, parameter)

    handles = [
        parameters[number].register_post_accumulate_grad_hook(functools.partial(put_all, places))
        for number, places in where.items()
        if parameters[number].requires_grad and parameters[number].nbytes >= WORTH_A_CALL
    ]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


def pieces_by_parameter(shards: Sequence[Shard]) -> dict[int, list[tuple[int, int]]]:
    """Return where the pieces of each parameter are: (server, number of the piece)."""
    found: dict[int, list[tuple[int, int]]] = {}
    for server, shard in enumerate(shards):
        for number, piece in enumerate(shard.pieces):
            found.setdefault(piece.parameter, []).append((server, number))
    return found


def settle_sums(
    parameters: Sequence[Tensor], boxes: Sequence[ExchangeBuffers[Any]], missing: Sequence[frozenset[int]],
    rows: Sequence[dict[int, tuple[Tensor, Tensor]]],
) -> None:  # fmt: skip
    """Let the gradients of parameters be the sums that have come; None where nobody had one.

    Args:
        parameters: all of them.
        boxes: in which they came.
        missing: numbers of the pieces without a gradient, in each.
        rows: of tables in each, by parameter: numbers and values.
    """
    present: set[int] = set()
    by_table: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for mine, nowhere, found in zip(boxes, missing, rows, strict=True):
        present |= mine.present(nowhere)
        mine.give_sums(parameters, nowhere)
        for number, part in found.items():
            by_table.setdefault(number, []).append(part)
    for number, parameter in enumerate(parameters):
        if number in by_table:
            ids, values = (torch.cat(column) for column in zip(*by_table[number], strict=True))
            shaped = values.view(len(ids), *parameter.shape[1:]).to(parameter)
            parameter.grad = torch.sparse_coo_tensor(ids[None], shaped, parameter.shape, check_invariants=False)
        elif number not in present:
            parameter.grad = None


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors; between pinned memory and a device all at once, and until they are there."""
    if not targets:
        return
    if not any(tensor.is_cuda for tensor in (*targets, *sources)):
        torch._foreach_copy_(list(targets), list(sources))
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
    torch.cuda.current_stream().synchronize()


def _copy_part(tensor: Tensor, start: int, stop: int, source: Tensor) -> None:
    """Copy a piece into a tensor of any memory format and device."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        tensor.view(-1)[start:stop].copy_(source)
    else:
        flat = tensor.reshape(-1)
        flat[start:stop] = source.to(flat)
        tensor.copy_(flat.view(tensor.shape))
