"""Determines once which hooks the module and the callbacks override, so that unused hooks cost nothing."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Final

from fabricx.core.callback import Callback
from fabricx.core.datamodule import DataModule
from fabricx.core.hook_calls.former_names import (
    FORMER_DATA_HOOKS,
    FORMER_HOOKS,
    FORMER_PARAMETERS,
    former_parameter,
    meant_name,
)
from fabricx.core.hook_calls.signatures import fitting, parameter_names, unknown_parameters
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
DATA_HOOKS: Final = _hooks_of(DataModule)
_STEPS: Final = ("training_step", "validation_step", "test_step", "predict_step")
_FRAMEWORK: Final = ("fabricx", "torch")  # whose classes are not checked for parameters and similar names


class Hooks:
    """Functions to call for each hook: callbacks, the module, callbacks that watch metrics, then checkpoints.

    Each hook name is an attribute with a tuple of functions, which is empty if the hook is not overridden. The trainer
    and the module are bound to the functions of callbacks; functions of the module are its bound methods.

    Args:
        trainer: passed to callbacks.
        module: the user's module.
        callbacks: callbacks in their order of calls.
        around: returns a context for each call of a user's function, by the name of the hook; None for no context.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Hook: ...

    def __init__(
        self, trainer: TrainerProtocol, module: Module, callbacks: Sequence[Callback],
        around: Callable[[str], AbstractContextManager[Any]] | None = None,
    ) -> None:  # fmt: skip
        first = [callback for callback in callbacks if not callback.watches_metrics]
        watching = [callback for callback in callbacks if callback.watches_metrics]
        # Checkpoints save the decisions of other callbacks.
        watching.sort(key=lambda callback: callback.trainer_role == "checkpoint")
        for name in CALLBACK_HOOKS | MODULE_HOOKS:
            before = _bound(name, first, trainer, module, around)
            overridden = name in MODULE_HOOKS and overrides(module, name, ModuleHooks)
            of_module = (_within(around, module, name, ModuleHooks),) if overridden else ()
            after = _bound(name, watching, trainer, module, around)
            # In Lightning, callbacks see the entries that the module has changed.
            ordered = (*of_module, *before, *after) if name == "on_load_checkpoint" else (*before, *of_module, *after)
            setattr(self, name, ordered)
            if name == "on_train_batch_start":
                self._skips = len(before) if of_module else -1
        self.train_batch_end_watching: Hook = _bound("on_train_batch_end", watching, trainer, module, around)
        self.train_batch_end_others = _without(self.on_train_batch_end, self.train_batch_end_watching)
        overriding = [callback for callback in first if overrides(callback, "on_train_batch_end", Callback)]
        # The same functions as in `train_batch_end_others`, in which the loop looks for them.
        self.train_batch_end_empty: Hook = tuple(
            hook for callback, hook in zip(overriding, self.on_train_batch_end, strict=False) if callback.every_batch
        )
        self.train_epoch_end_watching: Hook = _bound("on_train_epoch_end", watching, trainer, module, around)
        self.train_epoch_end_others = _without(self.on_train_epoch_end, self.train_epoch_end_watching)
        self.validation_end_watching: Hook = _bound("on_validation_end", watching, trainer, module, around)
        self.validation_end_others = _without(self.on_validation_end, self.validation_end_watching)

    def skips_epoch(self, number: int, returned: Any) -> bool:
        """Return whether the rest of the epoch is skipped, as the module, and not a callback, can ask for.

        Args:
            number: index of the function in `on_train_batch_start`; the loop may have wrapped the function.
            returned: its result.
        """
        return returned == -1 and number == self._skips


def _without(hook: Hook, last: Hook) -> Hook:
    return hook[: len(hook) - len(last)]


def _bound(
    name: str, callbacks: Iterable[Callback], trainer: TrainerProtocol, module: Module,
    around: Callable[[str], AbstractContextManager[Any]] | None,
) -> Hook:  # fmt: skip
    if name not in CALLBACK_HOOKS:
        return ()
    return tuple(
        functools.partial(_within(around, callback, name, Callback), trainer, module)
        for callback in callbacks
        if overrides(callback, name, Callback)
    )


def _within(
    around: Callable[[str], AbstractContextManager[Any]] | None, obj: Module | Callback, name: str, contract: type
) -> Callable[..., Any]:  # fmt: skip
    """Return a hook that is called in a context; hooks of fabricx work with the parts of a rank."""
    function = fitted(obj, name, contract)
    whole = isinstance(obj, Callback) and obj.sees_whole_weights
    if around is None or (not whole and _library(getattr(obj, name))):
        return function

    def within(*args: Any) -> Any:
        with around(name):
            return function(*args)

    return within


def _library(method: Any) -> bool:
    return str(getattr(method, "__module__", "")).partition(".")[0] in _FRAMEWORK


