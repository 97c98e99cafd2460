"""What a server does with a gradient: hand the sum back, or step the user's own optimizer with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, final

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from fabricx.exchange.layout import Piece, Rows, Shard
from fabricx.exchange.messages import Begin, Groups, Settings

# Each element is stepped by itself: a part of a parameter is stepped like the whole.
_ELEMENTWISE: Final = {
    optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop, optim.Adadelta, optim.Adamax, optim.NAdam,
    optim.RAdam, optim.ASGD, optim.Rprop, optim.SparseAdam,
}  # fmt: skip
_BY_TENSOR: Final = {"Adafactor", "Muon"}
BLOCK: Final = 1 << 16  # elements


def needs_whole_tensors(optimizers: Iterable[Optimizer]) -> bool:
    """Return whether a server has to keep whole parameters for these to step.

    Raises:
        ValueError: that isn't known, or one of them can't be stepped by a server.
    """
    whole = False
    for optimizer in optimizers:
        kind = type(optimizer)
        if kind is optim.LBFGS:
            raise ValueError("LBFGS computes the loss several times a step, and a server can't: take strategy=ddp")
        if kind.__name__ in _BY_TENSOR:
            whole = True
        elif kind not in _ELEMENTWISE:
            raise ValueError(
                f"whether {kind.__name__} steps each element by itself isn't known, so its parameters can't be divided "
                "among servers: say shard_by='tensor' if it steps one parameter at a time (always safe then), or "
                "shard_by='element' if each element goes by itself"
            )
    return whole


@final
@dataclass(slots=True)
class Gradient:
    """One gradient of what a server keeps.

    Attributes:
        dense: of all pieces, flat.
        missing: numbers of the pieces that have none.
        rows: of each table that has one, the numbers of the rows, shape [k], and their gradients, [k, width].
    """

    dense: Tensor
    missing: frozenset[int] = frozenset()
    rows: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def clone(self) -> Gradient:
        """Return one whose memory is its own."""
        rows = {number: (ids.clone(), values.clone()) for number, (ids, values) in self.rows.items()}
        return Gradient(self.dense.clone(), self.missing, rows)

    def __truediv__(self, divisor: float) -> Gradient:
        rows = {number: (ids, values / divisor) for number, (ids, values) in self.rows.items()}
        return Gradient(self.dense / divisor, self.missing, rows)


def joined(parts: Sequence[Mapping[int, tuple[Tensor, Tensor]]]) -> dict[int, tuple[Tensor, Tensor]]:
    """Return the sum of several gradients of rows, each row once, in ascending order."""
    found = {}
    for number in sorted({number for part in parts for number in part}):
        every = [part[number] for part in parts if number in part]
        ids, places = torch.cat([ids for ids, _ in every]).unique(return_inverse=True)
        values = torch.cat([values for _, values in every])
        found[number] = ids, values.new_zeros(len(ids), values.shape[1]).index_add_(0, places, values)
    return found


def add_up(parts: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    """Put the sum of vectors, added in their order, into others, which may be among them.

    Block by block: each is read once, and still in the cache when it is written.
    """
    later = {part.data_ptr() for part in parts[2:]}
    place = next((vector for vector in into if vector.data_ptr() not in later), None)
    for start in range(0, len(parts[0]), BLOCK):
        first, *others = (part[start : start + BLOCK] for part in parts)
        total = torch.empty_like(first) if place is None else place[start : start + BLOCK]
        if others:
            torch.add(first, others[0], out=total)
        else:
            total.copy_(first)
        for other in others[1:]:
            total.add_(other)
        for vector in into:
            if vector is not place:
                vector[start : start + BLOCK].copy_(total)


class Rule(ABC):
    """A server's part of the parameters, and how it changes."""

    values: Tensor  # what workers pull, flat

    @abstractmethod
    def update(self, gradient: Gradient, groups: Groups | None) -> None:
        """Make one update."""

    def state(self) -> list[list[dict[str, object]]]:
        """Return what each optimizer remembers of each piece."""
        return []


