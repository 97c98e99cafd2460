"""Functions of Lightning that read arguments and signatures, and find an attribute of a module or its data."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, MutableMapping
from types import FrameType
from typing import Any


def parse_class_init_keys(cls: type) -> tuple[str, str | None, str | None]:
    """Return the names of the object, of the positional rest and of the named rest of a constructor; None if absent.

    Args:
        cls: class with the constructor.

    >>> class Net:
    ...     def __init__(self, width, *rest, **options): ...
    >>> parse_class_init_keys(Net)
    ('self', 'rest', 'options')
    """
    parameters = [*inspect.signature(cls.__init__).parameters.values()]  # type: ignore[misc]
    kinds = {parameter.kind: parameter.name for parameter in parameters}
    return parameters[0].name, kinds.get(inspect.Parameter.VAR_POSITIONAL), kinds.get(inspect.Parameter.VAR_KEYWORD)


def get_init_args(frame: FrameType) -> dict[str, Any]:
    """Return the arguments of a constructor; an empty dict for other functions.

    Args:
        frame: frame of the constructor, such as `inspect.currentframe()` in it; it calls `super().__init__()`.
    """
    values = frame.f_locals
    if "__class__" not in values or frame.f_code.co_name != "__init__":
        return {}
    receiver, positional, named = parse_class_init_keys(values["__class__"])
    parameters = inspect.signature(values["__class__"].__init__).parameters
    arguments = {name: values[name] for name in parameters if name in values}
    arguments.update(arguments.get(named, {}) if named else {})
    return {name: value for name, value in arguments.items() if name not in (receiver, positional, named)}


def is_param_in_hook_signature(
    hook_fx: Callable[..., Any], param: str, explicit: bool = False, min_args: int | None = None
) -> bool:
    """Return whether a hook has a parameter.

    Args:
        hook_fx: the hook.
        param: name of the parameter.
        explicit: whether `*args` does not count as the parameter.
        min_args: number of parameters, without the object, that also count as the parameter; None for no number.

    >>> is_param_in_hook_signature(lambda self, batch, batch_idx: None, "batch_idx")
    True
    """
    signature = inspect.getfullargspec(inspect.unwrap(hook_fx))
    arguments = signature.args[1:]
    return (
        param in arguments or (not explicit and bool(signature.varargs)) or len(arguments) >= (min_args or float("inf"))
    )


def is_picklable(obj: object) -> bool:
    """Return whether Python's pickle can write an object.

    Args:
        obj: any object.
    """
    try:
        pickle.dumps(obj)
    except (pickle.PickleError, AttributeError, RuntimeError, TypeError):
        return False
    return True


def clean_namespace(hparams: MutableMapping[str, Any]) -> None:
    """Remove the values that Python's pickle can't write.

    Args:
        hparams: names and values.
    """
    for name in [name for name, value in hparams.items() if not is_picklable(value)]:
        del hparams[name]


def _holders(model: Any, attribute: str) -> list[Any]:
    """Return the objects that have an attribute: the module, its data module, and the hyperparameters of both."""
    data = getattr(getattr(model, "_trainer", None), "datamodule", None)
    holders: list[Any] = []
    for owner in (model, data):
        if owner is not None:
            holders += [owner] if hasattr(owner, attribute) else []
            holders += [owner.hparams] if attribute in getattr(owner, "hparams", {}) else []
    return holders


def lightning_hasattr(model: Any, attribute: str) -> bool:
    """Return whether a module, its data module, or the hyperparameters of either have an attribute.

    Args:
        model: the module.
        attribute: name of the attribute.
    """
    return bool(_holders(model, attribute))


def lightning_getattr(model: Any, attribute: str) -> Any:
    """Return an attribute of a module, its data module, or the hyperparameters of either; the last that has it.

    Args:
        model: the module.
        attribute: name of the attribute.

    Raises:
        AttributeError: none of them has the attribute.
    """
    holder = _found(model, attribute)[-1]
    return holder[attribute] if isinstance(holder, dict) else getattr(holder, attribute)


def lightning_setattr(model: Any, attribute: str, value: Any) -> None:
    """Set an attribute of a module, its data module, and the hyperparameters of either, where it exists.

    Args:
        model: the module.
        attribute: name of the attribute.
        value: value of the attribute.

    Raises:
        AttributeError: none of them has the attribute.
    """
    for holder in _found(model, attribute):
        if isinstance(holder, dict):
            holder[attribute] = value
        else:
            setattr(holder, attribute, value)


def _found(model: Any, attribute: str) -> list[Any]:
    holders = _holders(model, attribute)
    if not holders:
        raise AttributeError(
            f"{type(model).__name__}, its data module and their hyperparameters have no attribute {attribute!r}"
        )
    return holders
