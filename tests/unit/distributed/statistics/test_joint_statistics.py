"""Joint statistics of ranks are equal to the statistics of a single process with all steps."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from fabricx.distributed.statistics.joint_statistics import JointStatistics, Share, joint
from fabricx.distributed.world import World


def by_hand(start: nn.BatchNorm1d, steps: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
    """Return mean and variance of a process that has each step's samples of all ranks in a batch."""
    layer = copy.deepcopy(start)
    for parts in steps:
        layer(torch.cat(parts))
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return layer.running_mean, layer.running_var


def normalised(momentum: float | None) -> nn.BatchNorm1d:
    layer = nn.BatchNorm1d(3, momentum=momentum, dtype=torch.float64)
    layer(torch.randn(7, 3, dtype=torch.float64) * 2 + 1)
    return layer


def state_of(layer: nn.BatchNorm1d, start: nn.BatchNorm1d, parts: list[Tensor]) -> dict[str, object]:
    local = copy.deepcopy(start)
    statistics = JointStatistics(local)
    for part in parts:
        local(part)
    return statistics.state_dict()


@pytest.mark.parametrize("momentum", [0.1, 0.7, 1.0, None])
def test_a_step_of_uneven_ranks_has_the_statistics_of_all_samples(momentum: float | None) -> None:
    torch.manual_seed(1)
    start = normalised(momentum)
    # The ranks have 2, 5 and 9 samples, around different means; the last rank may have none.
    parts = [torch.randn(n, 3, dtype=torch.float64) * (1 + n) + 4 * n for n in (2, 5, 9)]
    for some in (parts, parts[:2]):
        states = [state_of(start, start, [part]) for part in some] + [state_of(start, start, [])] * (3 - len(some))
        combined = copy.deepcopy(start)
        statistics = JointStatistics(combined)
        statistics.load_states(states, own=False)
        mean, variance = by_hand(start, [some])
        assert torch.allclose(combined.running_mean, mean, rtol=1e-12)
        assert torch.allclose(combined.running_var, variance, rtol=1e-12)
        assert int(combined.num_batches_tracked) == 2
        joined = statistics.state_dict()
        assert joined[""]["elements"] == 0  # the start of the next step
        assert torch.equal(joined[""]["start"][0], combined.running_mean)


def test_joint_variance_includes_differences_between_ranks() -> None:
    torch.manual_seed(1)
    start = normalised(0.1)
    steps = [[torch.randn(400, 3, dtype=torch.float64) + 10 * rank for rank in range(2)] for _ in range(5)]
    states = [state_of(start, start, [parts[rank] for parts in steps]) for rank in range(2)]
    combined = copy.deepcopy(start)
    JointStatistics(combined).load_states(states, own=False)
    mean, variance = by_hand(start, steps)
    assert torch.allclose(combined.running_mean, mean, rtol=1e-12)
    assert torch.allclose(combined.running_var, variance, rtol=1e-3)  # samples of ranks vary from step to step
    alone = states[0][""]["now"][1]  # type: ignore[index]
    assert float(variance.min() / alone.max()) > 5  # the local statistics of rank 0


def test_the_variance_of_identically_distributed_samples_is_unbiased_over_several_steps() -> None:
    torch.manual_seed(1)
    start = nn.BatchNorm1d(4000, momentum=0.3, affine=False)
    parts = [[torch.randn(n, 4000) for n in (2, 3)] for _ in range(4)]
    states = [state_of(start, start, [step[rank] for step in parts]) for rank in range(2)]
    combined = copy.deepcopy(start)
    JointStatistics(combined).load_states(states, own=False)
    assert float(combined.running_var.mean()) == pytest.approx(1.0, abs=0.02)  # 4000 channels; without correction 1.15


