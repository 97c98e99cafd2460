"""Attributes that a run changes, such as the counter of a module: copies for other processes, and their restoration."""

from __future__ import annotations

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
_KINDS: Final[dict[str, Any]] = {kind.__name__: kind for kind in (*_SEQUENCES, *_DICTS[:2])}
_NUMBERS: Final = "biuf"  # kinds of arrays
_LONGEST: Final = 1024  # scalars in a collection, and characters of its texts
_ELEMENTS: Final = 4096  # of a tensor or an array
_ATTRIBUTES: Final = 64  # of an object
_FREQUENT: Final = 64  # items of the collections that are compared at each call
_CALLS: Final = 16  # first calls, at which all attributes are compared
_SCANNED: Final = 256  # scalars in other owners than the observed ones that are compared at each call
_OF_MODULES: Final = frozenset(vars(nn.Module()))
_LIBRARIES: Final = sys.stdlib_module_names - {"__main__", "abc", "typing"} | {
    "torch",
    "torchmetrics",
    "numpy",
    "fabricx",
}


class _Unsupported(Exception):
    """The attribute is of another type, or too large."""


class _NotCopied(NamedTuple):
    """The attribute can't be copied."""


class _Absent(NamedTuple):
    """The attribute was deleted."""


class _Copy(NamedTuple):
    """Content of a tensor, an array, a collection or an object, and the object itself in the process that has made it.

    The content of an object is a dict of its attributes, without those that can't be copied.
    """

    kind: str
    content: Any
    source: Any = None


class _Length(NamedTuple):
    """A list that is not copied, and its length. Only the process that has made it restores it."""

    source: list[Any]
    length: int


class _Same(NamedTuple):
    """The attribute is the same object as another attribute."""

    key: Key