@final
class Sum(Rule):
    """Workers step: they pull the sum."""

    def __init__(self, begin: Begin) -> None:
        self.values = torch.empty(0)
        self.newest = Gradient(self.values)

    def update(self, gradient: Gradient, groups: Groups | None) -> None:
        self.values, self.newest = gradient.dense, gradient


class _Weights(Rule):
    """Servers keep the weights, in one vector of which `pieces` are views."""

    def __init__(self, begin: Begin) -> None:
        self._shard, self._pieces = begin.shard, begin.pieces
        self.values = torch.empty(begin.shard.size, dtype=begin.dtype)
        for piece, (start, stop) in zip(begin.pieces, begin.shard.spans, strict=True):
            self.values[start:stop].copy_(piece.detach().reshape(-1))
            piece.data = self.values[start:stop].view(piece.shape)


@final
class Step(_Weights):
    """The user's optimizers step pieces of the parameters."""

    def __init__(self, begin: Begin) -> None:
        super().__init__(begin)
        self._optimizers = begin.optimizers or []

    def update(self, gradient: Gradient, groups: Groups | None) -> None:
        dense = len(self._shard.pieces)
        for number, (piece, (start, stop)) in enumerate(zip(self._pieces[:dense], self._shard.rooms, strict=False)):
            piece.grad = None if number in gradient.missing else gradient.dense[start:stop].view(piece.shape)
        for number, table in enumerate(self._pieces[dense:]):
            table.grad = _sparse(gradient.rows.get(number), table)
        for optimizer, given in zip(self._optimizers, groups or [], strict=False):
            for group, values in zip(optimizer.param_groups, given, strict=True):
                group.update(values)
        for optimizer in self._optimizers:
            optimizer.step()

    def state(self) -> list[list[dict[str, object]]]:
        return [[dict(optimizer.state.get(piece, {})) for piece in self._pieces] for optimizer in self._optimizers]


def _sparse(rows: tuple[Tensor, Tensor] | None, table: Tensor) -> Tensor | None:
    if rows is None:
        return None
    ids, values = rows
    return torch.sparse_coo_tensor(ids.long()[None], values, table.shape, is_coalesced=True, check_invariants=False)


@final
class Outer(_Weights):
    """Workers step by themselves, and bring what they have moved.

    Sources: "sum": Dean et al., NIPS 2012 (Downpour); "elastic": Zhang, Choromanska, LeCun, "Deep learning with Elastic
    Averaging SGD", NIPS 2015, equation 5; "nesterov": Liu et al., "Asynchronous Local-SGD Training for Language
    Modeling", arXiv 2401.09135, algorithm 3 with c = 0: the momentum moves once in as many rounds as there are workers.
    """

    def __init__(self, begin: Begin) -> None:
        super().__init__(begin)
        self._settings = begin.settings
        self.velocity = torch.zeros_like(self.values) if begin.velocity is None else begin.velocity.clone()
        self._gathered = torch.zeros_like(self.values)
        self._rounds = 0

    def update(self, gradient: Gradient, groups: Groups | None) -> None:
        settings, moved = self._settings, gradient.dense
        if settings.outer in ("sum", "elastic"):
            self.values.sub_(moved)
        elif settings.outer == "average":
            self.values.sub_(moved, alpha=1.0 / settings.workers)
        else:
            self._nesterov(moved)

    def _nesterov(self, moved: Tensor) -> None:
        settings = self._settings
        self._gathered.add_(moved)
        self._rounds += 1
        self.values.sub_(moved, alpha=settings.outer_lr / settings.workers)
        if self._rounds % settings.workers == 0:
            self.velocity.mul_(settings.outer_momentum).add_(self._gathered, alpha=1.0 / settings.workers)
            self.values.sub_(self.velocity, alpha=settings.outer_lr * settings.outer_momentum)
            self._gathered.zero_()


