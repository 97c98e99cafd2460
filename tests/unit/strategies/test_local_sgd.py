"""The weights that local_sgd holds: no copy too many, and what becomes of those of other ranks and hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fabricx.distributed.world import World
from fabricx.strategies import LocalSGD


def copies(strategy: LocalSGD, module: nn.Module) -> float:
    """Return the bytes of the strategy's tensors, in units of the weights."""
    found = {}
    for fragment in strategy._fragments:
        for tensor in (fragment.base, fragment.velocity, fragment.moved):
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values()) / sum(parameter.nbytes for parameter in module.parameters())


@pytest.mark.parametrize(("outer", "kept"), [("average", 1), ("nesterov", 2)])
def test_between_meetings_it_holds_no_copy_that_it_does_not_need(outer: str, kept: int) -> None:
    module = nn.Linear(100, 100)
    strategy = LocalSGD(every=4, outer=outer, fragments=1, overlap_steps=2)  # type: ignore[arg-type]
    strategy.world = World()
    strategy.setup(module)
    held = []
    for step in range(1, 9):
        with torch.no_grad():
            module.weight.add_(1.0)
        strategy.after_update(step)
        held.append(copies(strategy, module))
    assert held == [kept] * 3 + [kept + 1] * 2 + [kept] * 2 + [kept + 1]  # one more while a meeting is under way


def test_a_round_of_one_rank_ends_where_two_go_on() -> None:
    module = nn.Linear(2, 2)
    strategy = LocalSGD(every=4, overlap_steps=2)
    strategy.setup(module)
    for step in range(1, 6):  # a meeting is under way
        with torch.no_grad():
            module.weight.add_(1.0)
        strategy.after_update(step)
    moved, state = module.weight.detach().clone(), strategy.local_state_dict(module, [])
    strategy.world = World(size=2)
    strategy.load_local_states([state], module, [], own=False)
    strategy.after_update(6)  # on which that meeting would have ended, with half of what the rank has moved
    assert torch.equal(module.weight, moved)


class AheadOfItsPeer(World):
    """Rank 0 of two, of which the other's numbers are greater by 2."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=2)

    def all_reduce(self, tensor: Any, op: Any = "sum") -> Any:
        return tensor + tensor + 2.0


def test_what_hooks_change_of_the_mean_of_all_ranks_is_kept_and_the_rest_is_each_rank_s_own() -> None:
    module = nn.Linear(3, 1, bias=False)
    strategy = LocalSGD(every=4)
    strategy.world = World()
    strategy.setup(module)
    strategy.world = AheadOfItsPeer()
    for go_on in (strategy.wrap_step(lambda: None), strategy.backward_without_data):  # with a sample, and without
        with torch.no_grad():
            module.weight.copy_(torch.tensor([[1.0, 2.0, 3.0]]))
        strategy.after_update(1)
        strategy.synchronize()
        assert module.weight.tolist() == [[2.0, 3.0, 4.0]]
        module.weight.data[0, 1] = 9.0
        go_on()
        assert module.weight.tolist() == [[1.0, 9.0, 3.0]]