def overrides(obj: object, name: str, contract: type) -> bool:
    """Return whether an object overrides a method of its contract.

    Args:
        obj: module or callback.
        name: name of the method.
        contract: class with the default.

    >>> class Mine(Callback):
    ...     def on_fit_start(self, trainer, module): ...
    >>> overrides(Mine(), "on_fit_start", Callback), overrides(Mine(), "on_fit_end", Callback)
    (True, False)
    """
    if name in vars(obj):
        return callable(vars(obj)[name])  # such as a mock; a value hides the hook
    return getattr(type(obj), name, None) is not getattr(contract, name, None)


def check_hooks(obj: object, uncalled: Collection[str] = ()) -> None:
    """Refuse an object with a hook that is no longer called, or not with its parameters; warn of other dead methods.

    These are methods with the prefix "on_" that are not hooks, values in the place of a hook, and methods with a name
    similar to a called method that the object lacks. A method that is called by a different method of the object may
    have any name; a hook of Lightning 1 must be called by its successor. A method of Lightning's callback that the
    callback of fabricx lacks is refused.

    Args:
        obj: module, data module or callback.
        uncalled: methods that this run does not call, so that other parameters are a warning.

    Raises:
        ValueError: names the method, and the successor of a hook of Lightning 1; or a constructor that does not call
            that of its base class.
    """
    contract, known, former = _contract_of(obj)
    if isinstance(obj, Callback):
        for base in type(obj).__mro__:
            if base.__module__.partition(".")[0] == "fabricx":
                check_constructed(obj, base)
        _check_former_methods(obj)
    for name in sorted(known & vars(obj).keys()):
        if not callable(vars(obj)[name]):
            warnings.warn(
                f"{type(obj).__name__}.{name} is a value, {vars(obj)[name]!r}: the hook {name} is not called; rename "
                "the attribute if there is a method of this name",
                stacklevel=4,
            )
    for cls in type(obj).__mro__:
        if cls.__module__.partition(".")[0] in _LIGHTNING or cls is contract:  # has hooks that fabricx replaces
            continue
        for name, value in vars(cls).items():
            if not inspect.isfunction(value) or name.startswith("_"):
                continue
            if name in former and name not in known:
                successors = {word for word in re.findall(r"\w+", former[name]) if word in known or word in _STEPS}
                if not _is_called(type(obj), name, successors):
                    raise ValueError(f"{cls.__name__}.{name} would never be called. Its successor is {former[name]}")
            elif name.startswith("on_") and name not in known and not _is_called(type(obj), name):
                text = f"{cls.__name__}.{name} is never called: {_why_unknown(name, known)}"
                warnings.warn(text, stacklevel=4)
                continue
            if cls.__module__.partition(".")[0] in _FRAMEWORK:
                continue
            if hasattr(contract, name) or name in _STEPS:
                _check_parameters(obj, name, uncalled)
            elif contract is not Callback:
                _warn_of_near_name(obj, cls, name, contract)


def check_constructed(obj: object, base: type) -> None:
    """Refuse an object whose class does not call the constructor of a base class.

    Args:
        obj: any object.
        base: class with a constructor that sets attributes.

    Raises:
        ValueError: an attribute is missing.
    """
    owner = next(cls for cls in type(obj).__mro__ if "__init__" in vars(cls))
    constructor = vars(base).get("__init__")
    if owner.__module__ == base.__module__ or not inspect.isfunction(constructor):
        return
    code = list(dis.get_instructions(constructor))
    stored = [after.argval for before, after in itertools.pairwise(code)
              if after.opname == "STORE_ATTR" and "self" in (before.argval, *_last(before.argval))]  # fmt: skip
    missing = [name for name in stored if name not in vars(obj) and not hasattr(type(obj), name)]
    if missing and not any(name in vars(obj) for name in stored):  # a constructor may set some attributes only
        raise ValueError(
            f"{owner.__name__}.__init__ does not call super().__init__(), so {base.__name__} has no attribute "
            f"{missing[0]!r}: call it first, with the arguments of {base.__name__}"
        )


def _last(names: Any) -> tuple[Any, ...]:
    """Return the last name of an instruction that loads several variables, as those of Python 3.13 do."""
    return names[-1:] if isinstance(names, tuple) else ()


def _check_former_methods(callback: Callback) -> None:
    """Refuse a subclass that overrides a method of Lightning's callback which the callback of fabricx does not have.

    Such a method of a progress bar is a warning, because only the looks of the bar differ.

    Raises:
        ValueError: names the method and its successor.
    """
    kinds, cls = (FunctionType, staticmethod, classmethod, property), type(callback)
    packages = {owner: owner.__module__.partition(".")[0] for owner in cls.__mro__}
    if any(package in _LIGHTNING for package in packages.values()):  # the adapter has checked it
        return
    for owner in (owner for owner, package in packages.items() if package not in _FRAMEWORK):
        for name, successor in callback.former_methods.items():
            if not isinstance(vars(owner).get(name), kinds) or _is_called(cls, name):
                continue
            text = f"{owner.__name__}.{name} would never be called. Its successor is {successor}"
            if callback.trainer_role != "progress_bar":
                raise ValueError(text)
            warnings.warn(text, stacklevel=5)


