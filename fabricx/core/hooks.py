"""Determines once which hooks the module and the callbacks override, so that unused hooks cost nothing."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from fabricx.core.callback import Callback
from fabricx.core.module_hooks import ModuleHooks
from fabricx.errors import did_you_mean

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.core.trainer import TrainerProtocol

Hook = tuple[Callable[..., Any], ...]


def _hooks_of(contract: type) -> frozenset[str]:
    return frozenset(name for name in vars(contract) if name.startswith("on_"))


CALLBACK_HOOKS: Final = _hooks_of(Callback) | {"setup", "teardown"}
_LIGHTNING: Final = ("lightning", "pytorch_lightning")
MODULE_HOOKS: Final = _hooks_of(ModuleHooks) | {"setup", "teardown"}


class Hooks:
    """Functions to call for each hook: callbacks, the module, callbacks that watch metrics, then checkpoints.

    Each hook name is an attribute with a tuple of functions, which is empty if the hook is not overridden. The trainer
    and the module are bound to the functions of callbacks; functions of the module are its bound methods.

    Args:
        trainer: passed to callbacks.
        module: the user's module.
        callbacks: in their order of calls.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Hook: ...

    def __init__(self, trainer: TrainerProtocol, module: Module, callbacks: Sequence[Callback]) -> None:
        first = [callback for callback in callbacks if not callback.watches_metrics]
        watching = [callback for callback in callbacks if callback.watches_metrics]
        watching.sort(key=lambda callback: callback.trainer_role == "checkpoint")  # checkpoints save others' decisions
        for name in CALLBACK_HOOKS | MODULE_HOOKS:
            before = _bound(name, first, trainer, module)
            overridden = name in MODULE_HOOKS and overrides(module, name, ModuleHooks)
            of_module = (getattr(module, name),) if overridden else ()
            setattr(self, name, (*before, *of_module, *_bound(name, watching, trainer, module)))
        self.train_batch_end_watching: Hook = _bound("on_train_batch_end", watching, trainer, module)
        self.train_batch_end_others = _without(self.on_train_batch_end, self.train_batch_end_watching)
        every = [callback for callback in first if callback.every_batch]
        self.train_batch_end_empty: Hook = _bound("on_train_batch_end", every, trainer, module)
        self.train_epoch_end_watching: Hook = _bound("on_train_epoch_end", watching, trainer, module)
        self.train_epoch_end_others = _without(self.on_train_epoch_end, self.train_epoch_end_watching)
        self.validation_end_watching: Hook = _bound("on_validation_end", watching, trainer, module)
        self.validation_end_others = _without(self.on_validation_end, self.validation_end_watching)


def _without(hook: Hook, last: Hook) -> Hook:
    return hook[: len(hook) - len(last)]


def _bound(name: str, callbacks: Iterable[Callback], trainer: TrainerProtocol, module: Module) -> Hook:
    if name not in CALLBACK_HOOKS:
        return ()
    return tuple(
        functools.partial(getattr(callback, name), trainer, module)
        for callback in callbacks
        if overrides(callback, name, Callback)
    )


def overrides(obj: object, name: str, contract: type) -> bool:
    """Return whether an object overrides a method of its contract.

    Args:
        obj: module or callback.
        name: of the method.
        contract: class with the default.

    >>> class Mine(Callback):
    ...     def on_fit_start(self, trainer, module): ...
    >>> overrides(Mine(), "on_fit_start", Callback), overrides(Mine(), "on_fit_end", Callback)
    (True, False)
    """
    if name in vars(obj):
        return True  # an attribute of the instance, such as a mock
    return getattr(type(obj), name, None) is not getattr(contract, name, None)


def check_hooks(obj: object) -> None:
    """Refuse an object with an `on_...` method that is not a hook.

    Args:
        obj: module or callback.

    Raises:
        ValueError: names the method and the nearest hook.
    """
    known = CALLBACK_HOOKS if isinstance(obj, Callback) else MODULE_HOOKS
    for cls in type(obj).__mro__:
        if cls.__module__.partition(".")[0] in _LIGHTNING:  # has hooks that fabricx replaces
            continue
        for name, value in vars(cls).items():
            if name.startswith("on_") and inspect.isfunction(value) and name not in known:
                raise ValueError(
                    f"{cls.__name__}.{name} would never be called: there is no hook of that name."
                    f"{did_you_mean(name, known)}\n  names that begin with 'on_' are for hooks; rename other methods"
                )


def accepts(function: Callable[..., Any], most: int) -> int:
    """Return how many of `most` positional arguments a step accepts, so that steps may have fewer parameters.

    Args:
        function: the step.
        most: number of arguments that the loop can pass.

    >>> accepts(lambda batch: None, 3), accepts(lambda batch, *rest: None, 3)
    (1, 3)
    """
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return most
    return min(most, sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters))


def call(hook: Hook, *args: Any) -> None:
    """Call every function of a hook, in order.

    Args:
        hook: attribute of `Hooks`.
        args: arguments of the hook.
    """
    for function in hook:
        function(*args)
