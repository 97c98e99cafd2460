"""The division of a checkpoint's tensors among many ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fabricx.checkpoint import sharded_tensors
from fabricx.distributed.world import World


class Replicas(World):
    """A rank of a world with replicated tensors; counts the plans that are sent."""

    sent = 0

    def all_gather(self, tensor: Tensor, sync_grads: bool = False) -> Tensor:
        return tensor.expand(self.size, *tensor.shape)

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        type(self).sent += 1
        return obj if self.rank == src else SENT[0]


SENT: list[Any] = []


def tensors(count: int = 70) -> dict[str, Tensor]:
    return {f"layer.{number}": torch.full((3,), float(number)) for number in range(count)}


def test_replicas_divide_the_tensors_and_each_tensor_is_written_once() -> None:
    parts = [sharded_tensors.plan(tensors(), Replicas(size=1000))]
    SENT[:] = [[sharded_tensors._entry(item) for item in _local(tensors())]]
    parts += [sharded_tensors.plan(tensors(), Replicas(rank, size=1000)) for rank in (1, 63, 64, 999)]
    files = {chunk["file"] for entry in parts[0].index.values() for chunk in entry["chunks"]}
    assert files == {f"rank-{rank:05}.safetensors" for rank in range(sharded_tensors.WRITERS)}
    assert all(len(entry["chunks"]) == 1 for entry in parts[0].index.values())
    assert all(part.index == parts[0].index for part in parts)
    assert [bool(part.tensors) for part in parts] == [True, True, True, False, False]


def _local(state: dict[str, Tensor]) -> Any:
    planner = sharded_tensors.DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(state, is_coordinator=False)
    return planner.create_local_plan().items


def test_a_plan_and_its_memory_are_kept_until_the_layout_changes() -> None:
    Replicas.sent, world = 0, Replicas(size=8)
    first = sharded_tensors.plan(tensors(), world)
    held = {name: copy.data_ptr() for name, copy in first.tensors.items()}
    second = sharded_tensors.plan({name: 2 * value for name, value in tensors().items()}, world, first)
    assert Replicas.sent == 1
    assert {name: copy.data_ptr() for name, copy in second.tensors.items()} == held
    assert all(torch.equal(copy, 2 * tensors()[name]) for name, copy in second.tensors.items())
    third = sharded_tensors.plan(tensors(71), world, second)
    assert (Replicas.sent, len(third.index)) == (2, 71)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2).to(torch.float8_e4m3fnuz), torch.zeros(2).to(torch.float8_e8m0fnu), torch.eye(2).to_sparse()],
)
def test_a_tensor_that_a_file_can_not_hold_is_named(tensor: Tensor) -> None:
    with pytest.raises(ValueError, match=r"can't hold module/scale with (dtype torch\.|layout)"):
        sharded_tensors.plan({"module/scale": tensor}, World())
