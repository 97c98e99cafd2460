"""Copies of the values of attributes, and their restoration in this process or another."""

from __future__ import annotations

import itertools
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection
from enum import Enum
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn

Key = tuple[str, str]  # names of the owner and of the attribute
SCALARS: Final = frozenset((bool, int, float, complex, str, bytes, type(None)))
_SEQUENCES: Final = (list, tuple, set, frozenset, deque)
_DICTS: Final = (dict, OrderedDict, defaultdict, Counter)
COLLECTIONS: Final = frozenset((*_SEQUENCES, *_DICTS))
_KINDS: Final[dict[str, Any]] = {kind.__name__: kind for kind in (*_SEQUENCES, *_DICTS)}
_NESTED: Final = "nested "  # before the kind of a collection that has copies as items
_LARGEST: Final = ":"  # between the kind of a deque and its largest length
_NUMBERS: Final = "biuf"  # kinds of arrays
_LONGEST: Final = 1024  # scalars in a collection, and characters of its texts
ELEMENTS: Final = 4096  # of a tensor or an array
_ITEMS: Final = 256  # of nested collections, in all levels
_TENSORS: Final = 16  # and arrays, in nested collections
_LEVELS: Final = 6
_ATTRIBUTES: Final = 64  # of an object
_LIBRARIES: Final = sys.stdlib_module_names - {"__main__", "abc", "typing"} | {
    "fabricx",
    "numpy",
    "torch",
    "torchmetrics",
}


class Unsupported(Exception):
    """The value is of another type, or too large."""


class Absent(NamedTuple):
    """The attribute was deleted."""


class Copy(NamedTuple):
    """Content of a tensor, an array, a collection or an object, and the object itself in the process that has made it.

    The content of an object is a dict of its attributes, without those that can't be copied.
    """

    kind: str
    content: Any
    source: Any = None


class Length(NamedTuple):
    """A list that is not copied, and its length. Only the process that has made it restores it."""

    source: list[Any]
    length: int


class Same(NamedTuple):
    """The attribute is the same object as another attribute."""

    key: Key


def copied(
    value: Any, *, within: bool = False, elements: int = ELEMENTS, held: Collection[int] = ()
) -> Any:  # fmt: skip
    """Return a copy of a value.

    Args:
        value: an attribute.
        within: it is an attribute of an object in an attribute.
        elements: limit for a tensor or an array.
        held: addresses of the memory of weights and buffers; tensors that are a part of them are not copied.

    Raises:
        Unsupported: it can't be copied.
    """
    kind = type(value)
    if kind in SCALARS:
        if kind in (str, bytes) and len(value) > _LONGEST:
            raise Unsupported
        return value
    if kind is Tensor:
        if value.requires_grad and value.grad_fn is None:
            raise Unsupported  # an optimizer may train it
        if value.numel() > elements or value.layout is not torch.strided or value.device.type == "meta":
            raise Unsupported
        if value.is_nested or any(n > 1 and not stride for n, stride in zip(value.shape, value.stride(), strict=True)):
            raise Unsupported  # several elements may have the same memory
        if held and value.untyped_storage().data_ptr() in held:
            raise Unsupported
        return Copy(value.device.type, value.detach().clone(), value)
    if issubclass(kind, np.generic) and value.dtype.kind in _NUMBERS:
        return Copy("number", np.array(value), value)
    if kind is np.ndarray and value.dtype.kind in _NUMBERS and value.size <= elements:
        return Copy("array", value.copy(), value)
    if kind in COLLECTIONS:
        try:
            return Copy(_name(value), _items(value), value)
        except Unsupported:
            if within:  # such as the connections of a client: only its numbers and texts are restored
                raise
            return _NestedCopies(held).copied(value)
    if issubclass(kind, Enum):
        return Copy("enum", value.name, value)
    attributes = None if within else own_attributes(value)
    if attributes is None or len(attributes) > _ATTRIBUTES:
        raise Unsupported
    copies = {}
    for name, attribute in attributes.items():
        try:
            copies[name] = copied(attribute, within=True, held=held)
        except Unsupported:
            continue
    return Copy("object", copies, value)


def _name(collection: Any) -> str:
    """Return the kind of a collection; with the largest length of a deque."""
    bounded = isinstance(collection, deque) and collection.maxlen is not None
    return f"{type(collection).__name__}{_LARGEST}{collection.maxlen}" if bounded else type(collection).__name__


