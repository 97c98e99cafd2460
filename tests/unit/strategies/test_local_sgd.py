"""Copies of weights held by local_sgd, and the weights of other ranks and of hooks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fabricx.distributed.sharding import fragments
from fabricx.distributed.world import World
from fabricx.fault_tolerance.memory_checkpoint import bytes_of
from fabricx.strategies import LocalSGD, local_sgd


def copies(strategy: LocalSGD, module: nn.Module) -> float:
    """Return the bytes of the strategy's tensors, in units of the weights."""
    storages = {}
    for fragment in strategy._fragments:
        for tensor in (fragment.base, fragment.velocity, fragment.moved):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values()) / sum(parameter.nbytes for parameter in module.parameters())


@pytest.mark.parametrize(("outer", "kept"), [("average", 1), ("nesterov", 2)])
def test_between_synchronizations_it_holds_no_unneeded_copy(outer: str, kept: int) -> None:
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
    assert held == [kept] * 3 + [kept + 1] * 2 + [kept] * 2 + [kept + 1]  # an additional copy during a synchronization


def test_a_round_of_a_single_rank_ends_where_two_ranks_continue() -> None:
    module = nn.Linear(2, 2)
    strategy = LocalSGD(every=4, overlap_steps=2)
    strategy.setup(module)
    for step in range(1, 6):  # a synchronization is in progress
        with torch.no_grad():
            module.weight.add_(1.0)
        strategy.after_update(step)
    moved, state = module.weight.detach().clone(), strategy.local_state_dict(module, [])
    strategy.world = World(size=2)
    strategy.load_local_states([state], module, [], own=False)
    strategy.after_update(6)  # the end of that synchronization, with half of the rank's movement
    assert torch.equal(module.weight, moved)


def test_other_ranks_than_before_begin_with_the_errors_of_the_former_ranks() -> None:
    module = nn.Linear(2, 2, bias=False)
    strategy = LocalSGD(every=4, compression="int8")
    strategy.setup(module)
    before = module.weight.detach().clone()
    states = []
    for rank, error in enumerate((0.25, 0.75)):
        strategy.world = World(rank=rank, size=2)
        codec = strategy._fragments[0].codec
        assert codec is not None
        codec.lost = torch.full((4,), error)
        states.append(strategy.local_state_dict(module, []))
    strategy.world = World()
    strategy.load_local_states(states, module, [], own=False)
    torch.testing.assert_close(module.weight.detach(), before - 0.5)
    assert codec.lost.numel() == 0


def test_an_in_memory_checkpoint_has_frozen_parameters_that_ranks_have_changed() -> None:
    def built() -> tuple[nn.Module, LocalSGD]:
        module, strategy = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)]), LocalSGD(every=4)
        strategy.setup(module)
        return module, strategy

    def state(world: World) -> dict[str, Any]:
        module, strategy = built()
        strategy.world = world
        nn.init.constant_(module[1].weight, world.rank + 1.0)  # type: ignore[index]
        return strategy.local_state_dict(module, [])

    module, strategy = built()
    strategy.load_local_states([state(World())], module, [], own=True)
    assert module[1].weight.unique().tolist() == [1.0]  # type: ignore[index]
    assert strategy._frozen_means.changed() == [True, False]  # averaged at the end of the round
    module, strategy = built()
    strategy.load_local_states([state(World(rank, 2)) for rank in range(2)], module, [], own=False)
    assert module[1].weight.unique().tolist() == [1.5]  # type: ignore[index]


def test_a_save_after_a_round_adds_errors_to_the_weights_that_a_hook_has_changed() -> None:
    """Regression: the weights were those of the round, without the changes of the hook."""
    module = nn.Linear(2, 2, bias=False)
    strategy = LocalSGD(every=4, compression="int8")
    strategy.setup(module)
    codec = strategy._fragments[0].codec
    assert codec is not None
    codec.lost = torch.full((4,), 0.25)
    nn.init.constant_(module.weight, 3.0)
    strategy.state_dict(module, [])
    assert torch.allclose(module.weight, torch.full((2, 2), 2.75))