@final
class TrackedAttributes:
    """Attributes whose values differ from those when this object was made.

    Numbers, texts, tensors and arrays of up to 4,096 elements, collections of up to 1,024 numbers and texts, and such
    attributes of an object in an attribute are tracked. Parameters, buffers and parts of them are not. Of other lists,
    the items that were appended are removed. Assignments are noticed at each call. The first change within a
    collection, a tensor or an object is noticed in the first 15 calls and at the 16th, 32nd, 64th, ... call; in small
    collections and tensors of some owners at each call.

    Args:
        owners: modules and callbacks, by name.
        observed: names of the owners in which changes within collections and tensors are noticed at each call.
        ignored: names of attributes that are not tracked, in addition to those of every `nn.Module`.

    Attributes:
        lost: names of attributes that have changed, and then become too large, or that could not be restored.
    """

    def __init__(
        self, owners: Mapping[str, object], observed: Collection[str] = (), ignored: Collection[str] = ()
    ) -> None:  # fmt: skip
        self._modules = [owner for owner in owners.values() if isinstance(owner, nn.Module)]
        self._addresses = _addresses(self._modules)
        self._owners = {name: vars(owner) for name, owner in owners.items()}
        self._observed = frozenset(observed)
        self._ignored = _OF_MODULES | set(ignored)
        self._changed: dict[Key, None] = {}
        self._rebound: set[Key] = set()  # attributes that have had different objects
        self._has_copied = False
        self._calls = 0
        self.lost: set[str] = set()
        self._initial = frozenset(self._keys())
        self._before = {key: copy for key in self._initial if not isinstance(copy := self._copy(key), _NotCopied)}
        self._index()

    def changed(self) -> dict[Key, Any]:
        """Return copies of the attributes that have changed, for `restore`."""
        self._look()
        self._has_copied = True
        copies: dict[Key, Any] = {}
        known: dict[int, Key] = {}
        for key in list(self._changed):
            copy = self._copy(key)
            if isinstance(copy, _NotCopied):
                del self._changed[key]
                self.lost.add(_shown(key))
                self._index()
                continue
            if isinstance(copy, _Copy):
                initial = self._before.get(key)
                if not isinstance(initial, _Copy) or initial.source is not copy.source:
                    self._rebound.add(key)
                first = known.setdefault(id(copy.source), key)
                copy = copy if first == key else _Same(first)
            copies[key] = copy
        copies.update({key: _Length(value, len(value)) for key in self._lists if type(value := self._get(key)) is list})
        return copies

    def restore(self, copies: Mapping[Key, Any], *, others: bool = True) -> None:
        """Restore attributes.

        Args:
            copies: result of `changed`, of this process or of another.
            others: restore the initial values of attributes that have changed and are not in `copies`.
        """
        self._look()
        for key in [key for key in self._changed if others and key not in copies]:
            if key in self._before or key not in self._initial:
                self._write(key, self._before.get(key, _Absent()))
        for key, copy in copies.items():
            if key[0] in self._owners:
                self._write(key, self._owners[copy.key[0]].get(copy.key[1]) if isinstance(copy, _Same) else copy)
                if not isinstance(copy, _Length):
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

    def _write(self, key: Key, copy: Any) -> None:
        initial, references = self._before.get(key), None
        if not self._has_copied or key in self._rebound:
            # Of an object that has no other name: the attribute, and a variable and an argument in `_write`.
            references = 3 + (isinstance(initial, _Copy) and initial.source is self._get(key))
        if not _write(self._owners[key[0]], key[1], copy, references):
            self.lost.add(_shown(key))

    def _copy(self, key: Key) -> Any:
        """Return a copy of an attribute, or `_NotCopied`."""
        owner, name = key
        if name not in self._owners[owner]:
            return _Absent()
        value = self._owners[owner][name]
        if (
            type(value) is Tensor
            and value.layout is torch.strided
            and value.untyped_storage().data_ptr() in self._addresses
        ):
            return _NotCopied()
        try:
            return _copied(value)
        except _Unsupported:
            return _NotCopied()

    def _index(self) -> None:
        """Prepare the next look, at attributes that have not changed so far."""
        self._addresses = _addresses(self._modules)
        self._lengths = list(map(len, self._owners.values()))
        unchanged = [key for key in self._keys() if key not in self._changed]
        self._scalars = [key for key in unchanged if type(self._get(key)) in _SCALARS]
        if sum(key[0] not in self._observed for key in self._scalars) > _SCANNED:
            self._rare = [key for key in self._scalars if key[0] not in self._observed]
            self._scalars = [key for key in self._scalars if key[0] in self._observed]
        else:
            self._rare = []
        self._values = list(map(self._get, self._scalars))
        self._others = [key for key in unchanged if type(self._get(key)) not in _SCALARS]
        self._ids = [id(self._get(key)) for key in self._others]  # the objects would stay in memory for another step
        observed = {key for key in self._others if key[0] in self._observed}
        self._versions = {key: _version(value) for key in observed if type(value := self._get(key)) is Tensor}
        self._compared = {key for key in observed if _is_small(self._get(key))}
        self._lists = [
            key
            for key in observed
            if (key not in self._before or _shown(key) in self.lost) and type(self._get(key)) is list
        ]
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
            self._note(
                [
                    key
                    for key in (*self._keys(), *self._before)
                    if key not in known or key[1] not in self._owners[key[0]]
                ]
            )
        values = list(map(dict.get, *of_scalars))
        if not all(map(operator.is_, values, self._values)):
            scalars = zip(self._scalars, values, self._values, strict=True)
            self._note([key for key, value, old in scalars if value is not old])
            outdated = True
        objects = list(map(dict.get, *of_others))
        ids = list(map(id, objects))
        if self._calls < _CALLS or not self._calls & (self._calls - 1):
            self._note([*self._others, *self._rare])
        else:
            new = {key for key, number, old in zip(self._others, ids, self._ids, strict=True) if number != old}
            versions = self._versions.items()
            written = {key for key, version in versions if _version(self._get(key)) != version}
            self._note([*(new | written | self._compared)])
        self._ids = ids
        if outdated or len(self._changed) != changed:
            self._index()

    def _note(self, keys: list[Key]) -> None:
        for key in keys:
            copy = self._copy(key)
            if isinstance(copy, _NotCopied):
                self.lost |= {_shown(key)} if key in self._before else set()  # it has become too large, for example
            elif key not in self._before or not _equal(self._before[key], copy):
                self._changed[key] = None


def packed(copies: Mapping[Key, Any]) -> list[Any]:
    """Return attributes as numbers, texts, tensors and lists for another process, and for a checkpoint.

    Args:
        copies: result of `TrackedAttributes.changed`.
    """
    return [[*key, _packed(copy)] for key, copy in copies.items() if not isinstance(copy, _Length)]