def _items(collection: Any) -> list[Any]:
    """Return the items of a collection of numbers and texts; of a dict, pairs of keys and values.

    Raises:
        Unsupported: other items, or too many.
    """
    if len(collection) > _LONGEST:
        raise Unsupported
    scalars = [*collection, *collection.values()] if isinstance(collection, dict) else list(collection)
    kinds = set(map(type, scalars))
    if not kinds <= SCALARS:
        raise Unsupported
    if kinds & {str, bytes} and sum(len(item) for item in scalars if isinstance(item, (str, bytes))) > _LONGEST * 16:
        raise Unsupported
    return [list(pair) for pair in collection.items()] if isinstance(collection, dict) else scalars


@final
class _NestedCopies:
    """Copies of a collection of collections, tensors and objects, up to a number of items in all levels.

    Args:
        held: as for `copied`.
    """

    def __init__(self, held: Collection[int]) -> None:
        self._held, self._left = held, _ITEMS

    def copied(self, value: Any, level: int = 0) -> Any:
        """Return a copy of a collection or of an item.

        Raises:
            Unsupported: there are too many items, or an item can't be copied.
        """
        kind = type(value)
        if level > _LEVELS:
            raise Unsupported
        if kind not in COLLECTIONS or kind in (set, frozenset):
            flat = kind in (set, frozenset)
            copy = Copy(kind.__name__, _items(value), value) if flat else copied(value, held=self._held)
            self._take(number_of_items(copy))
            return copy
        self._take(1)
        if len(value) > self._left:
            raise Unsupported
        if isinstance(value, dict):
            content = [[self.copied(name, level + 1), self.copied(item, level + 1)] for name, item in value.items()]
        else:
            content = [self.copied(item, level + 1) for item in value]
        return Copy(_NESTED + _name(value), content, value)

    def _take(self, items: int) -> None:
        self._left -= items
        if self._left < 0:
            raise Unsupported


