"""Attributes that a run changes, such as the counter of a module: copies for other processes, and their restoration."""

from __future__ import annotations

import marshal
import operator
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn

from fabricx.core.module_state.attribute_copies import (
    COLLECTIONS,
    ELEMENTS,
    SCALARS,
    Absent,
    Copy,
    Key,
    Length,
    Same,
    Unsupported,
    copied,
    equal,
    has_data,
    is_nested,
    number_of_items,
    shown,
    write,
)  # fmt: skip
from fabricx.core.module_state.placeholder import is_placeholder

_FREQUENT: Final = 64  # items of the collections that are compared at each call
_FREQUENT_ITEMS: Final = 32  # of objects and of collections of others, in all levels, that are compared at each call
_CALLS: Final = 16  # first calls, at which all attributes are compared
_SCANNED: Final = 256  # scalars in other owners than the observed ones that are compared at each call
_BUFFERS: Final = "buffers of "  # before the name of a module: owner of its buffers that checkpoints don't have
_BUFFER_ELEMENTS: Final = 2**18
_OF_MODULES: Final = frozenset(vars(nn.Module()))


class _NotCopied(NamedTuple):
    """The attribute can't be copied."""


@final
class TrackedAttributes:
    """Attributes whose values differ from those when this object was made.

    Numbers, texts, members of enumerations, tensors and arrays of up to 4,096 elements, collections of up to 1,024
    numbers and texts, or of up to 256 other items and 15 tensors in all levels, and such attributes of an object in an
    attribute are tracked; and buffers of modules that are not persistent, of up to 2**18 elements in all. Parameters,
    other buffers and parts of them are not. Of other lists, the items that were appended are removed.

    Assignments are noticed at each call. The first change within a collection, a tensor or an object is noticed in the
    first 15 calls and at the 16th, 32nd, 64th, ... call; in buffers, and in small collections and tensors of some
    owners, at each call.

    Args:
        owners: modules and callbacks, by name.
        observed: names of the owners in which changes within collections and tensors are noticed at each call.
        ignored: names of attributes that are not tracked, in addition to those of every `nn.Module`.

    Attributes:
        lost: names of attributes that have changed and are too large or of another type, or could not be restored.
    """

    def __init__(
        self, owners: Mapping[str, object], observed: Collection[str] = (), ignored: Collection[str] = ()
    ) -> None:  # fmt: skip
        self._modules = [owner for owner in owners.values() if isinstance(owner, nn.Module)]
        self._addresses = _addresses(self._modules)
        self._owners = {name: vars(owner) for name, owner in owners.items()}
        self._volatile = {
            _BUFFERS + name: owner._non_persistent_buffers_set
            for name, owner in owners.items()
            if isinstance(owner, nn.Module) and owner._non_persistent_buffers_set
        }
        for owner in self._volatile:
            self._owners[owner] = self._owners[owner.removeprefix(_BUFFERS)]["_buffers"]
        self._observed = frozenset((*observed, *self._volatile))
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
        lost, left = [], _BUFFER_ELEMENTS  # elements of buffers, in all
        for key in list(self._changed):
            value = self._get(key)
            elements = value.numel() if key[0] in self._volatile and type(value) is Tensor else 0
            copy = self._copy(key) if elements <= left else _NotCopied()
            if isinstance(copy, _NotCopied):
                lost.append(key)
                continue
            left -= elements
            if isinstance(copy, Copy):
                initial = self._before.get(key)
                if not isinstance(initial, Copy) or initial.source is not copy.source:
                    self._rebound.add(key)
                first = known.setdefault(id(copy.source), key)
                copy = copy if first == key else Same(first)
            copies[key] = copy
        for key in lost:
            del self._changed[key]
            self.lost.add(_shown(key))
        if lost:
            self._index()
        copies.update({key: Length(value, len(value)) for key in self._lists if type(value := self._get(key)) is list})
        return copies

    def names(self) -> set[str]:
        """Return the names of the attributes that have changed."""
        return {_shown(key) for key, copy in self.changed().items() if not isinstance(copy, Length)} | self.lost

    def restore(self, copies: Mapping[Key, Any], *, others: bool = True) -> None:
        """Restore attributes.

        Args:
            copies: result of `changed`, of this process or of another.
            others: restore the initial values of attributes that have changed and are not in `copies`.
        """
        self._look()
        for key in [key for key in self._changed if others and key not in copies]:
            if key in self._before or key not in self._initial:
                self._write(key, self._before.get(key, Absent()))
        for key, copy in copies.items():
            if key[0] in self._owners:
                self._write(key, self._owners[copy.key[0]].get(copy.key[1]) if isinstance(copy, Same) else copy)
                if not isinstance(copy, Length):
                    self._changed[key] = None
        self._index()

    def _keys(self) -> list[Key]:
        return [
            (owner, name)
            for owner, attributes in self._owners.items()
            for name in attributes
            if (name in self._volatile[owner] if owner in self._volatile else self._is_tracked(name))
        ]

    def _is_tracked(self, name: str) -> bool:
        return name not in self._ignored and not name.startswith("__")  # such as FSDP's own attributes

    def _get(self, key: Key) -> Any:
        return self._owners[key[0]].get(key[1])

    def _write(self, key: Key, copy: Any) -> None:
        initial, references = self._before.get(key), None
        if not self._has_copied or key in self._rebound:
            # Of an object that has no other name: the attribute, and a variable and an argument in `write`.
            references = 3 + (isinstance(initial, Copy) and initial.source is self._get(key))
        if key[0] in self._volatile and _fits(self._get(key), copy):
            self._get(key).copy_(copy.content)
            return
        if not write(self._owners[key[0]], key[1], copy, references):
            self.lost.add(_shown(key))

    def _copy(self, key: Key) -> Any:
        """Return a copy of an attribute, or `_NotCopied`."""
        owner, name = key
        if name not in self._owners[owner]:
            return Absent()
        value = self._owners[owner][name]
        try:
            if owner not in self._volatile:
                return copied(value, held=self._addresses)
            absent = type(value) is Tensor and is_placeholder(value)
            return _NotCopied() if absent else copied(value, elements=_BUFFER_ELEMENTS)
        except (Unsupported, RuntimeError):  # a RuntimeError if another thread changes a collection
            return _NotCopied()

    def _index(self) -> None:
        """Prepare the next look, at attributes that have not changed so far."""
        self._addresses = _addresses(self._modules)
        self._lengths = list(map(len, self._owners.values()))
        unchanged = [key for key in self._keys() if key not in self._changed]
        self._scalars = [key for key in unchanged if type(self._get(key)) in SCALARS]
        if sum(key[0] not in self._observed for key in self._scalars) > _SCANNED:
            self._rare = [key for key in self._scalars if key[0] not in self._observed]
            self._scalars = [key for key in self._scalars if key[0] in self._observed]
        else:
            self._rare = []
        self._values = list(map(self._get, self._scalars))
        self._others = [key for key in unchanged if type(self._get(key)) not in SCALARS]
        self._ids = [id(self._get(key)) for key in self._others]  # the objects would stay in memory for another step
        observed = {key for key in self._others if key[0] in self._observed}
        looked_at = [key for key in observed if _shown(key) not in self.lost]
        self._versions = {key: _version(value) for key in looked_at if type(value := self._get(key)) is Tensor}
        initial = {key: self._before[key] for key in observed if key in self._before and _shown(key) not in self.lost}
        self._compared = {key for key, copy in initial.items() if _is_small(self._get(key), copy)}
        nested = (key for key, copy in initial.items() if key not in self._compared and is_nested(copy))
        self._marshalled = {key: data for key in nested if (data := _marshalled(self._get(key))) is not None}
        self._scanned = [
            key for key in self._others if not (key in self._versions and self._get(key).numel() > ELEMENTS)
        ]
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
        number_changed, of_scalars, of_others = len(self._changed), *self._places
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
        new = {key for key, number, old in zip(self._others, ids, self._ids, strict=True) if number != old}
        new |= {key for key, version in self._versions.items() if _version(self._get(key)) != version}
        self._note(sorted(new), changed=True)  # in the same order on all ranks
        if self._calls < _CALLS or not self._calls & (self._calls - 1):
            self._note([*self._scanned, *self._rare])
        else:
            written = {key for key, data in self._marshalled.items() if _marshalled(self._get(key)) != data}
            self._note(sorted(written | self._compared))
        self._ids = ids
        if outdated or len(self._changed) != number_changed:
            self._index()

    def _note(self, keys: list[Key], *, changed: bool = False) -> None:
        """Note which attributes have changed since this object was made.

        Args:
            keys: attributes that may have changed.
            changed: each is another object, or was written to.
        """
        for key in keys:
            copy = self._copy(key)
            if isinstance(copy, _NotCopied):
                if key in self._before or (changed and key[0] in self._observed and has_data(self._get(key))):
                    self.lost.add(_shown(key))
            elif key not in self._before or not equal(self._before[key], copy):
                self._changed[key] = None