def unpacked(attributes: list[Any]) -> dict[Key, Any]:
    """Return copies for `TrackedAttributes.restore`.

    Args:
        attributes: result of `packed`.
    """
    return {(owner, name): _unpacked(entry) for owner, name, entry in attributes}


def differing(copies: list[Any], earlier: list[Any]) -> list[Any]:
    """Return the attributes that are not equal in earlier copies.

    Args:
        copies, earlier: results of `packed`.
    """
    before = unpacked(earlier)
    return packed(
        {key: copy for key, copy in unpacked(copies).items() if not (key in before and _equal(copy, before[key]))}
    )


def joined(attributes: list[Any], later: list[Any]) -> list[Any]:
    """Return attributes, with later values in place of theirs.

    Args:
        attributes, later: results of `packed`.
    """
    return packed({**unpacked(attributes), **unpacked(later)})


def _addresses(modules: list[nn.Module]) -> set[int]:
    """Return the addresses of parameters and buffers: tensors that are a part of them have no copies of their own."""
    held = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return {
        tensor.untyped_storage().data_ptr()
        for tensor in held
        if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    }


def _shown(key: Key) -> str:
    return f"{key[0]}.{key[1]}" if key[0] else key[1]


def _version(value: Any) -> int:
    """Return a number that changes if a tensor is written to; tensors of the inference mode don't count."""
    return value._version if type(value) is Tensor and not value.is_inference() else -1


def _is_small(value: Any) -> bool:
    return type(value) in _COLLECTIONS and len(value) <= _FREQUENT


def _copied(value: Any, *, within: bool = False) -> Any:
    """Return a copy of a value.

    Args:
        value: an attribute.
        within: it is an attribute of an object in an attribute.

    Raises:
        _Unsupported: it can't be copied.
    """
    kind = type(value)
    if kind in _SCALARS:
        if kind in (str, bytes) and len(value) > _LONGEST:
            raise _Unsupported
        return value
    if kind is Tensor:
        if value.requires_grad and value.grad_fn is None:
            raise _Unsupported  # an optimizer may train it
        if value.numel() > _ELEMENTS or value.layout is not torch.strided or value.device.type == "meta":
            raise _Unsupported
        return _Copy(value.device.type, value.detach().clone(), value)
    if issubclass(kind, np.generic) and value.dtype.kind in _NUMBERS:
        return _Copy("number", np.array(value), value)
    if kind is np.ndarray and value.dtype.kind in _NUMBERS and value.size <= _ELEMENTS:
        return _Copy("array", value.copy(), value)
    if kind in _COLLECTIONS:
        return _Copy(kind.__name__, _items(value), value)
    attributes = None if within else _own_attributes(value)
    if attributes is None or len(attributes) > _ATTRIBUTES:
        raise _Unsupported
    copies = {}
    for name, attribute in attributes.items():
        try:
            copies[name] = _copied(attribute, within=True)
        except _Unsupported:
            continue
    return _Copy("object", copies, value)


def _items(collection: Any) -> list[Any]:
    """Return the items of a collection of numbers and texts; of a dict, pairs of keys and values.

    Raises:
        _Unsupported: other items, or too many.
    """
    if len(collection) > _LONGEST:
        raise _Unsupported
    scalars = [*collection, *collection.values()] if isinstance(collection, dict) else list(collection)
    kinds = set(map(type, scalars))
    if not kinds <= _SCALARS:
        raise _Unsupported
    if kinds & {str, bytes} and sum(len(item) for item in scalars if isinstance(item, (str, bytes))) > _LONGEST * 16:
        raise _Unsupported
    return [list(pair) for pair in collection.items()] if isinstance(collection, dict) else scalars


