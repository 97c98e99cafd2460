"""State inside samplers and datasets: their own generators, counters, orders that are shuffled in place.

The global generators of torch, numpy and python are seeded and saved in `fabricx/core/module_state/rng.py`.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, Sampler

from fabricx.core.tensors.nested_items import items_of
from fabricx.data.plain_values import NATIVE, is_plain, packed, same, unpacked

Values = dict[str, Any]

_GENERATORS: Final = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_DEPTH: Final = 6  # nesting of datasets and transforms
_NOT_SEARCHED: Final = (type, ModuleType, FunctionType, MethodType, Tensor, np.ndarray)
_COUNTERS: Final = 64  # values in nested lists and dictionaries; more are assumed to be data
_ITEMS: Final = 64  # longer lists are assumed to hold samples, not transforms or datasets, and are not searched


def sampler_values(sampler: Any) -> Values:
    """Copy all values that drawing an order may change in a sampler and in nested samplers, by path.

    Args:
        sampler: any sampler.
    """
    return {path: copy_ for path, _, _, value in _attributes(sampler) if (copy_ := _packed(value)) is not None}


def put_back_sampler(sampler: Any, values: Values) -> None:
    """Restore a sampler's attributes; attributes whose kind has changed are skipped.

    Args:
        sampler: changed in place.
        values: result of `sampler_values`.
    """
    for path, owner, name, value in list(_attributes(sampler)):
        kind, saved = values.get(path, (None, None))
        if kind is None or kind != _kind(value):
            continue
        if isinstance(value, _GENERATORS):
            set_generator(value, saved)
        elif isinstance(value, list):
            value[:] = unpacked(saved)
        elif isinstance(value, dict):
            value.clear()
            value.update(unpacked(saved))
        elif isinstance(value, (np.ndarray, Tensor)) and tuple(value.shape) == tuple(saved.shape):
            value[...] = saved.numpy() if isinstance(value, np.ndarray) else saved
        else:
            owner[name] = saved.numpy().copy() if isinstance(value, np.ndarray) else copied(saved)


def iterated_values(source: Any) -> Values:
    """Copy the counters that iterating may change in a loader and in its sampler or stream, by path.

    They are numbers, texts, and small lists and dictionaries of these. Tensors and arrays are left out, which may be
    data or belong to a module, and generators, which `states_of_generators` copies.

    Args:
        source: any iterable, such as a DataLoader.
    """
    counters = ((path, value) for path, _, _, value in _attributes(source) if _counters(value, _COUNTERS) >= 0)
    return {path: copy_ for path, value in counters if (copy_ := _packed(value)) is not None}


def copied_state(datamodule: Any) -> Any:
    """Return a copy of the state of a data module; None without a state, or if it fails.

    A state may be that of a loader which the data module has not created yet.

    Args:
        datamodule: data module of a run; None without.
    """
    if datamodule is None:
        return None
    try:
        return copy.deepcopy(datamodule.state_dict()) or None
    except Exception:
        return None


def copied(state: Any) -> Any:
    """Return a copy of the state of a loader, which may refer to lists and tensors that the loader changes later.

    Args:
        state: result of `state_dict`; a part that can't be copied is kept.

    >>> ahead = [3, 4]
    >>> kept = copied({"ahead": ahead})
    >>> ahead.pop(), kept
    (4, {'ahead': [3, 4]})
    """
    if type(state) in (dict, list):
        items: Any = state.values() if type(state) is dict else state
        if set(map(type, items)) <= NATIVE:  # long lists of numbers: faster than `deepcopy`
            return state.copy()
        return {key: copied(value) for key, value in state.items()} if type(state) is dict else list(map(copied, items))
    try:
        return copy.deepcopy(state)
    except Exception:
        return state


def tensor_bytes(value: Any) -> int:
    """Return the memory of the tensors and arrays in nested dicts, lists and tuples, in bytes.

    Args:
        value: such as the state of a callback.
    """
    if isinstance(value, (Tensor, np.ndarray)):
        return value.nbytes
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(map(tensor_bytes, inside))


def equal_states(first: Any, second: Any) -> bool:
    """Return whether two states of nested mappings, sequences, tensors, arrays and other values are equal.

    Args:
        first, second: results of `state_dict`; a checkpoint may have changed kinds of sequences and devices of tensors.

    >>> equal_states({"seen": [torch.ones(2), 3]}, {"seen": (torch.ones(2), 3)})
    True
    """
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(equal_states(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(equal_states, first, second))
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first.cpu(), second.cpu())
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return bool(np.array_equal(first, second))
    if type(first) is not type(second):
        return False
    if dataclasses.is_dataclass(first) and not isinstance(first, type):  # its `==` fails if a field is a tensor
        names = [field.name for field in dataclasses.fields(first)]
        return all(equal_states(getattr(first, name), getattr(second, name)) for name in names)
    return bool(first == second)


def changes(before: Values, after: Values) -> tuple[Values, Values]:
    """Return the values that differ, from before and from after.

    Args:
        before, after: results of `sampler_values`.
    """
    paths = [path for path in after if path in before and not same(list(before[path]), list(after[path]))]
    return {path: before[path] for path in paths}, {path: after[path] for path in paths}


def find_generators(owner: Any, name: str) -> dict[str, Any]:
    """Return the random generators among the attributes of an object and of its parts, by path.

    Args:
        owner: a dataset, a module, a list or a dictionary.
        name: first part of the paths.

    >>> class Noisy:
    ...     def __init__(self):
    ...         self.transforms = [random.Random(1)]
    >>> list(find_generators(Noisy(), "data"))
    ['data.transforms.0']
    """
    return dict(_search(owner, name, set(), _DEPTH))


def states_of_generators(generators: dict[str, Any]) -> Values:
    """Return kind and state of generators, by path.

    Args:
        generators: result of `find_generators`.
    """
    return {path: (generator_kind(item), generator_state(item)) for path, item in generators.items()}


def set_generators(generators: dict[str, Any], states: Values) -> None:
    """Restore the states of generators; a generator whose kind has changed is skipped.

    Args:
        generators: result of `find_generators`.
        states: result of `states_of_generators`.
    """
    for path, generator in generators.items():
        kind, state = states.get(path, (None, None))
        if kind == generator_kind(generator):
            set_generator(generator, state)


def generator_state(generator: Any) -> Any:
    """Return the state of a generator as plain data and tensors.

    Args:
        generator: generator of torch, numpy or python.
    """
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        version, numbers, gauss = generator.getstate()
        return [version, list(numbers), gauss]
    if isinstance(generator, np.random.RandomState):
        return _mapped(generator.get_state(legacy=False), np.ndarray, np.ndarray.tolist)
    return _mapped(generator.bit_generator.state, np.ndarray, np.ndarray.tolist)


def set_generator(generator: Any, state: Any) -> None:
    """Set the state of a generator.

    Args:
        generator: generator of the same kind as the saved generator.
        state: result of `generator_state`.
    """
    if isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    elif isinstance(generator, random.Random):
        version, numbers, gauss = state
        generator.setstate((version, tuple(numbers), gauss))
    else:
        arrays = _mapped(state, list, lambda numbers: np.array(numbers, dtype=np.uint64))
        if isinstance(generator, np.random.RandomState):
            generator.set_state(arrays)
        else:
            generator.bit_generator.state = arrays


def generator_kind(generator: Any) -> str:
    """Return a name that is equal for generators with compatible states.

    Args:
        generator: generator of torch, numpy or python.
    """
    bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
    if isinstance(generator, np.random.RandomState):
        bits = generator._bit_generator  # type: ignore[attr-defined]
    return type(bits).__name__ if bits is generator else f"{type(generator).__name__} of {type(bits).__name__}"


def _attributes(owner: Any) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    """Yield (path, owner's attributes, name, value) for the attributes of a sampler and of nested samplers."""
    open_, seen = [("", owner)], set()
    while open_:
        prefix, part = open_.pop()
        if id(part) in seen or not hasattr(part, "__dict__"):
            continue
        seen.add(id(part))
        for name, value in vars(part).items():
            several = value if isinstance(value, (list, tuple)) and len(value) <= _ITEMS else [value]
            within = [(f"{prefix}{name}.{i}.", item) for i, item in enumerate(several) if _draws(item)]
            open_ += within
            if not within:
                yield prefix + name, vars(part), name, value


def _counters(value: Any, limit: int) -> int:
    """Return the limit less the number of values in a nested list or dictionary; negative if these are no counters."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return limit - 1
    if not isinstance(value, (list, tuple, dict)) or len(value) > limit:
        return -1
    for item in value.values() if isinstance(value, dict) else value:
        if (limit := _counters(item, limit)) < 0:
            return -1
    return limit


def _draws(part: Any) -> bool:
    """Return whether an object is a sampler or a stream, by class or behaviour: iterable without indexing."""
    return isinstance(part, (Sampler, IterableDataset)) or (
        hasattr(part, "__dict__") and hasattr(part, "__iter__") and not hasattr(part, "__getitem__")
        and not isinstance(part, (type, nn.Module))
    )  # fmt: skip


def _kind(value: Any) -> str | None:
    """Return the kind of a value that can be copied; None for any other value."""
    if isinstance(value, random.SystemRandom):
        return None
    if isinstance(value, _GENERATORS):
        return generator_kind(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return "value"
    if isinstance(value, np.ndarray) and value.dtype.kind in "iufb":
        return "array"
    if isinstance(value, Tensor) and not value.requires_grad:
        return "tensor"
    if not is_plain(value):
        return None
    return "list" if isinstance(value, list) else "dict"


def _packed(value: Any) -> tuple[str, Any] | None:
    kind = _kind(value)
    if kind is None:
        return None
    if isinstance(value, _GENERATORS):
        return kind, generator_state(value)
    if isinstance(value, np.ndarray):
        return kind, torch.from_numpy(value.copy())
    return kind, packed(value)


def _mapped(state: Mapping[str, Any], kind: type, change: Callable[[Any], Any]) -> dict[str, Any]:
    """Apply a function to all values of a type in nested dictionaries."""
    return {
        key: _mapped(value, kind, change) if isinstance(value, Mapping)
        else change(value) if isinstance(value, kind) else value
        for key, value in state.items()
    }  # fmt: skip


def _search(part: Any, path: str, seen: set[int], depth: int, *, objects: bool = True) -> Iterator[tuple[str, Any]]:
    if id(part) in seen or not depth:
        return
    seen.add(id(part))
    if isinstance(part, _GENERATORS):
        if not isinstance(part, random.SystemRandom) and not any(part is shared for shared in _global()):
            yield path, part
        return
    inside: Any = ()
    if isinstance(part, (dict, list, tuple)):
        inside = items_of(part, _ITEMS)
    elif isinstance(part, nn.Module):
        for name, module in part.named_modules():
            for attribute, value in list(vars(module).items()):
                if not attribute.startswith("__") and value is not module:
                    where = f"{path}.{name}.{attribute}" if name else f"{path}.{attribute}"
                    yield from _search(value, where, seen, depth - 1, objects=False)
    elif objects and hasattr(part, "__dict__") and not isinstance(part, _NOT_SEARCHED):
        inside = vars(part).items()
    for name, value in list(inside):
        yield from _search(value, f"{path}.{name}", seen, depth - 1, objects=objects)


def _global() -> tuple[Any, ...]:
    return torch.default_generator, random._inst, np.random.mtrand._rand  # type: ignore[attr-defined]