def of_items(function: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    """Apply a function to the items of a collection, or to the keys and values in a list of pairs.

    Args:
        function: returns a new item.
        items: content of a copy of a collection.
    """
    return [list(map(function, item)) if isinstance(item, list) else function(item) for item in items]


def own_attributes(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object of a class outside of torch and other libraries, such as a running mean.

    Args:
        value: any object.

    Returns:
        the dict with its attributes; None for other objects.
    """
    try:
        if isinstance(value, (nn.Module, Tensor, type)) or callable(value):
            return None
        if any(kind.__module__.partition(".")[0] in _LIBRARIES for kind in type(value).__mro__[:-1]):
            return None
        attributes = vars(value)
    except Exception:  # of a class with attributes of its own kind
        return None
    return attributes if type(attributes) is dict else None


def shown(key: Key) -> str:
    """Return the name of an attribute for messages.

    Args:
        key: names of its owner and of the attribute.
    """
    return f"{key[0]}.{key[1]}" if key[0] else key[1]


def has_data(value: Any) -> bool:
    """Return whether a value is a tensor, an array, a collection, or an object of a class of users.

    Args:
        value: any object.
    """
    return isinstance(value, (Tensor, np.ndarray, *COLLECTIONS)) or own_attributes(value) is not None


def equal(first: Any, second: Any) -> bool:
    """Return whether two copies are equal; NaN is equal to NaN.

    Args:
        first, second: results of `copied`, or copies of another process.
    """
    if type(first) is not type(second):
        return False
    if isinstance(first, Copy):
        same = _equal_items if is_nested(first) else equal
        return first.kind == second.kind and same(first.content, second.content)
    if isinstance(first, Tensor):
        if first.dtype != second.dtype or first.shape != second.shape:
            return False
        return torch.equal(first, second) or bool(((first == second) | ((first != first) & (second != second))).all())
    if isinstance(first, np.ndarray):
        return first.dtype == second.dtype and bool(np.array_equal(first, second, equal_nan=True))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[name], second[name]) for name in first)
    if isinstance(first, list):
        return first == second or (len(first) == len(second) and all(map(equal, first, second)))
    return bool(first == second or (first != first and second != second))


def _equal_items(first: list[Any], second: list[Any]) -> bool:
    """Return whether the contents of nested collections are equal."""
    return len(first) == len(second) and all(
        _equal_items(item, other) if isinstance(item, list) else equal(item, other)
        for item, other in zip(first, second, strict=True)
    )


def is_nested(copy: Any) -> bool:
    """Return whether a copy is of a collection of collections, tensors or objects.

    Args:
        copy: result of `copied`, or another object.
    """
    return isinstance(copy, Copy) and copy.kind.startswith(_NESTED)


def number_of_items(copy: Any) -> int:
    """Return the number of items in all levels of a copy; a tensor counts as 16.

    Args:
        copy: result of `copied`.
    """
    if not isinstance(copy, Copy):
        return 1
    if isinstance(copy.content, (Tensor, np.ndarray)):
        return _ITEMS // _TENSORS
    if not isinstance(copy.content, (list, dict)):
        return 1
    items = copy.content.values() if isinstance(copy.content, dict) else copy.content
    return 1 + sum(
        sum(map(number_of_items, item)) if isinstance(item, list) else number_of_items(item) for item in items
    )


def write(attributes: dict[str, Any], name: str, copy: Any, references: int | None = None) -> bool:
    """Restore an attribute; return False if that is impossible in this process.

    Args:
        attributes: of the owner.
        name: of the attribute.
        copy: of this process or another.
        references: to an object with attributes; if it has more, it may be the wrong object of several in a list. None
            if it is the object that had the attribute at all times.
    """
    if isinstance(copy, Absent):
        attributes.pop(name, None)
        return True
    if isinstance(copy, Length):
        attributes[name] = copy.source
        del copy.source[copy.length :]
        return True
    if isinstance(copy, Copy) and copy.source is not None:
        attributes[name] = copy.source
        _write_content(copy)
        return True
    present = attributes.get(name)
    if isinstance(copy, Copy) and copy.kind == "object" and references and sys.getrefcount(present) > references:
        return False
    try:
        attributes[name] = _new(copy, present)
    except Unsupported:
        return False
    return True


def _write_content(copy: Copy) -> None:
    """Restore the content of the object that was copied."""
    source, content = copy.source, copy.content
    if copy.kind == "object":
        for name, value in content.items():
            write(vars(source), name, value)
    elif isinstance(source, Tensor):
        if not equal(source.detach(), content):
            with torch.inference_mode(source.is_inference()):
                source.detach().copy_(content)
    elif copy.kind == "array":
        if not equal(source, content):
            source[...] = content
    elif isinstance(source, tuple(COLLECTIONS)):
        items = of_items(_source_of, content)
        if isinstance(source, (list, deque)):
            source.clear()
            source.extend(items)
        elif isinstance(source, (set, dict)):
            source.clear()
            source.update(dict(items) if isinstance(source, dict) else items)


def _source_of(item: Any) -> Any:
    """Return an item of a collection, with its content restored."""
    if not isinstance(item, Copy):
        return item
    _write_content(item)
    return item.source


def _new(copy: Any, present: Any) -> Any:
    """Return a new object with the content, or the present object with it if that has attributes of its own.

    Args:
        copy: of another process; or a number, a text or None.
        present: value in this process at the place of the copy; None without.

    Raises:
        Unsupported: the place has no such object in this process.
    """
    if not isinstance(copy, Copy):
        return copy
    kind, content = copy.kind, copy.content
    if kind == "object":
        return _object(content, present)
    if kind == "enum":
        if not isinstance(present, Enum) or content not in type(present).__members__:
            raise Unsupported
        return type(present)[content]
    if kind == "number":
        return content[()]
    if kind == "array":
        return content.copy()
    if isinstance(content, Tensor):
        return content.to(kind, copy=True)
    if kind.startswith(_NESTED):
        kind, content = kind.removeprefix(_NESTED), _new_items(content, present)
    kind, _, largest = kind.partition(_LARGEST)
    if kind == "deque":
        return deque(content, int(largest) if largest else None)
    if kind == "defaultdict":
        if type(present) is not defaultdict:  # whose function is not sent
            raise Unsupported
        return defaultdict(present.default_factory, content)
    return _KINDS[kind](dict(content) if issubclass(_KINDS[kind], dict) else content)


def _object(attributes: dict[str, Any], present: Any) -> Any:
    held = own_attributes(present)
    if held is None or not attributes.keys() <= held.keys():
        raise Unsupported
    if not all([write(held, name, value) for name, value in attributes.items()]):  # noqa: C419
        raise Unsupported
    return present


def _new_items(items: list[Any], present: Any) -> list[Any]:
    """Return the items of a new collection.

    Args:
        items: content of a nested collection.
        present: collection in this process, with the objects that items may need.
    """
    if items and isinstance(items[0], list):
        pairs = [(_new(name, None), item) for name, item in items]
        return [[name, _new(item, _counterpart(present, name))] for name, item in pairs]
    others = list(present) if isinstance(present, (list, tuple, deque)) else []
    return [_new(item, other) for item, other in itertools.zip_longest(items, others[: len(items)])]


def _counterpart(present: Any, name: Any) -> Any:
    """Return the value of a dict in this process; of a defaultdict without the name, a new value."""
    if isinstance(present, defaultdict) and present.default_factory is not None and name not in present:
        return present.default_factory()
    return present.get(name) if isinstance(present, dict) else None
