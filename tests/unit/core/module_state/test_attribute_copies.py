"""Copies of values: equal after a transfer, and written to the same object or to a new object."""

from __future__ import annotations

import enum
import io
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch

from fabricx.core.module_state.attribute_copies import (
    Absent,
    Length,
    Unsupported,
    copied,
    equal,
    own_attributes,
    write,
)
from fabricx.core.module_state.packed_attributes import packed, unpacked


def sent(copy: Any) -> Any:
    torch.save(packed({("", "value"): copy}), buffer := io.BytesIO())
    buffer.seek(0)
    return unpacked(torch.load(buffer, weights_only=True))["", "value"]


VALUES = [
    3, float("nan"), "a", b"ab", 1j, None, True, [1, 2.5, "a", None, 1j], (1, b"a"), {1, 2}, frozenset({"a"}),
    deque([1], 3), {"a": 1, 2: None}, OrderedDict(b=1, a=2), np.arange(3), np.float32(0.5), np.array([float("nan")]),
    torch.arange(3), torch.tensor(float("nan")), torch.tensor([1.0]).bfloat16(), [float("nan")], [],
    Counter("aab"), [[1], [2, [3]]], {"a": [1.0], "b": {"c": (1, [2])}}, [torch.ones(2), torch.zeros(3)], {(1, 2): 3},
    deque([[1]], 2), [deque([1], 2)], [{1, 2}, [frozenset({"a"})]],
    ([], {}), {"mean": np.ones(2), "code": b"a"}, OrderedDict(a=[float("nan")]),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_copies_are_equal_after_a_transfer(value: Any) -> None:
    received: dict[str, Any] = {}
    assert equal(copied(value), sent(copied(value)))
    assert write(received, "value", sent(copied(value)))
    assert type(received["value"]) is type(value)
    assert equal(copied(received["value"]), copied(value))


@pytest.mark.parametrize(("first", "second"), [(1, 2), (1, 1.0), ([1], [2]), ([1], (1,)), ({"a": 1}, {"a": 2})])
def test_copies_of_other_values_are_not_equal(first: Any, second: Any) -> None:
    assert not equal(copied(first), copied(second))


def test_the_order_of_a_dict_counts() -> None:
    assert not equal(copied(OrderedDict(a=1, b=2)), copied(OrderedDict(b=2, a=1)))


@pytest.mark.parametrize(
    "value",
    [[1, 2], deque([1]), {1}, {"a": 1}, torch.ones(2), np.ones(2), [[1], [2]], {"a": [1]}, Counter("aab")],
    ids=repr,
)
def test_a_copy_of_this_process_is_written_to_the_object(value: Any) -> None:
    copy, attributes = copied(value), {"value": "another object"}
    if isinstance(value, (list, deque)):
        value += [0] * 2000  # more than a copy may have
    elif isinstance(value, (set, dict)):
        value.clear()
    else:
        value *= 0
    write(attributes, "value", copy)
    assert attributes["value"] is value
    assert equal(copied(value), copy)


class Phase(enum.Enum):
    WARM_UP = 1
    DECAY = 2


class Running:
    def __init__(self, total: float) -> None:
        self.total, self.phase = total, Phase.WARM_UP


def test_items_of_nested_collections_stay_the_same_objects() -> None:
    inner, tensor, item = [1], torch.ones(2), Running(1.0)
    value = {"inner": inner, "values": (tensor, [item])}
    copy = copied(value)
    inner.append(2)
    tensor.zero_()
    item.total, item.phase = 3.0, Phase.DECAY
    assert not equal(copied(value), copy)
    write({}, "value", copy)
    assert value["inner"] is inner == [1]
    assert value["values"][0] is tensor
    assert tensor.tolist() == [1.0, 1.0]
    assert (item.total, item.phase) == (1.0, Phase.WARM_UP)
    assert equal(copied(value), copy)


def test_objects_within_an_object_are_not_copied() -> None:
    client: Any = Running(1.0)
    client.pending = {1: Running(2.0)}
    assert copied(client).content.keys() == {"total", "phase"}


def test_objects_in_collections_receive_the_attributes_of_the_sender() -> None:
    sender, receiver = [Running(2.0), Running(3.0)], {"value": [Running(0.0), Running(0.0)]}
    sender[1].phase = Phase.DECAY
    objects = list(receiver["value"])
    assert write(receiver, "value", sent(copied(sender)))
    assert receiver["value"] == objects
    assert [(item.total, item.phase) for item in objects] == [(2.0, Phase.WARM_UP), (3.0, Phase.DECAY)]
    assert not write(receiver, "value", sent(copied([*sender, Running(4.0)])))  # this process has no third object
    assert not write({}, "phase", sent(copied(Phase.DECAY)))  # nor a member of the enumeration


def test_a_defaultdict_keeps_the_function_of_the_receiver() -> None:
    sender: Any = defaultdict(int, a=1)
    receiver: dict[str, Any] = {"counts": defaultdict(lambda: 7)}
    write(receiver, "counts", sent(copied(sender)))
    assert receiver["counts"]["b"] == 7
    assert receiver["counts"]["a"] == 1


def test_items_of_a_defaultdict_have_the_function_or_the_length_of_the_receiver() -> None:
    def make() -> dict[str, Any]:
        return {"sums": defaultdict(lambda: defaultdict(int)), "recent": defaultdict(lambda: deque(maxlen=2))}

    sender, receiver = make(), make()
    sender["sums"]["a"]["x"] += 1
    sender["recent"]["a"].extend([1, 2])
    for name, value in sender.items():
        assert write(receiver, name, sent(copied(value)))
    receiver["sums"]["a"]["y"] += 1
    receiver["recent"]["a"].append(3)
    assert receiver["sums"] == {"a": {"x": 1, "y": 1}}
    assert list(receiver["recent"]["a"]) == [2, 3]
    assert not write({}, "sums", sent(copied(sender["sums"])))  # the function is not sent


def test_an_object_with_an_attribute_that_can_not_be_restored_is_not_restored() -> None:
    sender, receiver = Running(1.0), {"mean": Running(0.0)}
    receiver["mean"].phase = None
    assert not write(receiver, "mean", sent(copied(sender)))


def test_absent_attributes_are_deleted_and_longer_lists_cut() -> None:
    items: list[Any] = [object()]
    attributes: dict[str, Any] = {"items": None, "added": 1}
    length = Length(items, len(items))
    items.append(object())
    assert write(attributes, "items", length)
    assert write(attributes, "added", sent(Absent()))
    assert attributes == {"items": items}
    assert len(items) == 1


class Raises:
    @property
    def __dict__(self) -> Any:
        raise RuntimeError


@pytest.mark.parametrize(
    "value",
    [
        [0] * 1025,
        "x" * 1025,
        ["x" * 20_000],
        torch.ones(4097),
        np.ones(4097),
        [[1] * 20] * 20,
        [Raises()],
        Raises(),
        {(1, 2)},
        {int},
        [{(1, 2)}],
        frozenset({torch.float32}),
        [Running(1.0) for _ in range(100)],
        [set(range(200)), set(range(200))],
        torch.ones(1).expand(3),
    ],
)
def test_large_and_other_values_are_not_copied(value: Any) -> None:
    with pytest.raises(Unsupported):
        copied(value)


def test_attributes_of_objects_of_users_only() -> None:
    class Mean:
        def __init__(self) -> None:
            self.total = 1.0

    assert own_attributes(Mean()) == {"total": 1.0}
    assert own_attributes(Raises()) is None
    assert own_attributes(torch.Generator()) is None
    assert own_attributes(Mean) is None
    assert own_attributes(io.BytesIO()) is None
