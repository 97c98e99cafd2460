"""Update rules of a server: a sum of gradients, a step of the user's optimizers, or an outer optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, final

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from fabricx.parameter_server.gradients import Gradient
from fabricx.parameter_server.optimizer_parts import Hyperparameters, PackedOptimizers, ServerOptimizers, nested, pack
from fabricx.parameter_server.server.replies import Replies
from fabricx.parameter_server.wire.messages import Groups, Pull, Reply, RuleState, ServerInit


class Rule(ABC):
    """How a server's part of the parameters changes with a gradient.

    Attributes:
        values: weights or sums that workers pull, flat.
        sums: the values are the newest sum of gradients; otherwise they are weights.
    """

    values: Tensor
    sums = False

    @abstractmethod
    def update(self, gradient: Gradient, groups: Groups | None, factor: float = 1.0) -> None:
        """Make an update.

        Args:
            gradient: gradient of this server's part.
            groups: hyperparameters of the workers; None for no change.
            factor: fraction of the weights' change to apply.
        """

    def reply(self, replies: Replies, worker: int, pull: Pull, inbox: Tensor, outbox: Tensor) -> Reply:
        """Write the values to a worker's vector.

        Args:
            replies: the server's replies.
            worker: number of the worker.
            pull: the request.
            inbox: vector from the worker, with the ids of requested rows.
            outbox: vector to the worker.

        Returns:
            The reply, without the counts of updates.
        """
        return replies.weights(worker, pull, self.values, inbox, outbox)

    def moved_rows(self, gradient: Gradient) -> dict[int, Tensor]:
        """Return the ids of the rows that an update changes, by table.

        Args:
            gradient: gradient of the update.
        """
        return {}

    def optimizers(self) -> ServerOptimizers | None:
        """Return the present optimizers; None if workers step."""
        return None

    def state(self) -> RuleState:
        """Return further state."""
        return RuleState({})


@final
class Sum(Rule):
    """Sums gradients; workers pull the sum and step.

    Args:
        init: initialisation of the server.
    """

    sums = True

    def __init__(self, init: ServerInit) -> None:
        self.values = torch.empty(0)
        self._newest = Gradient(self.values)

    def update(self, gradient: Gradient, groups: Groups | None, factor: float = 1.0) -> None:
        self.values, self._newest = gradient.dense, gradient

    def reply(self, replies: Replies, worker: int, pull: Pull, inbox: Tensor, outbox: Tensor) -> Reply:
        return replies.sum(self._newest, outbox)


class _Weights(Rule):
    """Keeps the weights in a vector, of which `pieces` are views."""

    def __init__(self, init: ServerInit) -> None:
        self._shard, self._pieces = init.shard, init.pieces
        self.values = torch.empty(init.shard.size, dtype=init.dtype)
        for piece, (start, stop) in zip(init.pieces, init.shard.spans, strict=True):
            self.values[start:stop].copy_(piece.detach().reshape(-1))
            piece.data = self.values[start:stop].view(piece.shape)


@final
class Step(_Weights):
    """Steps pieces of the parameters with the user's optimizers.

    Args:
        init: initialisation of the server.
    """

    def __init__(self, init: ServerInit) -> None:
        super().__init__(init)
        self._optimizers = [] if init.optimizers is None else init.optimizers.unpack(init.pieces)
        pushed = [] if init.optimizers is None else init.optimizers.pushed
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
        init: initialisation of the server.
    """

    def __init__(self, init: ServerInit) -> None:
        super().__init__(init)
        self._settings = init.settings
        saved = RuleState({}) if init.rule is None else init.rule
        zero = torch.zeros_like(self.values)
        self._velocity: Tensor = saved.tensors.get("velocity", zero).clone()
        self._gathered: Tensor = saved.tensors.get("gathered", zero).clone()
        self._rounds = saved.rounds

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
            self._velocity.mul_(settings.outer_momentum).add_(self._gathered, alpha=1.0 / settings.workers)
            self.values.sub_(self._velocity, alpha=settings.outer_lr * settings.outer_momentum)
            self._gathered.zero_()

    def state(self) -> RuleState:
        return RuleState({"velocity": self._velocity, "gathered": self._gathered}, self._rounds)


@final
class Correction:
    """Compensates gradients that were computed with older weights (delay compensation).

    Source: DC-ASGD, Zheng et al., ICML 2017, equations 10 and 14.

    Args:
        init: initialisation of the server.

    Attributes:
        mean_square: moving mean of the squared gradients, flat; None before the first, and if it is not used.
    """

    def __init__(self, init: ServerInit) -> None:
        self._settings = init.settings
        saved = None if init.rule is None else init.rule.tensors.get("mean_square")
        self.mean_square: Tensor | None = None if saved is None else saved[: init.shard.dense].clone()

    def __call__(self, gradient: Gradient, base: Tensor, now: Tensor, staleness: int) -> Gradient:
        """Return the gradient to step with.

        Args:
            gradient: a worker's gradient.
            base: weights with which it was computed, flat.
            now: present weights, flat.
            staleness: staleness in updates.
        """
        settings = self._settings
        if settings.compensation is not None:
            dense = gradient.dense
            square = dense * dense
            strength: Tensor | float = settings.dc_lambda
            if settings.compensation == "dc-adaptive":
                if self.mean_square is None:
                    self.mean_square = torch.zeros_like(square)
                self.mean_square.lerp_(square, 1.0 - settings.dc_momentum)
                strength = settings.dc_lambda / (self.mean_square + 1e-7).sqrt()
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
        staleness: staleness in updates.


    >>> [damping(staleness) for staleness in (0, 1, 2, 4)]
    [1.0, 1.0, 0.5, 0.25]
    """
    return 1.0 / max(1, staleness)


def make_rule(init: ServerInit) -> Rule:
    """Return the update rule for the settings of an initialisation.

    Args:
        init: the server's initialisation.
    """
    if init.settings.outer is not None:
        return Outer(init)
    return Sum(init) if init.optimizers is None else Step(init)