def _addresses(modules: list[nn.Module]) -> set[int]:
    """Return the addresses of parameters and buffers: tensors that are a part of them have no copies of their own."""
    held = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    plain = [tensor for tensor in held if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided]
    return {tensor.untyped_storage().data_ptr() for tensor in plain} - {0}  # 0: without memory


def _shown(key: Key) -> str:
    return shown((key[0].removeprefix(_BUFFERS), key[1]))


def _version(value: Any) -> int:
    """Return a number that changes if a tensor is written to; tensors of the inference mode don't count."""
    return value._version if type(value) is Tensor and not value.is_inference() else -1


def _is_small(value: Any, copy: Any) -> bool:
    """Return whether a collection or an object is compared at each call.

    Args:
        value: an attribute.
        copy: its initial copy.
    """
    if is_nested(copy) or (isinstance(copy, Copy) and copy.kind == "object"):
        return number_of_items(copy) <= _FREQUENT_ITEMS
    return type(value) in COLLECTIONS and len(value) <= _FREQUENT


def _marshalled(value: Any) -> bytes | None:
    """Return the bytes of collections of numbers and texts, which change with their content; None for other values."""
    try:
        return marshal.dumps(value, 2)  # without references, which depend on other variables
    except ValueError:
        return None


def _fits(buffer: Any, copy: Any) -> bool:
    """Return whether a copy of another process has the shape and the dtype of a buffer."""
    if not isinstance(copy, Copy) or copy.source is not None or not (type(buffer) is Tensor is type(copy.content)):
        return False
    if buffer.is_inference() or any(not stride for stride in buffer.stride()):
        return False
    return buffer.shape == copy.content.shape and buffer.dtype == copy.content.dtype