def _is_called(cls: type, name: str, callers: Collection[str] | None = None) -> bool:
    """Return whether a different method of the class, in `callers` if set, reads the method, as a call does."""
    methods = (
        inspect.unwrap(method)
        for base in cls.__mro__ if base.__module__.partition(".")[0] not in (*_FRAMEWORK, *_LIGHTNING)
        for caller, method in vars(base).items() if caller != name and (callers is None or caller in callers)
        if inspect.isfunction(method)
    )  # fmt: skip
    return any(inspect.isfunction(method) and _reads(method.__code__, name) for method in methods)


def _reads(code: CodeType, name: str) -> bool:
    return name in code.co_names or any(_reads(inner, name) for inner in code.co_consts if isinstance(inner, CodeType))


def _why_unknown(name: str, known: Collection[str]) -> str:
    """Return the reason why a method with the prefix "on_" is no hook of the class, with a remedy."""
    if name in CALLBACK_HOOKS:
        return "it is a hook of callbacks. Define it in a Callback, whose hooks receive the trainer and the module"
    return f"there is no hook of that name.{did_you_mean(name, known)}"


def _contract_of(obj: object) -> tuple[type, frozenset[str], Mapping[str, str]]:
    """Return the class with the defaults of an object's hooks, the names of its hooks, and those of former hooks."""
    if isinstance(obj, Callback):
        return Callback, CALLBACK_HOOKS, FORMER_HOOKS
    if isinstance(obj, DataModule):
        return DataModule, DATA_HOOKS, FORMER_DATA_HOOKS
    return ModuleHooks, MODULE_HOOKS, FORMER_HOOKS


def _check_parameters(obj: object, name: str, uncalled: Collection[str]) -> None:
    """Refuse wrong parameters of a method, or warn of them if the run does not call it.

    Raises:
        ValueError: names the parameter.
    """
    try:
        check_signature(obj, name)
    except ValueError as error:
        if name not in uncalled:
            raise
        warnings.warn(f"{error} (this run does not call it)", stacklevel=7)


def check_signature(obj: object, name: str) -> None:
    """Refuse a hook or step with parameters that the loop has no argument for.

    Args:
        obj: module, data module or callback.
        name: name of the method.

    Raises:
        ValueError: names the parameter; or the successor of a parameter of Lightning 1.
    """
    method = getattr(obj, name)
    if not callable(method):
        return
    passed = arguments_of(_contract_of(obj)[0], name)
    unknown = unknown_parameters(method, passed)
    former = former_parameter(parameter for parameter in parameter_names(method) if parameter not in passed)
    # With a default, the loss of training would be that of the first optimizer only.
    other = former == "dataloader_iter" or (former == "optimizer_idx" and name not in _STEPS[1:])
    if former is not None and (unknown or other):
        raise ValueError(
            f"{type(obj).__name__}.{name} has the parameter {former!r}, which fabricx doesn't pass: "
            f"{FORMER_PARAMETERS[former]}"
        )
    if unknown:
        raise ValueError(
            f"{type(obj).__name__}.{name} has the required parameter {unknown[0]!r}, but is called with "
            f"({', '.join(passed)}): remove the parameter, or give it a default"
        )


def _warn_of_near_name(obj: object, cls: type, name: str, contract: type) -> None:
    """Warn of a method that is never called, if it is similar to a method of the contract that the object lacks."""
    lacking = [
        method
        for method in (*_STEPS, *vars(contract))
        if not method.startswith("_") and (method in _STEPS or method in vars(contract))
        and not overrides(obj, method, contract)
    ]  # fmt: skip
    meant = meant_name(name, lacking)
    if meant is not None:
        warnings.warn(
            f"{cls.__name__}.{name} is not called by the Trainer: rename it to {meant} if it was meant to be",
            stacklevel=5,
        )


@functools.cache
def arguments_of(contract: type, name: str) -> tuple[str, ...]:
    """Return the names of the arguments that the loop passes to a hook or step.

    Args:
        contract: class with the default of the method.
        name: name of the method.

    >>> arguments_of(ModuleHooks, "on_validation_batch_start")
    ('batch', 'batch_idx', 'dataloader_idx')
    """
    if name in _STEPS:
        return ("batch", "batch_idx") if name == "training_step" else ("batch", "batch_idx", "dataloader_idx")
    parameters = inspect.signature(getattr(contract, name)).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):  # the caller passes any number
        return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)[1:]
    return tuple(parameter.name for parameter in parameters)[1:]


def fitted(obj: object, name: str, contract: type) -> Callable[..., Any]:
    """Return a method that takes all arguments of its hook; the user's method may have fewer parameters.

    Args:
        obj: module, data module or callback.
        name: name of the method.
        contract: class with the default of the method.
    """
    return fitting(getattr(obj, name), arguments_of(contract, name))


def call(hook: Hook, *args: Any) -> None:
    """Call the functions of a hook, in order.

    Args:
        hook: attribute of `Hooks`.
        args: arguments of the hook.
    """
    for function in hook:
        function(*args)