@final
class Correction:
    """What is done to a gradient that was computed with older weights than it meets.

    Sources: DC-ASGD, Zheng et al., ICML 2017, equations 10 and 14; dividing by the staleness: Zhang et al., "Staleness-
    aware Async-SGD", IJCAI 2016.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._mean_square: Tensor | None = None

    def __call__(self, gradient: Gradient, base: Tensor, now: Tensor, staleness: int) -> Gradient:
        """Return the gradient to step with; `base` is what the worker had, and `now` what there is, both flat."""
        settings = self._settings
        if settings.compensation is not None:
            dense = gradient.dense
            square = dense * dense
            strength: Tensor | float = settings.dc_lambda
            if settings.compensation == "dc-adaptive":
                if self._mean_square is None:
                    self._mean_square = torch.zeros_like(square)
                self._mean_square.lerp_(square, 1.0 - settings.dc_momentum)
                strength = settings.dc_lambda / (self._mean_square + 1e-7).sqrt()
            if staleness:
                dense = dense + strength * square * (now[: len(dense)] - base[: len(dense)])
                gradient = Gradient(dense, gradient.missing, gradient.rows)
        return gradient / staleness if settings.damp and staleness > 1 else gradient


def make_rule(begin: Begin) -> Rule:
    """Return the rule that a server was asked for."""
    if begin.settings.outer is not None:
        return Outer(begin)
    return Sum(begin) if begin.optimizers is None else Step(begin)


def sliced(
    optimizers: Sequence[Optimizer], parameters: Sequence[Tensor], shard: Shard
) -> tuple[list[Optimizer], list[Tensor]]:  # fmt: skip
    """Return copies of optimizers that step one server's part of their parameters.

    Args:
        optimizers: the user's own; they stay as they are.
        parameters: all of them, by number.
        shard: what the server keeps.

    Returns:
        the copies, and the parts, as parameters: whole ones in their shape, pieces as vectors.
    """
    made: list[Tensor] = []
    of: dict[int, list[tuple[nn.Parameter, Tensor, Piece | Rows]]] = {}
    for part in shard.parts:
        parameter = parameters[part.parameter]
        piece = nn.Parameter(part_of(parameter, part).cpu().clone(memory_format=torch.contiguous_format))
        made.append(piece)
        of.setdefault(id(parameter), []).append((piece, parameter, part))
    copies = []
    for optimizer in optimizers:
        copy = object.__new__(type(optimizer))
        groups = [
            {**group, "params": [cut[0] for p in group["params"] for cut in of.get(id(p), [])]}
            for group in optimizer.param_groups
        ]
        state: defaultdict[Tensor, dict[str, object]] = defaultdict(dict)
        state |= {
            piece: {key: _state_of(value, whole, part) for key, value in optimizer.state[whole].items()}
            for p in (p for group in optimizer.param_groups for p in group["params"])
            for piece, whole, part in of.get(id(p), [])
            if whole in optimizer.state
        }
        copy.__setstate__({"defaults": optimizer.defaults, "state": state, "param_groups": groups})
        copies.append(copy)
    return copies, made


def part_of(tensor: Tensor, part: Piece | Rows) -> Tensor:
    """Return a part of a parameter, or of something of its shape: a view where there is one."""
    whole = tensor.detach()
    if isinstance(part, Rows):
        return whole[part.first :: part.step]
    return whole if part.size == whole.numel() else whole.reshape(-1)[part.start : part.stop]


def _state_of(value: object, whole: Tensor, part: Piece | Rows) -> object:
    """Return a part of what an optimizer remembers of a parameter; numbers and what has another shape as they are."""
    if not isinstance(value, Tensor):
        return value
    found = part_of(value, part) if value.shape == whole.shape else value.detach()
    return found.cpu().clone()  # each piece counts its own steps


def join_states(parameter: Tensor, parts: Sequence[tuple[Piece | Rows, dict[str, object]]]) -> dict[str, object]:
    """Put together what optimizers remember of the parts of one parameter."""
    states = [(part, state) for part, state in parts if state]
    if not states:
        return {}
    joined: dict[str, object] = {}
    for key, first in states[0][1].items():
        if not isinstance(first, Tensor) or first.numel() != states[0][0].size or not first.dim():
            joined[key] = first
            continue
        whole = torch.zeros(parameter.shape, dtype=first.dtype)
        for part, state in states:
            value = state[key]
            assert isinstance(value, Tensor)
            if isinstance(part, Rows):
                part_of(whole, part).copy_(value)
            else:
                whole.view(-1)[part.start : part.stop] = value.reshape(-1)
        joined[key] = whole.to(parameter.device)
    return joined
