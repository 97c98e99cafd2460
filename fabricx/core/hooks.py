"""Resolves once which module and callbacks override which hook, so that unused hooks cost nothing."""

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
    from fabricx.trainer.trainer import Trainer

Hook = tuple[Callable[..., Any], ...]


def _hooks_of(contract: type) -> frozenset[str]:
    return frozenset(name for name in vars(contract) if name.startswith("on_"))


CALLBACK_HOOKS: Final = _hooks_of(Callback) | {"setup", "teardown"}
MODULE_HOOKS: Final = _hooks_of(ModuleHooks) | {"setup", "teardown"}


class Hooks:
    """For each hook name, the functions to call: callbacks, the module, callbacks that watch metrics, checkpoints last.

    Reading an attribute gives a tuple, empty where nobody overrides the hook. Callbacks' functions have the trainer
    and the module bound already; those of the module are its bound methods.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Hook: ...

    def __init__(self, trainer: Trainer, module: Module, callbacks: Sequence[Callback]) -> None:
        first = [callback for callback in callbacks if not callback.watches_metrics]
        watching = [callback for callback in callbacks if callback.watches_metrics]
        watching.sort(key=lambda callback: hasattr(callback, "best_model_path"))  # a checkpoint has what others decided
        for name in CALLBACK_HOOKS | MODULE_HOOKS:
            before = _bound(name, first, trainer, module)
            overridden = name in MODULE_HOOKS and overrides(module, name, ModuleHooks)
            own = (getattr(module, name),) if overridden else ()
            setattr(self, name, (*before, *own, *_bound(name, watching, trainer, module)))
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


def _bound(name: str, callbacks: Iterable[Callback], trainer: Trainer, module: Module) -> Hook:
    if name not in CALLBACK_HOOKS:
        return ()
    return tuple(
        functools.partial(getattr(callback, name), trainer, module)
        for callback in callbacks
        if overrides(callback, name, Callback)
    )


def overrides(obj: object, name: str, contract: type) -> bool:
    """Return whether `obj` has its own version of a method of `contract`.

    >>> class Mine(Callback):
    ...     def on_fit_start(self, trainer, module): ...
    >>> overrides(Mine(), "on_fit_start", Callback), overrides(Mine(), "on_fit_end", Callback)
    (True, False)
    """
    if name in vars(obj):
        return True  # put onto the object itself, as mocks are
    return getattr(type(obj), name, None) is not getattr(contract, name, None)


def check_hooks(obj: object) -> None:
    """Refuse an object with an `on_...` method that no hook is called by.

    Raises:
        ValueError: names the method and the nearest hook.
    """
    known = CALLBACK_HOOKS if isinstance(obj, Callback) else MODULE_HOOKS
    for cls in type(obj).__mro__:
        for name, value in vars(cls).items():
            if name.startswith("on_") and inspect.isfunction(value) and name not in known:
                raise ValueError(
                    f"{cls.__name__}.{name} would never be called: there is no hook of that name."
                    f"{did_you_mean(name, known)}\n  hooks begin with 'on_'; give a method of your own another name"
                )


def accepts(function: Callable[..., Any], most: int) -> int:
    """Return how many of `most` positional arguments a step takes, so that steps may take fewer.

    >>> accepts(lambda batch: None, 3), accepts(lambda batch, *rest: None, 3)
    (1, 3)
    """
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return most
    return min(most, sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters))
