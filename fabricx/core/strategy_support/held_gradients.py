"""Gradients that a module's own steps hold for later batches, as a part of the state of their optimizer."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, final

from torch import Tensor
from torch.optim import Optimizer

from fabricx.checkpoint.optimizer_numbers import HELD

ENOUGH: Final = 8  # batches after which clearing is the rule
_Mark = tuple[Any, int]  # weak reference to a gradient, and its version


@final
class HeldGradients:
    """Gradients that no optimizer has used yet, as in a manual accumulation over batches.

    Checkpoints and replacements of workers need them. A gradient that an optimizer has used is not held, unless the
    steps show that gradients are never cleared.

    Args:
        optimizers: optimizers of a module with manual optimization.

    Attributes:
        needed: an optimizer has used gradients of an earlier batch.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self.needed = False
        self._never_cleared = False  # optimizers use gradients again, together with later gradients
        self._used: dict[int, _Mark] = {}  # by the id of the parameter
        # Gradients from before the batch (False), or from before a step that used them (True), until they are cleared:
        self._earlier: dict[int, bool] = {}
        self._observes = False  # whether the batch began with held gradients
        self._cleared = 0  # such batches in a row that cleared these
        self._optimizers = list(optimizers)
        self._hooks = []
        for optimizer in self._optimizers:
            _HELD[optimizer] = self
            for parameter in _parameters(optimizer):
                if parameter.requires_grad and not _is_sharded(parameter):  # fsdp calls no such hooks
                    self._hooks.append(parameter.register_hook(functools.partial(self._changes, parameter)))

    def close(self) -> None:
        """Watch the optimizers no longer."""
        for hook in self._hooks:
            hook.remove()
        for optimizer in self._optimizers:
            _HELD.pop(optimizer, None)

    def of(self, optimizer: Optimizer) -> dict[Tensor, Tensor]:
        """Return the held gradients of an optimizer, by parameter.

        Args:
            optimizer: an optimizer of `optimizers`.
        """
        return {
            parameter: parameter.grad
            for parameter in _parameters(optimizer)
            if parameter.grad is not None
            and (self._never_cleared or not _is(self._used.get(id(parameter)), parameter.grad))
        }

    def begin_batch(self) -> bool:
        """Begin a batch; return whether it may need gradients of earlier batches."""
        if self._observes:
            self._cleared = 0 if False in self._earlier.values() else self._cleared + 1
        if self._decided and not self.needed:
            self._observes = False
            return False
        held = [parameter for optimizer in self._optimizers for parameter in self.of(optimizer)]
        self._observes = bool(held) and not self._decided
        if self._observes:
            self._earlier.update({id(parameter): False for parameter in held if not _is_sharded(parameter)})
        return self.may_be_needed

    @property
    def may_be_needed(self) -> bool:
        """Return whether a later batch may use gradients that are held now."""
        return (self.needed or not self._cleared) and any(map(self.of, self._optimizers))

    @property
    def _decided(self) -> bool:
        return self.needed or self._cleared >= ENOUGH

    def before_step(self, optimizer: Optimizer) -> None:
        """Note whether a step uses gradients of an earlier batch, or gradients that were used before.

        Args:
            optimizer: the optimizer that steps.
        """
        for parameter in _parameters(optimizer):
            self._forget_if_cleared(parameter)
            used = self._earlier.get(id(parameter))
            if used is not None:
                self.needed, self._never_cleared = True, self._never_cleared or used

    def after_step(self, optimizer: Optimizer) -> None:
        """Note which gradients a step has used.

        Args:
            optimizer: the optimizer that has stepped.
        """
        for parameter in _parameters(optimizer):
            if parameter.grad is not None:
                self._used[id(parameter)] = _mark(parameter.grad)
                if not self._decided and not _is_sharded(parameter):
                    self._earlier[id(parameter)] = True

    def before_backward(self) -> None:
        """Note which gradients of earlier batches were cleared; strategies may set gradients aside in a backward."""
        for optimizer in self._optimizers if self._earlier else ():
            for parameter in _parameters(optimizer):
                self._forget_if_cleared(parameter)

    def _changes(self, parameter: Tensor, gradient: Tensor) -> None:
        self._used.pop(id(parameter), None)  # a strategy may write the new gradient without a new version

    def _forget_if_cleared(self, parameter: Tensor) -> None:
        if id(parameter) in self._earlier and (parameter.grad is None or not bool(parameter.grad.any())):
            del self._earlier[id(parameter)]