@pytest.mark.filterwarnings("ignore:for .*is a no-op")
def test_errors_in_a_checkpoint_come_back_to_the_device_of_the_weights() -> None:
    module, other = nn.Linear(2, 2), nn.Linear(2, 2, device="meta")
    strategy = LocalSGD(every=4, compression="int8")
    strategy.setup(module)
    codec = strategy._fragments[0].codec
    assert codec is not None
    codec.lost = torch.ones(6)
    state = strategy.local_state_dict(module, [])
    strategy.setup(other)
    strategy.load_local_states([state], other, [], own=True)
    codec = strategy._fragments[0].codec
    assert codec is not None
    assert codec.lost.device.type == "meta"


def test_a_run_of_16_bit_weights_resumes_exactly() -> None:
    def train(module: nn.Module, strategy: LocalSGD, steps: range) -> None:
        for step in steps:
            with torch.no_grad():
                module.weight.sub_(0.01 * step)  # type: ignore[operator]
            strategy.after_update(step)

    def begin() -> tuple[nn.Module, LocalSGD, torch.optim.Optimizer]:
        torch.manual_seed(0)
        module, strategy = nn.Linear(8, 8, dtype=torch.bfloat16), LocalSGD(every=2, outer="nesterov")
        strategy.enter(World(), module)
        strategy.setup(module)
        return module, strategy, torch.optim.SGD(module.parameters())

    module, strategy, optimizer = begin()
    train(module, strategy, range(1, 5))
    state = copy.deepcopy(strategy.state_dict(module, [optimizer]))
    train(module, strategy, range(5, 9))
    resumed, strategy, optimizer = begin()
    strategy.load_state_dict(state, resumed, [optimizer])
    train(resumed, strategy, range(5, 9))
    assert torch.equal(resumed.weight, module.weight)  # type: ignore[arg-type]


