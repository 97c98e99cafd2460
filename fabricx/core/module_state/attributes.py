"""Attributes of a module that its steps change, such as counters and lists: their restoration, and their numbers."""

from __future__ import annotations

import functools
import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, final

import torch
from torch import Tensor, nn

_ELSEWHERE: Final = frozenset(("_parameters", "_buffers", "_modules"))  # other code restores these
_NUMBERS: Final = (bool, int, float, complex)
_CONSTANTS: Final = (*_NUMBERS, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size)
_PLAIN: Final = frozenset((bool, int, float, str, type(None)))
_DICTS: Final = (dict, OrderedDict, defaultdict)
_COLLECTIONS: Final = frozenset((list, deque, set, *_DICTS))
_DEPTH: Final = 4  # of collections and objects in an attribute


@final
class AttributeMark:
    """Attributes of a module and its submodules, and copies of what they contain.

    Collections, arrays, tensors without a graph, and objects that consist of such values are copied. Other objects,
    such as files and threads, stay as they are. Hooks of the modules are included. A step that adds or replaces
    modules, as a first forward may do, keeps what it has set, since its flags belong to these modules.

    Args:
        module: the module; parameters and buffers are not included.
        ignored: names of attributes that are not restored.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str] = ()) -> None:
        self._module, self._parts = module, list(module.modules())
        ignored = _ELSEWHERE | set(ignored)
        self._restores: list[Callable[[], None]] = []
        self._empty: list[Any] = []  # most attributes of a layer are empty dictionaries of hooks
        seen: set[int] = set()
        for part in self._parts:
            values = {name: value for name, value in vars(part).items() if name not in ignored}
            self._restores.append(functools.partial(_restore_names, vars(part), values, ignored))
            for value in values.values():
                if type(value) in _COLLECTIONS and not value:
                    self._empty.append(value)
                elif type(value) not in _PLAIN:
                    self._restores += _marks(value, seen, _DEPTH)

    def restore(self) -> None:
        """Restore the attributes and what they contain."""
        now = list(self._module.modules())
        if len(now) != len(self._parts) or not all(map(operator.is_, now, self._parts)):
            return
        for filled in filter(None, self._empty):
            filled.clear()
        for restore in self._restores:
            restore()


def numbers_of(module: nn.Module) -> dict[str, Any]:
    """Return the numbers in attributes of a module and its submodules, by name.

    Args:
        module: the module; metrics of torchmetrics are not included.

    >>> layer = nn.Linear(1, 1)
    >>> layer.seen, layer.meter = 3, {"sum": 0.5}
    >>> numbers = numbers_of(layer)
    >>> numbers["seen"], numbers["meter.sum"]
    (3, 0.5)
    """
    return {name: current[key] for name, current, key in _places(module)}


def extrapolate(module: nn.Module, before: Mapping[str, Any], steps: int) -> None:
    """Change the numbers in attributes as further steps may do: each by the same difference.

    Args:
        module: the module, after a step.
        before: result of `numbers_of` before that step.
        steps: number of further steps.
    """
    for name, current, key in list(_places(module)):
        if name in before and current[key] != before[name]:
            current[key] = current[key] + steps * (current[key] - before[name])


def lists_of(module: nn.Module) -> dict[str, int]:
    """Return the lengths of the lists in attributes of a module and its submodules, by name.

    Args:
        module: the module.
    """
    parts = [(f"{prefix}." if prefix else "", part) for prefix, part in module.named_modules()]
    values = ((prefix + name, value) for prefix, part in parts for name, value in vars(part).items())
    return {name: len(value) for name, value in values if type(value) in (list, deque)}


def _places(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the name of each number, the dictionary that has it, and its key."""
    for prefix, part in module.named_modules():
        if not hasattr(part, "_update_count"):
            yield from _within(f"{prefix}." if prefix else "", vars(part), 2)


def _within(prefix: str, current: dict[str, Any], depth: int) -> Iterator[tuple[str, dict[str, Any], str]]:
    for key, value in current.items():
        if not isinstance(key, str) or key in _ELSEWHERE:
            continue
        if isinstance(value, _NUMBERS):
            yield prefix + key, current, key
        elif depth and (type(value) in _DICTS or _is_record(value)):
            yield from _within(f"{prefix}{key}.", value if type(value) in _DICTS else vars(value), depth - 1)


def _marks(value: Any, seen: set[int], depth: int) -> list[Callable[[], None]]:
    """Return functions that restore what a value contains now."""
    if isinstance(value, _CONSTANTS) or callable(value) or id(value) in seen or not depth:
        return []
    seen.add(id(value))
    restores: list[Callable[[], None]] = []
    inner: list[Any] = []
    if isinstance(value, Tensor):
        if type(value) is Tensor and value.grad_fn is None and not value.is_inference():
            version, copy = value._version, value.detach().clone()
            restores.append(lambda: None if value._version == version else _write(value, copy))
    elif type(value) in (list, deque, set):
        before = list(value)
        restores.append(lambda: _restore_items(value, before))
        inner = before
    elif type(value) in _DICTS:
        items = dict(value)
        restores.append(lambda: _restore_names(value, items))
        inner = list(items.values())
    elif isinstance(value, tuple):
        inner = list(value)
    elif _is_array(value):
        if value.flags.writeable:
            restores.append(functools.partial(value.__setitem__, ..., value.copy()))
    elif _is_record(value):
        attributes = dict(vars(value))
        restores.append(lambda: _restore_names(vars(value), attributes))
        inner = list(attributes.values())
    return restores + [restore for item in inner for restore in _marks(item, seen, depth - 1)]


def _is_record(value: Any) -> bool:
    """Return whether an object consists of numbers, texts, tensors and collections, such as a running mean."""
    if isinstance(value, (nn.Module, Tensor, torch.Generator)) or not hasattr(value, "__dict__"):
        return False
    plain = (*_CONSTANTS, Tensor, list, tuple, deque, set, dict)
    return all(isinstance(item, plain) or _is_array(item) for item in vars(value).values())


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def _restore_names(current: dict[Any, Any], before: dict[Any, Any], ignored: Collection[Any] = ()) -> None:
    for name in [name for name in current if name not in before and name not in ignored]:
        del current[name]
    for name, value in before.items():
        if name not in current or current[name] is not value:
            current[name] = value


def _restore_items(current: Any, before: list[Any]) -> None:
    if len(current) != len(before) or any(item is not old for item, old in zip(current, before, strict=True)):
        current.clear()
        (current.update if isinstance(current, set) else current.extend)(before)


def _write(tensor: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        tensor.data.copy_(values)
