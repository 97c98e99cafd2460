"""Attributes that a run changes, such as the counter of a module: copies for other processes, and their restoration."""

from __future__ import annotations

import contextlib
import operator
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn

Key = tuple[str, str]  # names of the owner and of the attribute
_SCALARS: Final = frozenset((bool, int, float, complex, str, bytes, type(None)))
_SEQUENCES: Final = (list, tuple, set, frozenset, deque)
_DICTS: Final = (dict, OrderedDict, defaultdict)
_COLLECTIONS: Final = frozenset((*_SEQUENCES, *_DICTS))
_LONGEST: Final = 4096  # scalars in a collection, and characters of a text
_ITEMS: Final = 256  # other items in an attribute
_ELEMENTS: Final = 1 << 16  # of the tensors and arrays in an attribute
_NUMBERS: Final = "biuf"  # kinds of arrays
_PLAIN: Final = _SCALARS - {complex, bytes}
_KINDS: Final[dict[str, Any]] = {kind.__name__: kind for kind in _SEQUENCES}
_DEPTH: Final = 4  # of collections and objects in an attribute
_CALLS: Final = 16  # first calls, at which all attributes are compared
_OF_MODULES: Final = frozenset(vars(nn.Module()))
_LIBRARIES: Final = sys.stdlib_module_names - {"__main__"} | {"torch", "torchmetrics", "numpy", "fabricx"}


class _Unsupported(Exception):
    """The attribute contains an object that can't be copied, or is too large."""


class _Values(NamedTuple):
    """Values of a tensor, in main memory for another process, and the type of its device."""

    tensor: Tensor
    device: str


class _Attributes(NamedTuple):
    """Attributes of an object, without those that can't be copied."""

    values: dict[str, Any]


@final
class TrackedAttributes:
    """Attributes whose values differ from those when this object was made.

    Numbers, texts, tensors and arrays of up to 65,536 elements, collections of these, and such attributes of an object
    in an attribute are tracked. Assignments are noticed at each call. The first change within a collection, a tensor or
    an object is noticed in the first 15 calls and at the 16th, 32nd, 64th, ... call, and in some owners at each call,
    except for objects.

    Args:
        owners: modules and callbacks, by name.
        observed: names of the owners in which changes within collections and tensors are noticed at each call.
        ignored: names of attributes that are not tracked, in addition to those of every `nn.Module`.

    Attributes:
        lost: names of attributes that have changed, and then become too large.
    """

    def __init__(
        self, owners: Mapping[str, object], observed: Collection[str] = (), ignored: Collection[str] = ()
    ) -> None:  # fmt: skip
        self._owners = {name: vars(owner) for name, owner in owners.items()}
        self._observed = frozenset(observed)
        self._ignored = _OF_MODULES | set(ignored)
        self._before: dict[Key, Any] = {}
        self._changed: dict[Key, None] = {}
        self._calls = 0
        self.lost: set[str] = set()
        for key in self._keys():
            with contextlib.suppress(_Unsupported):
                self._before[key] = _copy(self._get(key))
        self._index()

    def changed(self) -> dict[Key, Any]:
        """Return copies of the attributes that have changed, for `restore`."""
        self._look()
        copies = {}
        for key in list(self._changed):
            owner, name = key
            if name in self._owners[owner]:
                try:
                    copies[key] = _copy(self._owners[owner][name])
                except _Unsupported:
                    del self._changed[key]
                    self.lost.add(f"{owner}.{name}" if owner else name)
        return copies

    def restore(self, copies: Mapping[Key, Any], *, others: bool = True) -> None:
        """Restore attributes.

        Args:
            copies: result of `changed`, of this process or of another.
            others: restore the initial values of attributes that have changed and are not in `copies`.
        """
        self._look()
        for key in [key for key in self._changed if others and key not in copies]:
            if key in self._before:
                _write(self._owners[key[0]], key[1], self._before[key])
            else:
                self._owners[key[0]].pop(key[1], None)
        for key, value in copies.items():
            if key[0] in self._owners:
                _write(self._owners[key[0]], key[1], value)
                self._changed[key] = None
        self._index()

    def _keys(self) -> list[Key]:
        return [
            (owner, name)
            for owner, attributes in self._owners.items()
            for name in attributes
            if name not in self._ignored
        ]

    def _get(self, key: Key) -> Any:
        return self._owners[key[0]].get(key[1])

    def _index(self) -> None:
        """Prepare the next look, at attributes that have not changed so far."""
        self._lengths = list(map(len, self._owners.values()))
        unchanged = [key for key in self._keys() if key not in self._changed]
        self._scalars = [key for key in unchanged if type(self._get(key)) in _SCALARS]
        self._values = list(map(self._get, self._scalars))
        self._others = [key for key in unchanged if type(self._get(key)) not in _SCALARS]
        self._ids = [id(self._get(key)) for key in self._others]  # the objects would stay in memory for another step
        observed = [key for key in self._others if key[0] in self._observed]
        self._compared = {key for key in observed if not _has_own_attributes(self._get(key))}
        self._places = [
            ([self._owners[owner] for owner, _ in keys], [name for _, name in keys])
            for keys in (self._scalars, self._others)
        ]

    def _look(self) -> None:
        """Note the attributes that have changed since the last look."""
        self._calls += 1
        changed, of_scalars, of_others = len(self._changed), *self._places
        outdated = list(map(len, self._owners.values())) != self._lengths
        if outdated:
            known = {*self._before, *self._changed, *self._others}
            self._note([key for key in self._keys() if key not in known])
        values = list(map(dict.get, *of_scalars))
        if not all(map(operator.is_, values, self._values)):
            scalars = zip(self._scalars, values, self._values, strict=True)
            self._note([key for key, value, old in scalars if value is not old])
            outdated = True
        ids = list(map(id, map(dict.get, *of_others)))
        if self._calls < _CALLS or not self._calls & (self._calls - 1):
            self._note(self._others)
        elif self._compared or ids != self._ids:
            others = zip(self._others, ids, self._ids, strict=True)
            self._note([key for key, new, old in others if new != old or key in self._compared])
        self._ids = ids
        if outdated or len(self._changed) != changed:
            self._index()

    def _note(self, keys: list[Key]) -> None:
        for key in keys:
            try:
                copy = _copy(self._get(key))
            except _Unsupported:
                continue
            if key not in self._before or not _equal(self._before[key], copy):
                self._changed[key] = None