class AheadOfItsPeer(World):
    """Rank 0 of two; numbers of the second rank are greater by 2."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=2)

    def all_reduce(self, tensor: Any, op: Any = "sum") -> Any:
        return tensor + tensor + 2.0


def test_changes_of_hooks_to_averaged_weights_are_kept_and_other_weights_stay_local() -> None:
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


def test_a_checkpoint_ends_a_round_with_the_mean_of_weights_changed_by_hooks() -> None:
    module, strategy = nn.Linear(3, 1, bias=False), LocalSGD(every=4, outer="nesterov")
    strategy.world = World()
    strategy.setup(module)
    module.weight.data[0, 1] = 9.0
    strategy.world = AheadOfItsPeer()  # of which a hook has set the element to 11
    strategy.state_dict(module, [])
    assert module.weight[0, 1].item() == 10.0
    [fragment] = strategy._fragments
    assert torch.equal(fragment.base, module.weight.detach().reshape(-1))  # as in a run that resumes


def test_copies_for_a_validation_are_freed_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragments, "_BLOCK", 12)
    held: list[int] = []

    def flat(fragment: Any) -> torch.Tensor:
        held.append(sum(other.local is not None for other in strategy._fragments))
        return real(fragment)  # type: ignore[no-any-return]

    module = nn.Sequential(*[nn.Linear(4, 3, bias=False) for _ in range(5)])
    strategy = LocalSGD(every=4, outer="nesterov")
    strategy.setup(module)
    velocities = strategy._velocities()
    real = fragments.Fragment.flat
    for restored in (strategy.wrap_step(lambda: None), lambda: strategy.synchronize(ends=True)):
        strategy.after_update(1)
        strategy.synchronize()
        assert all(fragment.local is not None for fragment in strategy._fragments)
        with monkeypatch.context() as patch:
            patch.setattr(fragments.Fragment, "flat", flat)
            restored()
    assert [count for number, count in enumerate(held) if count != held[number - 1]] == 2 * [4, 3, 2, 1, 0]
    saved = strategy.state_dict(module, [torch.optim.SGD(module.parameters())])["outer"]
    assert {name: value.data_ptr() for name, value in saved.items()} == {  # no copies
        name: value.data_ptr() for name, value in velocities.items()
    }


def test_a_large_fragment_is_combined_in_blocks_that_a_checkpoint_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    states, weights = [], []
    for block in (1 << 20, 12):
        monkeypatch.setattr(fragments, "_BLOCK", block)
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5), nn.Linear(5, 2))
        strategy = LocalSGD(every=2, outer="nesterov", fragments=2)
        strategy.setup(module)
        for step in range(1, 5):
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(1.1)
            strategy.after_update(step)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        states.append(strategy.state_dict(module, [optimizer]))
        weights.append([parameter.detach().clone() for parameter in module.parameters()])
        assert len(strategy._fragments) == (2 if block > 12 else 5)
        strategy.load_state_dict(states[0], module, [optimizer])
        again = strategy.state_dict(module, [optimizer])
        assert all(torch.equal(again["outer"][number], velocity) for number, velocity in states[0]["outer"].items())
    assert states[0]["outer"].keys() == {name for name, _ in module.named_parameters()}
    for number, velocity in states[0]["outer"].items():
        assert torch.equal(states[1]["outer"][number], velocity)
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_outer_momentum_loads_with_other_fragments_and_from_earlier_checkpoints() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5), nn.Linear(5, 2))
    optimizers = [torch.optim.SGD(module.parameters())]
    strategy = LocalSGD(every=4, outer="nesterov", fragments=2)
    strategy.setup(module)
    for value in strategy._velocities().values():
        value.copy_(torch.randn_like(value))
    saved = copy.deepcopy(strategy.state_dict(module, optimizers))
    by_number = {  # in the format of earlier versions
        str(number): torch.cat([f.velocity for f in strategy._fragments if f.number == number]).clone()
        for number in (0, 1)
    }
    for count, outer in ((1, saved["outer"]), (3, saved["outer"]), (2, by_number)):
        other = LocalSGD(every=4, outer="nesterov", fragments=count)
        other.setup(module)
        other.load_state_dict({**saved, "outer": outer}, module, optimizers)
        assert all(torch.equal(value, saved["outer"][name]) for name, value in other._velocities().items())


def test_an_in_memory_checkpoint_has_a_share_of_replicated_state() -> None:
    module = nn.Linear(3, 3, bias=False)  # 9 weights, of 3 ranks
    strategy = LocalSGD(every=4, outer="nesterov")
    strategy.setup(module)
    base, start = torch.arange(9.0), module.weight.detach().clone()
    [fragment] = strategy._fragments
    fragment.base.copy_(base)
    fragment.velocity.copy_(-base)
    states = []
    for rank in range(3):
        strategy.world = World(rank=rank, size=3)
        states.append(copy.deepcopy(strategy.local_state_dict(module, [])))
        assert bytes_of(states[-1]) == 4 * (9 + 3 + 3)
    fragment.base.zero_()
    fragment.velocity.zero_()
    strategy.world = World(size=2)
    strategy.load_local_states(states, module, [], own=False)
    assert torch.allclose(
        module.weight.flatten(), base - 0.7 * 1.9 * (base - start.flatten()) + 0.567 * base, atol=1e-5
    )


def test_moments_of_other_ranks_are_averaged_also_of_scalar_parameters() -> None:
    def state(value: float) -> Any:
        moments = {"exp_avg": torch.tensor(value), "step": torch.tensor(value)}
        return [{"state": {"a/b": moments, "wide": {**moments, "exp_avg": torch.full((2,), value)}}, "lr": value}]

    mean = local_sgd._mean([state(1.0), state(4.0)], {"a%2Fb"})[0]
    assert {name: value.tolist() for name, value in mean["state"]["a/b"].items()} == {"exp_avg": 2.5, "step": 4.0}
    assert {name: value.tolist() for name, value in mean["state"]["wide"].items()} == {"exp_avg": [2.5] * 2, "step": 4}
    assert mean["lr"] == 1.0


def test_a_parameter_stepped_by_some_ranks_has_the_mean_of_these_ranks() -> None:
    def state(value: float, steps: int) -> Any:
        return {"exp_avg": torch.full((2,), value), "step": steps}

    ranks = [{"a": state(1.0, 2), "c": {}}, {"a": state(3.0, 5), "b": state(4.0, 3)}, {"b": state(6.0, 1), "a": {}}]
    [mean] = local_sgd._mean([[{"state": parameters}] for parameters in ranks], set())
    values = {
        name: {key: torch.as_tensor(value).tolist() for key, value in entry.items()}
        for name, entry in mean["state"].items()
    }
    assert values == {"a": {"exp_avg": [2.0, 2.0], "step": 5}, "c": {}, "b": {"exp_avg": [5.0, 5.0], "step": 3}}
