"""Update rules of a server: a sum of gradients, a step of the user's optimizers, or an outer optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from fabricx.parameter_server.optimizer_parts import Hyperparameters, PackedOptimizers, ServerOptimizers, nested, pack
from fabricx.parameter_server.wire.messages import Begin, Groups, Settings

BLOCK: Final = 1 << 16  # elements


@final
@dataclass(slots=True)
class Gradient:
    """A gradient for a server's part of the parameters.

    Attributes:
        dense: of all pieces, flat.
        missing: numbers of the pieces without a gradient.
        rows: by table with a gradient: ids of rows, shape [k], and their gradients, shape [k, width].
    """

    dense: Tensor
    missing: frozenset[int] = frozenset()
    rows: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def clone(self) -> Gradient:
        """Return a copy in new memory."""
        rows = {number: (ids.clone(), values.clone()) for number, (ids, values) in self.rows.items()}
        return Gradient(self.dense.clone(), self.missing, rows)

    def __truediv__(self, divisor: float) -> Gradient:
        rows = {number: (ids, values / divisor) for number, (ids, values) in self.rows.items()}
        return Gradient(self.dense / divisor, self.missing, rows)


def merge_rows(parts: Sequence[Mapping[int, tuple[Tensor, Tensor]]]) -> dict[int, tuple[Tensor, Tensor]]:
    """Sum gradients of rows by id; ids are unique and ascending in the result.

    Args:
        parts: see `Gradient.rows`.
    """
    merged = {}
    for number in sorted({number for part in parts for number in part}):
        every = [part[number] for part in parts if number in part]
        ids, positions = torch.cat([ids for ids, _ in every]).unique(return_inverse=True)
        values = torch.cat([values for _, values in every])
        merged[number] = ids, values.new_zeros(len(ids), values.shape[1]).index_add_(0, positions, values)
    return merged


def add_up(parts: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    """Write the sum of vectors, added in their order, to other vectors, which may be among them.

    The sum is computed in blocks, so that each vector is read once and results are still in the cache when copied.

    Args:
        parts: vectors to add.
        into: vectors to write.
    """
    later = {part.data_ptr() for part in parts[2:]}
    target = next((vector for vector in into if vector.data_ptr() not in later), None)
    for start in range(0, len(parts[0]), BLOCK):
        first, *others = (part[start : start + BLOCK] for part in parts)
        total = torch.empty_like(first) if target is None else target[start : start + BLOCK]
        if others:
            torch.add(first, others[0], out=total)
        else:
            total.copy_(first)
        for other in others[1:]:
            total.add_(other)
        for vector in into:
            if vector is not target:
                vector[start : start + BLOCK].copy_(total)


def clip(gradient: Tensor, kind: str, spans: Iterable[tuple[int, int]], limit: float) -> None:
    """Clip spans of a gradient in place.

    Args:
        gradient: flat.
        kind: "value" limits each element, "norm" the 2-norm of all spans.
        spans: (start, stop) of the pieces.
        limit: maximum.
    """
    pieces = [gradient[start:stop] for start, stop in spans]
    if not pieces:  # all parameters of the optimizer are on other servers
        return
    if kind == "value":
        torch._foreach_clamp_min_(pieces, -limit)
        torch._foreach_clamp_max_(pieces, limit)
        return
    norm = sum(float(piece.square().sum()) for piece in pieces) ** 0.5
    if norm + 1e-6 > limit:  # same epsilon as torch's clip_grad_norm_
        torch._foreach_mul_(pieces, limit / (norm + 1e-6))


class Rule(ABC):
    """How a server's part of the parameters changes with a gradient.

    Attributes:
        values: what workers pull, flat.
    """

    values: Tensor

    @abstractmethod
    def update(self, gradient: Gradient, groups: Groups | None, factor: float = 1.0) -> None:
        """Make an update.

        Args:
            gradient: of this server's part.
            groups: hyperparameters of the workers; None for no change.
            factor: fraction of the weights' change to apply.
        """

    def moved_rows(self, gradient: Gradient) -> dict[int, Tensor]:
        """Return the ids of the rows that an update changes, by table.

        Args:
            gradient: of the update.
        """
        return {}

    def optimizers(self) -> ServerOptimizers | None:
        """Return the present optimizers; None if workers step."""
        return None


@final
class Sum(Rule):
    """Sums gradients; workers pull the sum and step.

    Args:
        begin: initialisation of the server.
    """

    def __init__(self, begin: Begin) -> None:
        self.values = torch.empty(0)
        self.newest = Gradient(self.values)

    def update(self, gradient: Gradient, groups: Groups | None, factor: float = 1.0) -> None:
        self.values, self.newest = gradient.dense, gradient


class _Weights(Rule):
    """Keeps the weights in a vector, of which `pieces` are views."""

    def __init__(self, begin: Begin) -> None:
        self._shard, self._pieces = begin.shard, begin.pieces
        self.values = torch.empty(begin.shard.size, dtype=begin.dtype)
        for piece, (start, stop) in zip(begin.pieces, begin.shard.spans, strict=True):
            self.values[start:stop].copy_(piece.detach().reshape(-1))
            piece.data = self.values[start:stop].view(piece.shape)


@final
class Step(_Weights):
    """Steps pieces of the parameters with the user's optimizers.

    Args:
        begin: initialisation of the server.
    """

    def __init__(self, begin: Begin) -> None:
        super().__init__(begin)
        self._optimizers = [] if begin.optimizers is None else begin.optimizers.unpack(begin.pieces)
        pushed = [] if begin.optimizers is None else begin.optimizers.pushed
        self._hyperparameters = Hyperparameters(self._optimizers, pushed)
        # With sparse gradients, these optimizers change only the rows of the gradient.
        kinds = (optim.SGD, optim.Adagrad, optim.SparseAdam)
        self._by_rows = all(type(stepper) in kinds for stepper in self._steppers())

    def _steppers(self) -> list[Optimizer]:
        """Return the optimizers of tables."""
        tables = {id(table) for table in self._pieces[len(self._shard.pieces) :]}
        groups = [(optimizer, group) for optimizer in nested(self._optimizers) for group in optimizer.param_groups]
        return [optimizer for optimizer, group in groups if any(id(p) in tables for p in group["params"])]

    def update(self, gradient: Gradient, groups: Groups | None, factor: float = 1.0) -> None:
        dense = len(self._shard.pieces)
        for number, (piece, (start, stop)) in enumerate(zip(self._pieces[:dense], self._shard.rooms, strict=False)):
            piece.grad = None if number in gradient.missing else gradient.dense[start:stop].view(piece.shape)
        for number, table in enumerate(self._pieces[dense:]):
            table.grad = _sparse(gradient.rows.get(number), table)
        if groups is not None:
            self._hyperparameters.apply(groups)
        before = [] if factor == 1.0 else [part.clone() for part in self._touched(gradient)]
        for optimizer in self._optimizers:
            optimizer.step()
        if before:
            self._keep_part(gradient, before, factor)

    def _touched(self, gradient: Gradient) -> list[Tensor]:
        """Return the weights that a gradient changes: all dense weights, and rows of tables."""
        tables = self._pieces[len(self._shard.pieces) :]
        rows = [tables[number].detach()[ids] for number, ids in self.moved_rows(gradient).items()]
        return [self.values[: self._shard.dense], *rows]

    def moved_rows(self, gradient: Gradient) -> dict[int, Tensor]:
        # Other optimizers may change every row of a table with a gradient.
        return {
            number: ids.long() if self._by_rows else torch.arange(self._shard.rows[number].height)
            for number, (ids, _) in gradient.rows.items()
        }

    def _keep_part(self, gradient: Gradient, before: list[Tensor], factor: float) -> None:
        after = [torch.lerp(old, new, factor) for old, new in zip(before, self._touched(gradient), strict=True)]
        self.values[: self._shard.dense].copy_(after[0])
        tables = self._pieces[len(self._shard.pieces) :]
        for (number, ids), rows in zip(self.moved_rows(gradient).items(), after[1:], strict=True):
            tables[number].detach()[ids] = rows

    def optimizers(self) -> ServerOptimizers:
        packed = pack(self._optimizers, self._pieces, pushed=self._hyperparameters.pushed)
        return ServerOptimizers(self._shard, packed)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_optimizers": self.optimizers().packed, "_hyperparameters": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        packed: PackedOptimizers = state["_optimizers"]
        for piece, (start, stop) in zip(self._pieces, self._shard.spans, strict=True):
            piece.data = self.values[start:stop].view(piece.shape)
        self._optimizers = packed.unpack(self._pieces)
        self._hyperparameters = Hyperparameters(self._optimizers, packed.pushed)


def _sparse(rows: tuple[Tensor, Tensor] | None, table: Tensor) -> Tensor | None:
    if rows is None:
        return None
    ids, values = rows
    return torch.sparse_coo_tensor(ids.long()[None], values, table.shape, is_coalesced=True, check_invariants=False)


@final
class Outer(_Weights):
    """Outer optimizer for workers that train local rounds and push their weight changes.

    Sources: "sum": Dean et al., NIPS 2012 (Downpour); "elastic": Zhang, Choromanska, LeCun, "Deep learning with Elastic
    Averaging SGD", NIPS 2015, equation 5; "nesterov": Liu et al., "Asynchronous Local-SGD Training for Language
    Modeling", arXiv 2401.09135, algorithm 3 with c = 0: the momentum is applied once per as many rounds as workers.

    Args:
        begin: initialisation of the server.
    """

    def __init__(self, begin: Begin) -> None:
        super().__init__(begin)
        self._settings = begin.settings
        self.velocity = torch.zeros_like(self.values) if begin.velocity is None else begin.velocity.clone()
        self._gathered = torch.zeros_like(self.values)
        self._rounds = 0

    def update(self, gradient: Gradient, groups: Groups | None, factor: float = 1.0) -> None:
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
    """Compensates gradients that were computed with older weights (delay compensation).

    Source: DC-ASGD, Zheng et al., ICML 2017, equations 10 and 14.

    Args:
        settings: of the server.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._mean_square: Tensor | None = None

    def __call__(self, gradient: Gradient, base: Tensor, now: Tensor, staleness: int) -> Gradient:
        """Return the gradient to step with.

        Args:
            gradient: of a worker.
            base: weights with which it was computed, flat.
            now: present weights, flat.
            staleness: in updates.
        """
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
        return gradient


def damping(staleness: int) -> float:
    """Return the fraction of an update for a gradient of the specified staleness.

    The learning rate is divided by the staleness, and the optimizer's moments use the whole gradient: dividing the
    gradient would not change the steps of Adam, which normalises by the gradient's scale. With momentum, earlier
    gradients in an update are damped as well, by the staleness of the gradient that causes the update.

    Source: Zhang, Gupta, Lian, Liu, "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI 2016 (arXiv
    1511.05950): the learning rate of each gradient is divided by its staleness.

    Args:
        staleness: in updates.


    >>> [damping(staleness) for staleness in (0, 1, 2, 4)]
    [1.0, 1.0, 0.5, 0.25]
    """
    return 1.0 / max(1, staleness)


def make_rule(begin: Begin) -> Rule:
    """Return the update rule for the settings of an initialisation.

    Args:
        begin: of the server.
    """
    if begin.settings.outer is not None:
        return Outer(begin)
    return Sum(begin) if begin.optimizers is None else Step(begin)