def _own_attributes(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object of a class outside of torch and other libraries, such as a running mean."""
    try:
        if isinstance(value, (nn.Module, Tensor, type)) or callable(value):
            return None
        if any(kind.__module__.partition(".")[0] in _LIBRARIES for kind in type(value).__mro__[:-1]):
            return None
        attributes = vars(value)
    except Exception:  # of a class with attributes of its own kind
        return None
    return attributes if type(attributes) is dict else None


def _equal(first: Any, second: Any) -> bool:
    """Return whether two copies are equal; NaN is equal to NaN."""
    if type(first) is not type(second):
        return False
    if isinstance(first, _Copy):
        return first.kind == second.kind and _equal(first.content, second.content)
    if isinstance(first, Tensor):
        if first.dtype != second.dtype or first.shape != second.shape:
            return False
        return torch.equal(first, second) or bool(((first == second) | ((first != first) & (second != second))).all())
    if isinstance(first, np.ndarray):
        return first.dtype == second.dtype and bool(np.array_equal(first, second, equal_nan=True))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_equal(first[name], second[name]) for name in first)
    if isinstance(first, list):
        return first == second or (len(first) == len(second) and all(map(_equal, first, second)))
    return bool(first == second or (first != first and second != second))


def _write(attributes: dict[str, Any], name: str, copy: Any, references: int | None = None) -> bool:
    """Restore an attribute; return False if that is impossible in this process.

    Args:
        attributes: of the owner.
        name: of the attribute.
        copy: of this process or another.
        references: to an object with attributes; if it has more, it may be the wrong object of several in a list. None
            if it is the object that had the attribute at all times.
    """
    if isinstance(copy, _Absent):
        attributes.pop(name, None)
    elif isinstance(copy, _Length):
        attributes[name] = copy.source
        del copy.source[copy.length :]
    elif not isinstance(copy, _Copy):
        attributes[name] = copy
    elif copy.source is not None:
        attributes[name] = copy.source
        _write_content(copy)
    elif copy.kind != "object":
        present = attributes.get(name)
        attributes[name] = _new(copy, present)
    else:
        present = attributes.get(name)
        held = _own_attributes(present)
        if held is None or (references is not None and sys.getrefcount(present) > references):
            return False
        for attribute, value in copy.content.items():
            _write(held, attribute, value)
    return True


def _write_content(copy: _Copy) -> None:
    """Restore the content of the object that was copied."""
    source, content = copy.source, copy.content
    if copy.kind == "object":
        for name, value in content.items():
            _write(vars(source), name, value)
    elif isinstance(source, Tensor):
        if not _equal(source.detach(), content):
            with torch.inference_mode(source.is_inference()):
                source.detach().copy_(content)
    elif copy.kind == "array":
        if not _equal(source, content):
            source[...] = content
    elif isinstance(source, (list, deque, set, dict)) and not _equal(_items(source), content):
        source.clear()
        (source.extend if isinstance(source, (list, deque)) else source.update)(content)


def _new(copy: _Copy, present: Any) -> Any:
    """Return a new object with the content.

    Args:
        copy: of another process; no object with attributes.
        present: value of the attribute in this process.
    """
    kind, content = copy.kind, copy.content
    if kind == "number":
        return content[()]
    if kind == "array":
        return content.copy()
    if isinstance(content, Tensor):
        return content.to(kind, copy=True)
    if kind == "defaultdict":
        return defaultdict(present.default_factory if type(present) is defaultdict else None, content)
    if kind == "deque":
        return deque(content, present.maxlen if type(present) is deque else None)
    return _KINDS[kind](content)


def _packed(copy: Any) -> Any:
    if isinstance(copy, _Absent):
        return {"absent": True}
    if isinstance(copy, _Same):
        return {"same": list(copy.key)}
    if isinstance(copy, (complex, bytes)):
        return {"complex": [copy.real, copy.imag]} if isinstance(copy, complex) else {"bytes": list(copy)}
    if not isinstance(copy, _Copy):
        return copy
    content = copy.content
    if copy.kind == "object":
        content = {name: _packed(value) for name, value in content.items()}
    elif isinstance(content, np.ndarray):
        return {"kind": copy.kind, "content": content.tolist(), "dtype": str(content.dtype)}
    elif isinstance(content, Tensor):
        content = content.cpu()
    else:
        content = [list(map(_packed, item)) if isinstance(item, list) else _packed(item) for item in content]
    return {"kind": copy.kind, "content": content}


def _unpacked(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    if "absent" in entry:
        return _Absent()
    if "same" in entry:
        owner, name = entry["same"]
        return _Same((owner, name))
    if "complex" in entry:
        return complex(*entry["complex"])
    if "bytes" in entry:
        return bytes(entry["bytes"])
    content = entry["content"]
    if "dtype" in entry:
        content = np.array(content, dtype=entry["dtype"])
    elif isinstance(content, dict):
        content = {name: _unpacked(value) for name, value in content.items()}
    elif isinstance(content, list):
        content = [list(map(_unpacked, item)) if isinstance(item, list) else _unpacked(item) for item in content]
    return _Copy(entry["kind"], content)
