"""States of a module that is divided into the stages of a pipeline: each stage has the tensors that it holds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from fabricx.checkpoint import tree
from fabricx.distributed.world import World


def of_all_stages(state: Any, absent: Collection[str], pipeline: World) -> Any:
    """Return a state with the tensors of all stages, in main memory; all ranks of the pipeline call it.

    Args:
        state: nested dicts, lists and tuples.
        absent: names of parameters and buffers that this stage does not hold; what is below them is dropped.
        pipeline: ranks along the pipeline.
    """
    if pipeline.size == 1:
        return state
    rest, tensors = tree.split(without(state, absent))
    stages = pipeline.gather_objects((rest, {path: tensor.cpu() for path, tensor in tensors.items()}))
    known: dict[str, Tensor] = {}
    for _, of_stage in reversed(stages):  # of equal tensors that several stages hold, the first stage's
        known |= of_stage
    return tree.join(_merged([other for other, _ in stages]), known)


def without(state: Any, absent: Collection[str]) -> Any:
    """Return a state without the entries of dicts whose key is the name of a tensor that this stage does not hold.

    Containers without such an entry are the same objects.

    Args:
        state: nested dicts, lists and tuples.
        absent: names of parameters and buffers.

    >>> without({"module": {"a": 1, "b": 2}, "groups": [["a", "b"]]}, {"b"})
    {'module': {'a': 1}, 'groups': [['a', 'b']]}
    """
    if isinstance(state, Mapping):
        kept = {key: without(value, absent) for key, value in state.items() if key not in absent}
        return state if len(kept) == len(state) and all(state[key] is item for key, item in kept.items()) else kept
    if type(state) in (list, tuple):
        items = [without(value, absent) for value in state]
        return state if all(item is value for item, value in zip(items, state, strict=True)) else type(state)(items)
    return state


def _merged(trees: Sequence[Any]) -> Any:
    """Return the union of dicts at any depth; of other values, the first stage's.

    >>> _merged([{"a": {"x": 1}}, {"a": {"y": 2}, "b": 3}])
    {'a': {'x': 1, 'y': 2}, 'b': 3}
    """
    first = trees[0]
    if type(first) in (dict, OrderedDict) and set(first) != {tree.PLACE}:
        dicts = [other for other in trees if type(other) is type(first)]
        keys = dict.fromkeys(key for other in dicts for key in other)
        return type(first)((key, _merged([other[key] for other in dicts if key in other])) for key in keys)
    if type(first) in (list, tuple):
        alike = [other for other in trees if type(other) is type(first) and len(other) == len(first)]
        return type(first)(_merged(values) for values in zip(*alike, strict=True))
    return first
