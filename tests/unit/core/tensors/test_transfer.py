"""Nested batches: device, dtype, size."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fabricx.core.tensors.transfer import batch_size_of, cpu, to_device, to_dtype, with_own_move

META = torch.device("meta")
Pair = namedtuple("Pair", "inputs targets")


@dataclass
class Sample:
    name: str
    image: torch.Tensor


class InPlace:
    """`to` moves the object in place and returns None, as some graph batches do."""

    device: Any = None

    def to(self, device: torch.device) -> None:
        self.device = device


def test_tensors_at_any_depth_are_moved_and_the_nesting_is_kept() -> None:
    in_place = InPlace()
    moved = to_device({"a": [torch.zeros(2), "text"], "b": Pair(torch.ones(1), 3), "c": in_place}, META)
    assert moved["a"][0].device == moved["b"].inputs.device == in_place.device == META
    assert (moved["a"][1], moved["b"].targets, moved["c"]) == ("text", 3, in_place)
    assert type(moved["b"]) is Pair


def test_on_a_cpu_only_objects_with_a_custom_to_method_are_moved() -> None:
    in_place, plain = InPlace(), {"x": torch.zeros(2), "name": "a"}
    assert with_own_move(plain) is plain
    assert with_own_move(in_place) is in_place
    assert in_place.device == torch.device("cpu")
    moved = with_own_move(batch := [torch.zeros(1), InPlace()])
    assert moved is not batch
    assert moved[1].device == torch.device("cpu")


def test_only_floating_point_tensors_change_their_dtype() -> None:
    converted = to_dtype([torch.zeros(1), torch.zeros(1, dtype=torch.int64), torch.tensor(True)], torch.bfloat16)
    assert [tensor.dtype for tensor in converted] == [torch.bfloat16, torch.int64, torch.bool]


def test_outputs_have_no_graph() -> None:
    assert not cpu({"loss": torch.zeros((), requires_grad=True) * 2})["loss"].requires_grad


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(3, 2), 3), ([torch.zeros(2), torch.zeros(5)], 2), ({"name": "abc", "x": torch.zeros(4)}, 4),
        (Pair("abc", torch.zeros(6)), 6), (Sample("a", torch.zeros(7, 1)), 7), (torch.tensor(1.0), 1),
        (["a", "b"], 1), ([[], {"x": [torch.zeros(2, 9)]}], 2), (None, 1),
    ],
)  # fmt: skip
def test_the_batch_size_is_the_size_of_its_first_tensor(batch: Any, size: int) -> None:
    assert batch_size_of(batch) == size