def test_a_restored_rank_continues_from_the_common_statistics() -> None:
    torch.manual_seed(1)
    start = normalised(0.1)
    local = copy.deepcopy(start)
    statistics = JointStatistics(local)
    part, other = torch.randn(2, 5, 3, dtype=torch.float64)
    local(part)
    saved, weights = copy.deepcopy(statistics.state_dict()), copy.deepcopy(local.state_dict())
    local(part)
    statistics.remember()
    local.load_state_dict(weights)
    statistics.load_states([saved], own=True)
    statistics.load_states([statistics.state_dict(), state_of(start, start, [other])], own=False)
    assert torch.allclose(local.running_var, by_hand(start, [[part, other]])[1], rtol=1e-12)
    statistics.close()
    local(part)
    assert statistics.state_dict()[""]["elements"] == 0


class Pair(World):
    """Two ranks; the answers of the second rank are fixed."""

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, self.answers.pop(0)]

    answers: ClassVar[list[Any]] = []


def test_statistics_of_the_start_of_a_window_are_joined_with_their_earlier_values() -> None:
    torch.manual_seed(1)
    start = normalised(0.1)
    local = copy.deepcopy(start)
    statistics = JointStatistics(local)
    first, second = torch.randn(2, 2, 5, 3, dtype=torch.float64)
    local(first[0])
    kept = {name: buffer.clone() for name, buffer in local.named_buffers()}
    local(second[0])
    Pair.answers = [state_of(start, start, [first[1]]), state_of(start, start, [first[1], second[1]])]
    statistics.join(Pair(), kept)
    mean, variance = by_hand(start, [[first[0], first[1]]])
    assert torch.allclose(kept["running_mean"], mean, rtol=1e-12)
    assert torch.allclose(kept["running_var"], variance, rtol=1e-12)
    assert int(kept["num_batches_tracked"]) == 2
    assert torch.allclose(local.running_mean, by_hand(start, [[*first], [*second]])[0], rtol=1e-12)
    assert int(local.num_batches_tracked) == 3
    Pair.answers = [statistics.state_dict()]
    statistics.join(Pair(), {"other": torch.zeros(1)})  # statistics that are not saved have no copies


def test_averages_for_a_validation_are_not_the_start_of_the_next_batches() -> None:
    layer = normalised(0.1)
    statistics = JointStatistics(layer)
    start = statistics.state_dict()[""]["start"]
    with torch.no_grad():
        layer.running_var.mul_(0.5)  # type: ignore[union-attr]
    Pair.answers = [statistics.state_dict()]
    statistics.join(Pair())
    assert all(torch.equal(a, b) for a, b in zip(statistics.state_dict()[""]["start"][:2], start[:2], strict=True))


def test_equal_statistics_are_unchanged_and_batches_are_the_weights_without_counts() -> None:
    mean, variance = torch.tensor([2.0]), torch.tensor([3.0])
    zero = torch.zeros(1), torch.ones(1)
    same = joint(zero, 0, [Share(mean, variance, 1, 4), Share(mean.clone(), variance.clone(), 1, 8)], 0.1)
    assert same == (mean, variance)
    combined = joint(zero, 0, [Share(mean, variance, 1), Share(2 * mean, variance, 3)], None)
    assert float(combined[0]) == pytest.approx(3.5)
    assert float(combined[1]) == pytest.approx(3.0 + 0.25 * 1.5**2 + 0.75 * 0.5**2)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_an_instance_normalisation_has_the_statistics_of_all_instances(momentum: float | None) -> None:
    """Its counter of batches never changes."""
    torch.manual_seed(1)
    start: Any = nn.InstanceNorm1d(3, momentum=momentum, track_running_stats=True, dtype=torch.float64)  # type: ignore[arg-type]
    steps = [[torch.randn(n, 3, 5, dtype=torch.float64) * n + 4 * n for n in (1, 3)] for _ in range(2)]
    wanted, combined = copy.deepcopy(start), copy.deepcopy(start)
    for parts in steps:
        wanted(torch.cat(parts))
    states = [state_of(start, start, [parts[rank] for parts in steps]) for rank in range(2)]
    JointStatistics(combined).load_states(states, own=False)
    assert torch.allclose(combined.running_mean, wanted.running_mean, rtol=1e-12)
    assert torch.allclose(combined.running_var, wanted.running_var, rtol=1e-12)
