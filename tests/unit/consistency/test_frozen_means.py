"""Only frozen parameters that user code changes are averaged over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fabricx.consistency.frozen_means import FrozenMeans


class UnchangedRank:
    """A world whose second rank has not changed its elements: all are 0.5."""

    size, device = 2, torch.device("cpu")

    def __init__(self) -> None:
        self.sums = 0

    def all_reduce(self, tensor: Tensor, operation: str = "sum") -> Tensor:
        if operation == "max":
            return tensor
        self.sums += 1
        return tensor.add_(0.5)


def frozen(*values: float) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((3,), value), requires_grad=False) for value in values]


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.mul_(3.0),
        lambda weight: weight.data.mul_(3.0),  # not detected by torch's version counters
        lambda weight: setattr(weight, "data", weight.data * 3.0),
    ],
)
def test_changed_parameters_are_averaged_after_the_change(change: Any) -> None:
    first, second = frozen(0.5, 0.5)
    means, world = FrozenMeans([first, second]), UnchangedRank()
    means.join(world)  # type: ignore[arg-type]
    assert world.sums == 0
    change(second)
    means.join(world)  # type: ignore[arg-type]
    assert (first.tolist(), second.tolist()) == ([0.5] * 3, [1.0] * 3)
    means.join(world)  # type: ignore[arg-type]
    assert world.sums == 2
    again = FrozenMeans([first, second], means)
    again.join(world)  # type: ignore[arg-type]
    assert world.sums == 3


def test_values_of_a_validation_are_restored_except_changes_of_hooks() -> None:
    [teacher] = frozen(0.5)
    means, world = FrozenMeans([teacher]), UnchangedRank()
    teacher.mul_(3.0)
    means.join(world, read=True, shown=True)  # type: ignore[arg-type]
    assert teacher.tolist() == [1.0] * 3
    teacher[1] = 9.0
    means.restore()
    assert teacher.tolist() == [1.5, 9.0, 1.5]
    means.restore()
    assert teacher.tolist() == [1.5, 9.0, 1.5]


def test_a_single_rank_and_a_module_without_frozen_parameters_communicate_nothing() -> None:
    alone = UnchangedRank()
    alone.size = 1
    [teacher] = frozen(0.5)
    means = FrozenMeans([teacher])
    teacher.mul_(3.0)
    means.join(alone)  # type: ignore[arg-type]
    FrozenMeans(()).join(UnchangedRank())  # type: ignore[arg-type]
    assert teacher.tolist() == [1.5] * 3