def on_cpu(copy: Any) -> Any:
    """Return a result of `TrackedAttributes.changed` with all values in main memory.

    Args:
        copy: the result, or a part of it.
    """
    if isinstance(copy, _Values):
        return _Values(copy.tensor.cpu(), copy.device)
    if isinstance(copy, _Attributes):
        return _Attributes(on_cpu(copy.values))
    if type(copy) in _DICTS:
        return _like(copy, {name: on_cpu(value) for name, value in copy.items()})
    if type(copy) in _SEQUENCES and not set(map(type, copy)) <= _SCALARS:
        return _like(copy, [on_cpu(item) for item in copy])
    return copy


def encoded(copies: Mapping[Key, Any]) -> list[Any]:
    """Return attributes as numbers, texts, tensors, lists and dicts with texts as keys, as checkpoints have them.

    Args:
        copies: result of `TrackedAttributes.changed`.
    """
    return [[owner, name, _encoded(copy)] for (owner, name), copy in copies.items()]


def decoded(attributes: list[Any]) -> dict[Key, Any]:
    """Return copies for `TrackedAttributes.restore`.

    Args:
        attributes: result of `encoded`.
    """
    return {(owner, name): _decoded(entry) for owner, name, entry in attributes}


def _encoded(copy: Any) -> Any:
    kind = type(copy)
    if kind in _PLAIN:
        return copy
    if kind is _Values:
        return {"device": copy.device, "values": copy.tensor}
    if kind is _Attributes:
        return {"attributes": {name: _encoded(value) for name, value in copy.values.items()}}
    if isinstance(copy, (np.ndarray, np.generic)):
        return {"array": copy.tolist(), "dtype": str(copy.dtype), "is_number": isinstance(copy, np.generic)}
    if kind in (complex, bytes):
        return {"constant": [copy.real, copy.imag] if kind is complex else list(copy), "kind": kind.__name__}
    if kind in _DICTS:
        return {"keys": [_encoded(key) for key in copy], "items": list(map(_encoded, copy.values())), "kind": "dict"}
    return {"items": list(map(_encoded, copy)), "kind": kind.__name__, "longest": getattr(copy, "maxlen", None)}


