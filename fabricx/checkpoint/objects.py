"""Objects of users' classes in a checkpoint: stored apart from tensors and plain data, and read with permission.

Reading an object runs code that its file names. A reader without permission therefore receives an `Unread` in place of
each object.
"""

from __future__ import annotations

import io
import pickle
import types
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from fabricx.checkpoint.tree import escape, is_atom, is_key
from fabricx.checkpoint.unread import Unread, is_unread
from fabricx.distributed.sharding.dtensors import is_dtensor
from fabricx.errors import CheckpointError

PLACE: Final = "__object__"
TAG: Final = "objects_tag"  # in the manifest, with the run's key
_CLASS: Final = "class"
_DICTS: Final = (dict, OrderedDict)


def taken(rest: Any) -> tuple[Any, dict[str, Any]]:
    """Replace the objects in plain data by placeholders that name their classes.

    Args:
        rest: nested dicts, lists and tuples without tensors.

    Returns:
        The plain data; and the objects by path.

    >>> taken({"lr": 0.1, "kinds": [len]})
    ({'lr': 0.1, 'kinds': [{'__object__': 'kinds/0', 'class': 'builtins.len'}]}, {'kinds/0': <built-in function len>})
    """
    objects: dict[str, Any] = {}
    return _taken(rest, (), objects), objects


def _taken(value: Any, path: tuple[str, ...], objects: dict[str, Any]) -> Any:
    kind = type(value)
    if is_atom(value):
        return value
    if kind in _DICTS and all(map(is_key, value)) and value.keys() != {PLACE, _CLASS}:
        return kind((key, _taken(item, (*path, escape(str(key))), objects)) for key, item in value.items())
    if kind in (list, tuple):
        return kind(_taken(item, (*path, str(index)), objects) for index, item in enumerate(value))
    if kind is set and all(map(is_key, value)):
        return value
    name = "/".join(path)
    while name in objects:  # a dict with the keys 1 and "1"
        name += "'"
    objects[name] = value
    return {PLACE: name, _CLASS: class_of(value)}


def class_of(value: Any) -> str:
    """Return the class of an object with its module; of a class or a function, its own name.

    Args:
        value: any object.
    """
    named = value if isinstance(value, type) or hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def put(rest: Any, objects: Mapping[str, Any], path: object) -> Any:
    """Replace placeholders by their objects: the inverse of `taken`.

    Args:
        rest: plain data with placeholders.
        objects: objects by path; an `Unread` takes the place of an absent one.
        path: path of the checkpoint.
    """
    if type(rest) in _DICTS:
        if type(rest) is dict and rest.keys() == {PLACE, _CLASS}:
            name = str(rest[PLACE])
            return objects[name] if name in objects else Unread(str(rest[_CLASS]), path)
        return type(rest)((key, put(value, objects, path)) for key, value in rest.items())
    if type(rest) in (list, tuple):
        return type(rest)(put(value, objects, path) for value in rest)
    return rest


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and is_dtensor(value):
            raise pickle.PicklingError("a tensor that is divided over ranks")
        return NotImplemented


_PICKLE: Final[Any] = types.ModuleType("fabricx.checkpoint.pickle")
_PICKLE.Pickler = _Pickler


def pickled(objects: Mapping[str, Any]) -> bytes:
    """Pickle objects as they are now.

    Args:
        objects: objects by path.

    Raises:
        CheckpointError: an object can't be pickled; the message names it.
    """
    try:
        return _pickled(dict(objects))
    except Exception:
        for name, value in objects.items():
            if error := reason_against(value):
                raise CheckpointError(
                    f"the checkpoint has an object that can't be pickled: {name} ({class_of(value)}): {error}\n  "
                    "return only numbers, text, lists, dicts, tensors and objects that pickle can write from "
                    "state_dict() and on_save_checkpoint"
                ) from None
        raise


def _pickled(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, pickle_module=_PICKLE)
    return stream.getvalue()


def reason_against(value: Any) -> str:
    """Return why an object can't be pickled; "" if it can.

    Args:
        value: any object.
    """
    try:
        _pickled(value)
    except Exception as error:
        return str(error) or type(error).__name__
    return ""


def is_storable(value: Any) -> bool:
    """Return whether a hyperparameter of any class belongs in a checkpoint: pickle writes it, and it has no weights.

    The weights of a module are in the checkpoint already.

    Args:
        value: hyperparameter that is no plain data.
    """
    if isinstance(value, nn.Module) and next(value.parameters(), None) is not None:
        return False
    return not reason_against(value)


def unpickled(data: bytes, map_location: Any = "cpu") -> dict[str, Any]:
    """Return the objects of `pickled`; this runs code that the bytes name.

    Args:
        data: trusted bytes.
        map_location: device of the tensors in the objects.
    """
    objects: dict[str, Any] = torch.load(io.BytesIO(data), map_location=map_location, weights_only=False)
    return objects


def filled(state: Any, objects: Mapping[str, Any], path: tuple[str, ...] = ()) -> Any:
    """Replace the objects in a state that were not read by those of `pickled`.

    Args:
        state: nested dicts, lists and tuples.
        objects: objects by path.
        path: keys of `state`.
    """
    if is_unread(state):
        return objects.get("/".join(path), state)
    if type(state) in _DICTS:
        return type(state)((key, filled(item, objects, (*path, escape(str(key))))) for key, item in state.items())
    if type(state) in (list, tuple):
        return type(state)(filled(item, objects, (*path, str(index))) for index, item in enumerate(state))
    return state
