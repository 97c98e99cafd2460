"""The policy of shares on simulated traces: no process, no clock, and seeded noise."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

import fabricx as fx
from fabricx.callbacks import LoadBalancer, load_balancer
from fabricx.callbacks.balancing_policy import Measurement, SharePolicy, share_batch
from fabricx.testing import QUIET, Ledger, layered_data
from tests.cases import check_each, product

Speeds = Callable[[int], Sequence[float]]


def test_all_samples_are_assigned_and_each_rank_has_at_least_1() -> None:
    check_each(_all_samples_are_given_and_each_rank_has_one, product(seed=range(200)))


def _all_samples_are_given_and_each_rank_has_one(seed: int) -> None:
    rng = random.Random(seed)
    speeds = [10.0 ** rng.uniform(-2, 2) for _ in range(rng.randint(1, 8))]
    shares = share_batch(speeds, samples := rng.randint(8, 500))
    assert sum(shares) == samples
    assert min(shares) >= 1
    longest = max(share / speed for share, speed in zip(shares, speeds, strict=True))
    longest_rank = [share / speed for share, speed in zip(shares, speeds, strict=True)].index(longest)
    for to, speed in enumerate(speeds):  # moving a sample from the slowest rank would not help
        assert to == longest_rank or shares[longest_rank] == 1 or (shares[to] + 1) / speed >= longest


def test_limits_of_shares_are_respected() -> None:
    check_each(_limits_are_kept, product(seed=range(100)))


def _limits_are_kept(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.randint(2, 6)
    least, most = [rng.randint(1, 9) for _ in range(ranks)], [rng.randint(10, 40) for _ in range(ranks)]
    samples = (sum(least) + sum(most)) // 2
    shares = share_batch([rng.uniform(0.1, 10.0) for _ in range(ranks)], samples, least, most)
    assert sum(shares) == samples
    assert all(low <= share <= high for low, share, high in zip(least, shares, most, strict=True))


@pytest.mark.parametrize(
    ("speeds", "samples"), [([1.0, 0.0], 8), ([1.0, float("inf")], 8), ([1.0, float("nan")], 8), ([1.0, 1.0], 1)]
)
def test_a_global_batch_that_can_t_be_divided_is_an_error(speeds: list[float], samples: int) -> None:
    with pytest.raises(ValueError, match=r"speeds|divided"):
        share_batch(speeds, samples)


def trace(
    speeds: Speeds, samples: int, noise: float, windows: int = 60, seed: int = 0
) -> list[tuple[float, list[int]]]:
    """Run the policy over windows of ten steps; return, by window, step time over ideal time, and the shares."""
    rng, ranks = random.Random(seed), len(speeds(0))
    policy, ratios = SharePolicy(samples, share_batch([1.0] * ranks, samples)), []
    for window in range(windows):
        now = speeds(window)
        steps = [
            [share / v * rng.lognormvariate(0.0, noise) for share, v in zip(policy.shares, now, strict=True)]
            for _ in range(10)
        ]
        ratios.append(
            (max(share / v for share, v in zip(policy.shares, now, strict=True)) * sum(now) / samples, policy.shares)
        )
        step_s = statistics.median(max(times) for times in steps)
        policy.decide(
            [
                measure(share, times, step_s)
                for share, times in zip(policy.shares, zip(*steps, strict=True), strict=True)
            ]
        )
    return ratios


def measure(share: int, times: Sequence[float], step_s: float) -> Measurement:
    speeds = [share / seconds for seconds in times]
    middle = statistics.median(speeds)
    off = statistics.median(abs(speed - middle) for speed in speeds)
    return Measurement(middle, 1.25 * 1.48 * off / middle / len(speeds) ** 0.5, step_s)


WAYS = [([2.0, 1.0], 64), ([4.0, 1.0], 64), ([3.0, 3.0, 1.0], 48), ([4.0, 4.0, 4.0, 1.0], 64), ([8.0, 1.0], 32)]


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize(("speeds", "samples"), WAYS)
def test_shares_converge_within_three_decisions(speeds: list[float], samples: int, noise: float) -> None:
    for seed in range(10):
        ratios = trace(lambda window: speeds, samples, noise, seed=seed)
        assert ratios[3 if not noise else 4][0] < (
            1.2 if noise else 1.03
        )  # noise of the first windows is smoothed later
        assert statistics.mean(ratio for ratio, _ in ratios[5:]) < 1.04


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_shares_follow_a_rank_that_becomes_slow_and_fast_again(noise: float) -> None:
    def speeds(window: int) -> list[float]:
        return [1.0, 1.0, 0.25 if 20 <= window < 40 else 1.0]

    for seed in range(10):
        ratios = trace(speeds, 48, noise, seed=seed)
        assert ratios[23][0] < 1.13
        assert ratios[43][0] < 1.13


def test_noise_changes_no_share() -> None:
    for seed in range(20):
        ratios = trace(lambda window: [1.0, 1.0, 1.0, 1.0], 64, 0.1, seed=seed)
        assert {tuple(shares) for _, shares in ratios} == {(16, 16, 16, 16)}


def test_no_share_changes_by_more_than_the_limit() -> None:
    shares = [shares for _, shares in trace(lambda window: [50.0, 1.0], 1000, 0.0)]
    for before, after in itertools.pairwise(shares):
        assert all(a >= b // 2 and a - b <= max(b, 500) // 2 + 1 for b, a in zip(before, after, strict=True))
    assert shares[-1][1] <= 21


def test_a_change_without_a_gain_is_undone_and_tried_less_and_less_often() -> None:
    policy, tried = SharePolicy(64, [32, 32]), []
    for window in range(60):  # the duration of steps does not depend on the shares
        before = policy.shares
        policy.decide([Measurement(2.0, 0.01, 1.0), Measurement(1.0, 0.01, 1.0)])
        if policy.shares != before and before == [32, 32]:
            tried.append(window)
    assert tried == [0, 3, 7, 13, 23, 41, 59]  # pauses of 1, 2, 4 ... 16 windows, plus two windows for each trial


def test_shares_of_ranks_on_the_same_core_stay_stable() -> None:
    """Ranks 1 and 2 share a core, so that the time of each includes the time of both: their speeds are coupled."""
    policy = SharePolicy(192, [64, 64, 64])
    for _ in range(60):
        first, *both = policy.shares
        times = [float(first), float(sum(both)), float(sum(both))]
        policy.decide([Measurement(n / s, 0.01, max(times)) for n, s in zip(policy.shares, times, strict=True)])
    assert abs(policy.shares[0] - 96) <= 2
    assert 1.3 < policy.gain < 1.36


@pytest.mark.parametrize("per_sample", [0.3, 0.6, 1.0])
@pytest.mark.parametrize("per_sample_of_next", [0.5, 1.0, 2.0])
def test_steps_are_not_longer_if_ranks_slow_each_other_down(per_sample: float, per_sample_of_next: float) -> None:
    """The load of the next rank slows a rank down, so that a smaller share does not help in proportion."""

    def times(shares: Sequence[int]) -> list[float]:
        return [
            per_sample * share + per_sample_of_next * shares[(rank + 1) % 3] * rank for rank, share in enumerate(shares)
        ]

    policy, steps = SharePolicy(192, [64, 64, 64]), []
    for _ in range(100):
        seconds = times(policy.shares)
        steps.append(max(seconds))
        policy.decide([Measurement(n / s, 0.01, max(seconds)) for n, s in zip(policy.shares, seconds, strict=True)])
    assert statistics.mean(steps[20:]) < 1.05 * steps[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shares": [0.5, 0.4]}, "sum to 0.9"),
        ({"shares": [1.5, -0.5]}, "more than 0"),
        ({"shares": [1.0, float("nan")]}, "sum to nan"),
        ({"shares": "round_robbin"}, "round_robin"),
        ({"every_n_steps": 0}, "1 or more"),
        ({"max_batch_size": 0}, "1 or more"),
    ],
)
def test_wrong_arguments_are_errors(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoadBalancer(**options)  # type: ignore[arg-type]


class Manual(Ledger):
    def __init__(self) -> None:
        super().__init__(8, 4)
        self.automatic_optimization = False


WRONG = [
    ({"strategy": "reproducible"}, {}, {}, "equal shares"),
    ({"strategy": "local_sgd"}, {}, {}, "equal shares"),
    ({}, {"batch_sampler": [[0, 1], [2, 3]]}, {}, "can't be divided"),
    ({"use_distributed_sampler": False}, {"batch_size": 4}, {}, "can't be divided"),
    ({"devices": 3}, {"batch_size": 4}, {"shares": [0.5, 0.5]}, "2 shares for 3 ranks"),
]


@pytest.mark.parametrize(("trainer", "loader", "options", "message"), WRONG)
def test_options_that_don_t_fit_are_refused_before_a_process_starts(
    trainer: dict[str, object], loader: dict[str, object], options: dict[str, object], message: str
) -> None:  # fmt: skip
    balancer = LoadBalancer(**options)  # type: ignore[arg-type]
    made: object = fx.Trainer(**{**QUIET, "devices": 2, "max_epochs": 1, **trainer}, callbacks=[balancer])  # type: ignore[arg-type]
    data = torch.utils.data.DataLoader(layered_data(8), **loader)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        made.fit(Ledger(8, 4), data)  # type: ignore[attr-defined]


def test_manual_optimization_and_iterable_data_sets_are_refused() -> None:
    for module, data, message in ((Manual(), torch.utils.data.DataLoader(layered_data(8)), "manual"),
                                  (Ledger(8, 4), [torch.zeros(2)], "can't be divided")):  # fmt: skip
        trainer = fx.Trainer(**{**QUIET, "devices": 2, "max_epochs": 1}, callbacks=[LoadBalancer()])
        with pytest.raises(ValueError, match=message):
            trainer.fit(module, data)


def test_batch_normalisation_is_a_warning() -> None:
    class Normed(Ledger):
        def __init__(self) -> None:
            super().__init__(8, 4)
            self.normed = nn.BatchNorm1d(6)

    trainer = fx.Trainer(**{**QUIET, "max_epochs": 1}, callbacks=[LoadBalancer(max_batch_size=2)])
    data = torch.utils.data.TensorDataset(*layered_data(8).tensors, torch.arange(8))
    with pytest.warns(UserWarning, match="batch normalisation"):
        trainer.fit(Normed(), torch.utils.data.DataLoader(data, 4))


class Event:
    """A moment of a device's time, as torch's events are."""

    def __init__(self, milliseconds: float) -> None:
        self.milliseconds = milliseconds

    def elapsed_time(self, other: Event) -> float:
        return other.milliseconds - self.milliseconds

    def query(self) -> bool:
        return self.milliseconds < 50.0


def test_the_work_of_a_device_is_its_time_without_pauses() -> None:
    pauses = ((Event(10.0), Event(14.0)), (Event(20.0), Event(21.0)))
    computed = load_balancer._Computed(Event(1.0), Event(41.0), pauses)
    assert computed.is_over()
    assert computed.seconds() == pytest.approx(0.035)
    assert not load_balancer._Computed(Event(1.0), Event(51.0)).is_over()