def _decoded(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    if "values" in entry:
        return _Values(entry["values"], entry["device"])
    if "attributes" in entry:
        return _Attributes({name: _decoded(value) for name, value in entry["attributes"].items()})
    if "array" in entry:
        array = np.array(entry["array"], dtype=entry["dtype"])
        return array[()] if entry["is_number"] else array
    kind = entry["kind"]
    if "constant" in entry:
        return complex(*entry["constant"]) if kind == "complex" else bytes(entry["constant"])
    items = [_decoded(item) for item in entry["items"]]
    if kind == "dict":
        return dict(zip(map(_decoded, entry["keys"]), items, strict=True))
    return deque(items, entry["longest"]) if kind == "deque" else _KINDS[kind](items)


def differing(copies: Mapping[Key, Any], earlier: Mapping[Key, Any]) -> dict[Key, Any]:
    """Return the attributes that are not equal in earlier copies.

    Args:
        copies, earlier: results of `TrackedAttributes.changed`, in main memory.
    """
    return {key: copy for key, copy in copies.items() if key not in earlier or not _equal(copy, earlier[key])}


def _like(collection: Any, items: Any) -> Any:
    """Return a collection of the same type with other items; a dict for a defaultdict, whose function may be local."""
    if type(collection) is defaultdict:
        return dict(items)
    if type(collection) is deque:
        return deque(items, collection.maxlen)
    return type(collection)(items)


def _copy(value: Any) -> Any:
    """Return a copy of a value, without references to objects that may change.

    Raises:
        _Unsupported: the value contains an object that can't be copied, or is too large.
    """
    return _Copier().copy(value, _DEPTH)


@final
class _Copier:
    """Copies an attribute within limits of its size."""

    def __init__(self) -> None:
        self._items, self._elements = _ITEMS, _ELEMENTS

    def copy(self, value: Any, depth: int) -> Any:
        """Return a copy.

        Args:
            value: an attribute, or an attribute of an object in it.
            depth: further levels of objects and collections.
        """
        if not _has_own_attributes(value):
            return self._copy_item(value, depth)
        if not depth:
            raise _Unsupported
        copies = {}
        for name, attribute in vars(value).items():
            with contextlib.suppress(_Unsupported):
                copies[name] = self.copy(attribute, depth - 1)
            self._count(1, 0)
        return _Attributes(copies)

    def _count(self, items: int, elements: int) -> None:
        self._items, self._elements = self._items - items, self._elements - elements
        if self._items < 0 or self._elements < 0:
            raise _Unsupported

    def _copy_item(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            if kind in (str, bytes) and len(value) > _LONGEST:
                raise _Unsupported
            return value
        if kind is Tensor and value.layout is torch.strided and value.device.type != "meta":
            self._count(1, value.numel())
            return _Values(value.detach().clone(), value.device.type)
        if kind is np.ndarray and value.dtype.kind in _NUMBERS:
            self._count(1, value.size)
            return value.copy()
        if isinstance(value, np.generic) and value.dtype.kind in _NUMBERS:
            return value
        if kind not in _COLLECTIONS or len(value) > _LONGEST:
            raise _Unsupported
        mapped = kind in _DICTS
        if mapped and not set(map(type, value)) <= _SCALARS:
            raise _Unsupported
        if set(map(type, value.values() if mapped else value)) <= _SCALARS:
            return _like(value, value)
        self._count(len(value), 0)
        if not depth:
            raise _Unsupported
        if mapped:
            return _like(value, {name: self._copy_item(item, depth - 1) for name, item in value.items()})
        return _like(value, [self._copy_item(item, depth - 1) for item in value])


def _has_own_attributes(value: Any) -> bool:
    """Return whether a value is an object of a class outside of torch and other libraries, such as a running mean."""
    if isinstance(value, (nn.Module, Tensor, type)) or callable(value) or not hasattr(value, "__dict__"):
        return False
    return not any(kind.__module__.partition(".")[0] in _LIBRARIES for kind in type(value).__mro__[:-1])


def _equal(first: Any, second: Any) -> bool:
    """Return whether two results of `_copy` are equal."""
    if type(first) is not type(second):
        return False
    if isinstance(first, _Values):
        a, b = first.tensor, second.tensor
        return a.dtype == b.dtype and a.shape == b.shape and a.device == b.device and torch.equal(a, b)
    if isinstance(first, np.ndarray):
        return first.dtype == second.dtype and bool(np.array_equal(first, second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_equal(first[name], second[name]) for name in first)
    if isinstance(first, (list, tuple, deque)):
        if set(map(type, first)) <= _SCALARS:
            return bool(first == second)
        return len(first) == len(second) and all(map(_equal, first, second))
    return bool(first == second)


def _write(attributes: dict[str, Any], name: str, copy: Any) -> None:
    """Assign a value, or write it to the present tensor, collection or object of the same kind."""
    present: Any = attributes.get(name)
    if isinstance(copy, _Attributes):
        if _has_own_attributes(present):
            for attribute, value in copy.values.items():
                _write(vars(present), attribute, value)
        return
    value = _value(copy)
    if type(value) is dict and type(present) in _DICTS:
        present.clear()
        present.update(value)
    elif type(present) is not type(value):
        attributes[name] = value
    elif type(value) is Tensor:
        if present.shape == value.shape and present.dtype == value.dtype and not present.requires_grad:
            present.detach().copy_(value)
        else:
            attributes[name] = value
    elif type(value) in (list, deque):
        present.clear()
        present.extend(value)
    elif type(value) in (set, *_DICTS):
        present.clear()
        present.update(value)
    else:
        attributes[name] = value


def _value(copy: Any) -> Any:
    """Return a new value from a result of `_copy`."""
    if isinstance(copy, _Values):
        return copy.tensor.to(copy.device, copy=True)
    if isinstance(copy, np.ndarray):
        return copy.copy()
    if type(copy) in _DICTS:
        return _like(copy, {name: _value(item) for name, item in copy.items()})
    if type(copy) in _SEQUENCES:
        return _like(copy, [_value(item) for item in copy])
    return copy
