"""A collective that other ranks would not join is an error instead of a hang."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as _funcol
from torch.distributed import distributed_c10d as _c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from fabricx.distributed.collective_guard import RefuseCollectives, together, without_sample
from fabricx.errors import RanksApart


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    """Join a process group of two ranks whose collectives return immediately."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def _process_group(group: Any) -> Any:
    """Return a group that was created before ranks diverged."""
    default: Any = _c10d._get_default_group()
    return group or _c10d._resolve_process_group(default.group_name)


REFUSED = RefuseCollectives("ranks are apart, call it later")
COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(1), group=group),
    "barrier": lambda group: dist.barrier(group=group),
    "broadcast": lambda group: dist.broadcast(torch.ones(1), 0, group=group),
    "functional": lambda group: _funcol.wait_tensor(
        _funcol.all_reduce(torch.ones(1), "sum", group or dist.group.WORLD)
    ),
    "method": lambda group: _process_group(group).allreduce([torch.ones(1)]),
    "operator": lambda group: torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_reduce.default(torch.ones(1), "sum", group_name=_process_group(group).group_name)
    ),
    "operator of a group": lambda group: torch.ops.c10d.barrier(
        torch.ones(1), _process_group(group).boxed(), [0], False, -1
    ),
    "all_gather_object": lambda group: dist.all_gather_object([None, None], 1, group=group),
}


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("own_group", [False, True], ids=["default group", "own group"])
def test_each_collective_is_refused_inside_and_allowed_after(name: str, own_group: bool) -> None:
    group = dist.new_group([0, 1]) if own_group else None
    with REFUSED:
        with pytest.raises(RanksApart, match="ranks are apart, call it later"):
            COLLECTIVES[name](group)
        with REFUSED, pytest.raises(RanksApart):
            COLLECTIVES[name](group)
        with pytest.raises(RanksApart):  # not allowed by the inner context
            COLLECTIVES[name](group)
    if name != "all_gather_object":  # a group without peers gathers no objects
        COLLECTIVES[name](group)


def test_calls_without_communication_are_allowed() -> None:
    alone, both = dist.new_group([0]), dist.new_group([0, 1])
    with REFUSED:
        assert (dist.get_rank(), dist.get_world_size(), dist.get_world_size(both)) == (0, 2, 2)
        for name in ("all_reduce", "method", "operator"):
            COLLECTIVES[name](alone)
        assert dist.is_initialized()


def test_collectives_of_all_ranks_are_allowed_inside_until_their_block_ends() -> None:
    for name in ("all_reduce", "method", "operator"):
        with REFUSED:
            with REFUSED, together():
                COLLECTIVES[name](None)
            with pytest.raises(RanksApart):
                COLLECTIVES[name](None)


def test_an_error_in_the_block_leaves_collectives_allowed() -> None:
    with pytest.raises(KeyError), REFUSED:
        raise KeyError
    dist.all_reduce(torch.ones(1))


def test_groups_without_the_absent_ranks_may_call_collectives() -> None:
    alone, both = dist.new_group([0]), dist.new_group([0, 1])
    with without_sample([1]):
        dist.all_reduce(torch.ones(1), group=alone)
        with pytest.raises(RanksApart, match="ranks 1 don't call training_step and the hooks of this batch"):
            dist.all_reduce(torch.ones(1), group=both)