@final
class KeptGradients:
    """Gradients that a module's `optimizer_zero_grad` may keep for the next update, with automatic optimization.

    They are kept until several calls in a row have cleared all gradients.

    Args:
        optimizers: optimizers of the module.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._kept = self._changes = False  # gradients were kept, and some of them were not zero
        self._calls = self._cleared = (
            0  # calls, and those of them that found gradients, none of which is left or not zero
        )
        for optimizer in self._optimizers:
            _HELD[optimizer] = self

    def close(self) -> None:
        """Watch the optimizers no longer."""
        for optimizer in self._optimizers:
            _HELD.pop(optimizer, None)

    def of(self, optimizer: Optimizer) -> dict[Tensor, Tensor]:
        """Return the gradients of an optimizer that the next update may use, by parameter.

        Args:
            optimizer: an optimizer of `optimizers`.
        """
        if not self._kept and self._calls > ENOUGH:  # the same on ranks that have different parameters
            return {}
        return {parameter: parameter.grad for parameter in _parameters(optimizer) if parameter.grad is not None}

    @contextmanager
    def zeroes(self, optimizer: Optimizer) -> Iterator[None]:
        """Context of the module's `optimizer_zero_grad`, whose effect is noted.

        Args:
            optimizer: an optimizer of `optimizers`.
        """
        had = any(parameter.grad is not None for parameter in _parameters(optimizer))
        yield
        left = [parameter.grad for parameter in _parameters(optimizer) if parameter.grad is not None]
        self._calls += 1
        self._kept = self._kept or bool(left)
        if left and not self._changes and self._cleared < ENOUGH:
            self._changes = any(bool(getattr(gradient, "_local_tensor", gradient).any()) for gradient in left)
        self._cleared += had and not self._changes

    def begin_again(self) -> None:
        """Keep all gradients again for the next calls, as ranks do that have joined."""
        self._calls, self._kept = 0, False

    @property
    def accumulates(self) -> bool:
        """Return whether a call has kept gradients, to which the next backward adds."""
        return self._changes

    @property
    def may_be_needed(self) -> bool:
        """Return whether the next backward may add to gradients that are there now, so that it can't be repeated."""
        return self._changes or (not self._cleared and any(map(self.of, self._optimizers)))


_HELD: weakref.WeakKeyDictionary[Optimizer, HeldGradients | KeptGradients] = weakref.WeakKeyDictionary()


def held_gradients(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """Return the gradients that an optimizer holds for later batches, by parameter.

    Args:
        optimizer: optimizer of a module.
    """
    watched = _HELD.get(optimizer)
    return {} if watched is None else watched.of(optimizer)


def keep_in_state(optimizer: Optimizer) -> None:
    """Put held gradients into the state of an optimizer, until `take_from_state`.

    Args:
        optimizer: optimizer of a module.
    """
    for parameter, gradient in held_gradients(optimizer).items():
        optimizer.state[parameter][HELD] = gradient


def take_from_state(optimizer: Optimizer, *, loaded: bool) -> None:
    """Move gradients from the state of an optimizer to `grad` of its parameters.

    Args:
        optimizer: optimizer of a module.
        loaded: the state was loaded; gradients that it does not have are then cleared.
    """
    watched = optimizer in _HELD
    for parameter in _parameters(optimizer):
        values = optimizer.state.get(parameter, {})
        gradient = values.pop(HELD, None)
        if gradient is not None and not values:
            del optimizer.state[parameter]  # optimizers create the state of a parameter if it has none
        if watched and (loaded or gradient is not None):
            parameter.grad = gradient


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_sharded(parameter: Tensor) -> bool:
    """Return whether ranks have different parts of a parameter, so that they would decide differently."""
    return hasattr(parameter, "_local_tensor")


def _mark(gradient: Tensor) -> _Mark:
    return weakref.ref(gradient), getattr(gradient, "_local_tensor", gradient)._version


def _is(mark: _Mark | None, gradient: Tensor | None) -> bool:
    """Return whether a gradient is the marked gradient, and has not changed."""
    return mark is not None and gradient is not None and mark[0]() is gradient and mark[1] == _mark(gradient)[1]
