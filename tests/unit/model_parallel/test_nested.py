from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import torch

from fabricx.model_parallel.nested import copied, leaves, mapped, named

Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    name: str


def test_leaves_have_paths_through_all_containers():
    value = [Pair(1, {"a": 2}), Sample(torch.ones(1), "b"), UserDict(c=3), MappingProxyType({"d": 4})]
    paths = [path for path, _ in leaves(value)]
    assert paths == [(0, 0), (0, 1, "a"), (1, "image"), (1, "name"), (2, "c"), (3, "d")]


def test_containers_with_a_changed_leaf_are_copied_with_their_class():
    value = [Pair(1, OrderedDict(a=2)), Sample(torch.ones(1), "b"), UserDict(c=3)]
    changed = mapped(value, lambda path, leaf: -leaf if isinstance(leaf, int) else leaf)
    assert changed == [Pair(-1, OrderedDict(a=-2)), value[1], UserDict(c=-3)]
    assert [type(part) for part in changed] == [Pair, Sample, UserDict]
    assert type(changed[0].second) is OrderedDict
    assert value[0] == Pair(1, OrderedDict(a=2))
    assert value[2] == UserDict(c=3)


def test_containers_without_a_change_are_not_copied():
    value = {"a": [1, (2,)], "b": [3]}
    changed = mapped(value, lambda path, leaf: 4 if leaf == 3 else leaf)
    assert changed["a"] is value["a"]
    assert mapped(value, lambda path, leaf: leaf) is value
    frozen = Sample(torch.ones(1), "b")
    assert mapped(frozen, lambda path, leaf: "c" if leaf == "b" else leaf).name == "c"


def test_copies_have_other_tensors_and_containers_of_the_same_classes():
    x = torch.ones(2)
    batch = [Pair(x, {"a": x[:1]}), Sample(torch.ones(1), "b"), UserDict(c=3), (), torch.Size([1])]
    copy = copied(batch)
    copy[0].first.zero_()
    copy[0].second.pop("a")
    copy[1].image.zero_()
    copy[2].pop("c")
    assert [type(part) for part in copy] == [type(part) for part in batch]
    assert batch[0].second["a"].tolist() == batch[1].image.tolist() == [1.0]
    assert batch[2] == {"c": 3}
    same = copied({"ids": x, "labels": x, "other": MappingProxyType({"x": x})})
    assert same["ids"] is same["labels"] is not x
    assert same["other"]["x"] is x


def test_arguments_are_named_as_in_the_call():
    assert named((1, "states", 0)) == "argument 'states'[0]"
