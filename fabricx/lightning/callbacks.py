"""`lightning.Callback` as a callback of fabricx; callbacks of Lightning's library become their counterparts."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final

from fabricx import plugins
from fabricx.core.callback import Callback
from fabricx.core.hook_calls.hooks import check_constructed
from fabricx.lightning.classes import Absent, adapted_class, form, is_lightning, lightning_base, local_name

_AS_IT_IS: Final = ("LambdaCallback",)  # callbacks of Lightning that use only hooks
_CONTRACTS: Final = ("Callback", "Checkpoint", "ProgressBar")  # of Lightning; contracts without machinery
# Arguments without an effect in fabricx, or with an effect that is always on.
_DROPPED: Final[Mapping[str, tuple[str, ...]]] = {
    "EarlyStopping": ("log_rank_zero_only",),
    "ModelSummary": ("summarize_kwargs",),
    "RichModelSummary": ("summarize_kwargs",),
}
# Attributes with other names than the arguments of the constructor.
_STORED: Final[Mapping[tuple[str, str], str]] = {
    ("BasePredictionWriter", "write_interval"): "interval",
}
# Attributes with other values than the arguments of the constructor.
_TRANSLATED: Final[Mapping[tuple[str, str], Callable[[Any], Any]]] = {
    ("EarlyStopping", "min_delta"): abs,  # negated for mode="min"
    ("ModelCheckpoint", "save_last"): bool,
    ("BasePredictionWriter", "write_interval"): lambda interval: getattr(interval, "value", interval),
    ("Timer", "duration"): lambda seconds: None if seconds is None else timedelta(seconds=seconds),
    ("Timer", "interval"): lambda interval: getattr(interval, "value", interval),
}


def adapt_callback(callback: Any) -> Any:
    """Make a callback of Lightning a callback of fabricx; other objects are returned as they are.

    A user's subclass keeps its methods. A callback of Lightning's library gets the methods and attributes of the
    callback of fabricx with the same name and arguments.

    Args:
        callback: its class is replaced by a class that derives from it.

    Returns:
        the same object.

    Raises:
        ValueError: fabricx has no counterpart of the callback, of an argument, or of an overridden method.
    """
    cls = type(callback)
    if isinstance(callback, Callback) or lightning_base(cls, "Callback") is None:
        return callback
    provided = _provided(cls)
    if provided is not None:
        counterpart = _counterpart(provided)
        check_constructed(callback, provided)
        _check_overrides(cls, provided, counterpart)
        made = counterpart(**_arguments(callback, provided, counterpart))
        if cls is provided:
            vars(callback).clear()
        vars(callback).update(vars(made))
    callback.__class__ = callback_class(cls)
    return callback


@form("callback")
def callback_class(cls: type) -> type:
    """Return the class of an adapted callback.

    Args:
        cls: the user's class, or Lightning's.
    """
    provided = _provided(cls)
    if provided is None:
        base = lightning_base(cls, "Callback")
        assert base is not None
        return adapted_class(cls, _bridge(base, Callback))
    return adapted_class(cls, _bridge(provided, _counterpart(provided)))


@functools.cache
def _bridge(base: type, contract: type) -> type:
    # Lightning's properties would precede the attributes that the contract's constructor has set.
    hidden = {name: Absent() for name in dir(base) if not name.startswith("__") and not hasattr(contract, name)}
    name = contract.__name__
    return type(name, (contract, base), {**({} if contract is Callback else hidden), "__qualname__": local_name(name)})


def _provided(cls: type) -> type | None:
    """Return the callback of Lightning's library from which a class derives, or None."""
    first = next(base for base in cls.__mro__ if is_lightning(base))
    return None if first.__name__ in (*_CONTRACTS, *_AS_IT_IS) else first


def _counterpart(provided: type) -> type:
    name = provided.__name__
    try:
        counterpart: type = plugins.find("callbacks", f"fabricx.callbacks.{name}")
    except (LookupError, ImportError) as error:
        remedy = f"{error}" if isinstance(error, ImportError) else "remove it, or write it as a Callback of your own"
        raise ValueError(f"{name} of Lightning works inside of Lightning's Trainer only: {remedy}") from None
    return counterpart


def _check_overrides(cls: type, provided: type, counterpart: type) -> None:
    """Refuse a subclass that overrides a method of Lightning which the counterpart never calls."""
    for owner in cls.__mro__[: cls.__mro__.index(provided)]:
        for name in vars(owner):
            unknown = name.startswith("_") or not hasattr(counterpart, name)
            if not unknown or name.startswith("__") or not hasattr(provided, name):
                continue
            if getattr(counterpart, "trainer_role", None) == "progress_bar":  # only the looks of the bar differ
                text = f"{owner.__name__}.{name} is never called: fabricx has its own progress bar"
                warnings.warn(text, stacklevel=4)
            else:
                raise ValueError(
                    f"{owner.__name__}.{name} overrides a method of Lightning's {provided.__name__}, which fabricx "
                    f"replaces by its own: derive {owner.__name__} from fabricx.callbacks.{counterpart.__name__} or "
                    "from fabricx.Callback"
                )


def _arguments(callback: Any, provided: type, counterpart: type) -> dict[str, Any]:
    """Return the constructor arguments of a callback of Lightning, for its counterpart."""
    known, state, name_of = inspect.signature(counterpart).parameters, vars(callback), provided.__name__
    arguments: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(provided.__init__).parameters.items())[1:]:  # type: ignore[misc]
        if name in _DROPPED.get(name_of, ()):
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= state.get("_kwargs", {})  # of WeightAveraging: the rule of the average
            continue
        stored = _STORED.get((name_of, name), name)
        value = state.get(f"_{stored}", state.get(stored, parameter.default))
        value = _TRANSLATED.get((name_of, name), lambda value: value)(value)
        if name in known:
            arguments[name] = value
        elif value != parameter.default:
            raise ValueError(
                f"{name_of}({name}={value!r}) of Lightning: fabricx.callbacks.{counterpart.__name__} has no such "
                f"argument; remove it, or use fabricx.callbacks.{counterpart.__name__}({', '.join(known)})"
            )
    return arguments
