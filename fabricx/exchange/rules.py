"""What a server does with a gradient: hand the sum back, or step the user's own optimizer with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final, final

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from fabricx.exchange.messages import Begin, Groups, Settings

# Each element is stepped by itself: a part of a parameter is stepped like the whole.
_ELEMENTWISE: Final = {
    optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop, optim.Adadelta, optim.Adamax, optim.NAdam,
    optim.RAdam, optim.ASGD, optim.Rprop,
}  # fmt: skip
_BY_TENSOR: Final = {"Adafactor", "Muon"}


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


class Rule(ABC):
    """A server's part of the parameters, and how it changes."""

    values: Tensor  # what workers pull, flat
    missing: frozenset[int] = frozenset()  # pieces that have no gradient in the sum

    @abstractmethod
    def update(self, gradient: Tensor, missing: frozenset[int], groups: Groups | None) -> None:
        """Make one update of a gradient, flat; the pieces with the numbers in `missing` have none."""

    def state(self) -> list[list[dict[str, object]]]:
        """Return what each optimizer remembers of each piece."""
        return []


@final
class Sum(Rule):
    """Workers step: they pull the sum."""

    def __init__(self, begin: Begin) -> None:
        self.values = torch.zeros(begin.size, dtype=begin.dtype)

    def update(self, gradient: Tensor, missing: frozenset[int], groups: Groups | None) -> None:
        self.values, self.missing = gradient, missing


@final
class Step(Rule):
    """The user's optimizers step pieces of the parameters, which lie in one vector."""

    def __init__(self, begin: Begin) -> None:
        self._optimizers = begin.optimizers or []
        self._pieces = begin.pieces
        self.values = torch.empty(begin.size, dtype=begin.dtype)
        self._parts = begin.spans
        for piece, (start, stop) in zip(begin.pieces, begin.spans, strict=True):
            self.values[start:stop].copy_(piece.detach())
            piece.data = self.values[start:stop]

    def update(self, gradient: Tensor, missing: frozenset[int], groups: Groups | None) -> None:
        for number, (piece, (start, stop)) in enumerate(zip(self._pieces, self._parts, strict=True)):
            piece.grad = None if number in missing else gradient[start:stop]
        for optimizer, given in zip(self._optimizers, groups or [], strict=False):
            for group, values in zip(optimizer.param_groups, given, strict=True):
                group.update(values)
        for optimizer in self._optimizers:
            optimizer.step()

    def state(self) -> list[list[dict[str, object]]]:
        return [[dict(optimizer.state.get(piece, {})) for piece in self._pieces] for optimizer in self._optimizers]


@final
class Correction:
    """What is done to a gradient that was computed with older weights than it meets.

    Sources: DC-ASGD, Zheng et al., ICML 2017, equations 10 and 14; dividing by the staleness: Zhang et al., "Staleness-
    aware Async-SGD", IJCAI 2016.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._mean_square: Tensor | None = None

    def __call__(self, gradient: Tensor, base: Tensor, now: Tensor, staleness: int) -> Tensor:
        """Return the gradient to step with; all are flat, `base` is what the worker had."""
        settings = self._settings
        if settings.compensation is not None:
            square = gradient * gradient
            strength: Tensor | float = settings.dc_lambda
            if settings.compensation == "dc-adaptive":
                if self._mean_square is None:
                    self._mean_square = torch.zeros_like(square)
                self._mean_square.lerp_(square, 1.0 - settings.dc_momentum)
                strength = settings.dc_lambda / (self._mean_square + 1e-7).sqrt()
            if staleness:
                gradient = gradient + strength * square * (now - base)
        return gradient / staleness if settings.damp and staleness > 1 else gradient


def make_rule(begin: Begin) -> Rule:
    """Return the rule that a server was asked for."""
    return Sum(begin) if begin.optimizers is None else Step(begin)


def sliced(
    optimizers: Sequence[Optimizer], pieces: Sequence[tuple[Tensor, int, int]]
) -> tuple[list[Optimizer], list[Tensor]]:
    """Return copies of optimizers that step pieces of their parameters.

    Args:
        optimizers: the user's own; they stay as they are.
        pieces: (parameter, start, stop), seen as vectors.

    Returns:
        the copies, and the pieces, as parameters.
    """
    made: list[Tensor] = []
    of: dict[int, list[tuple[nn.Parameter, Tensor, int, int]]] = {}
    for parameter, start, stop in pieces:
        piece = nn.Parameter(parameter.detach().reshape(-1)[start:stop].clone().cpu())
        made.append(piece)
        of.setdefault(id(parameter), []).append((piece, parameter, start, stop))
    copies = []
    for optimizer in optimizers:
        copy = object.__new__(type(optimizer))
        groups = [
            {**group, "params": [cut[0] for p in group["params"] for cut in of.get(id(p), [])]}
            for group in optimizer.param_groups
        ]
        state: defaultdict[Tensor, dict[str, object]] = defaultdict(dict)
        state |= {
            piece: {key: _piece_of(value, whole, start, stop) for key, value in optimizer.state[whole].items()}
            for p in (p for group in optimizer.param_groups for p in group["params"])
            for piece, whole, start, stop in of.get(id(p), [])
            if whole in optimizer.state
        }
        copy.__setstate__({"defaults": optimizer.defaults, "state": state, "param_groups": groups})
        copies.append(copy)
    return copies, made


def _piece_of(value: object, whole: Tensor, start: int, stop: int) -> object:
    """Return a piece of what an optimizer remembers of a parameter; numbers and what has another shape as they are."""
    if not isinstance(value, Tensor):
        return value
    part = value.detach().reshape(-1)[start:stop] if value.shape == whole.shape else value.detach()
    return part.cpu().clone()  # each piece counts its own steps
