"""A state is flattened into tensors and a structure, and restored, for any keys."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fabricx.checkpoint.tree import join, like, split

KEYS = st.one_of(st.text("a/%'1", max_size=3), st.integers(0, 2), st.tuples(st.integers(0, 1)))
TENSORS = st.integers(0, 9).map(lambda number: torch.tensor([float(number)]))
STATES = st.recursive(
    st.one_of(TENSORS, st.integers(), st.none(), st.text(max_size=2)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3), st.lists(inner, max_size=2).map(tuple)
    ),
    max_leaves=12,
)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def number_of_tensors(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return 1
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(map(number_of_tensors, items))


@settings(max_examples=100, deadline=None)
@given(STATES)
@example({1: torch.zeros(1), "1": torch.ones(1)})
def test_a_flattened_state_is_restored(state: Any) -> None:
    rest, tensors = split(state)
    assert len(tensors) == number_of_tensors(state)  # no two tensors share a name
    assert number_of_tensors(rest) == 0
    assert equal(join(rest, tensors), state)


def test_a_tensor_keeps_its_memory_but_not_its_graph() -> None:
    weight = torch.zeros(2, requires_grad=True)
    _, tensors = split({"w": weight})
    assert tensors["w"].data_ptr() == weight.data_ptr()
    assert not tensors["w"].requires_grad


class Named(NamedTuple):
    mean: torch.Tensor


class Mapped(dict[str, Any]):
    """A class derived from dict."""


def test_containers_of_other_classes_keep_their_class_or_become_plain() -> None:
    state = {
        "ordered": OrderedDict(a=torch.zeros(1)), "default": defaultdict(list, a=[torch.zeros(1)]),
        "named": Named(torch.zeros(1)), "derived": Mapped(a=torch.zeros(1)), "without": Mapped(a=1),
    }  # fmt: skip
    rest, tensors = split(state)
    assert list(tensors) == ["ordered/a", "derived/a"]
    assert rest["default"] is state["default"]  # objects with their tensors
    assert rest["named"] is state["named"]
    joined = join(rest, tensors)
    assert [type(value) for value in joined.values()] == [OrderedDict, defaultdict, Named, dict, Mapped]
    assert equal(joined, state)


def test_a_missing_tensor_is_an_error() -> None:
    rest, tensors = split([torch.zeros(1)])
    tensors.clear()
    with pytest.raises(KeyError, match="0"):
        join(rest, tensors)


def test_a_tensor_with_the_shape_of_a_sharded_parameter_is_allocated_as_a_shard() -> None:
    class Shard(torch.Tensor):
        """Simulates a sharded tensor: `empty_like` returns a tensor of the same class."""

    room = like({"net/a": torch.zeros(4, 2).as_subclass(Shard)}, "cpu")
    assert type(room("strategy/module/net%2Fa", torch.Size((4, 2)), torch.bfloat16)) is Shard
    assert type(room("strategy/module/net%2Fa", torch.Size((4,)), torch.float32)) is torch.Tensor  # a step counter
    assert type(room("other", torch.Size((4, 2)), torch.float32)) is torch.Tensor
