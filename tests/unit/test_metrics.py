"""Logged values are joined by weight; ranks that disagree are told so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fabricx.errors import RanksDisagree
from fabricx.metrics import Metrics, Series, as_value

CPU = torch.device("cpu")


def series(reduction: Any = "mean", **flags: bool) -> Series:
    given = {"on_step": True, "on_epoch": True, "bar": False, "to_logger": True, "local": False, **flags}
    return Series(reduction, **given)


def alone() -> Metrics:
    return Metrics(lambda values, op: values, lambda obj: [obj], 1, CPU)


def two_ranks(mine: Metrics, others: Sequence[Tensor], gathered: list[Any]) -> Metrics:
    """A metrics object whose reductions meet the given tensors of one other rank."""
    queue = list(others)

    def reduce(values: Tensor, op: str) -> Tensor:
        other = queue.pop(0).to(values.dtype)
        return {"sum": values + other, "max": torch.maximum(values, other), "min": torch.minimum(values, other)}[op]

    mine._reduce, mine._gather, mine._size = reduce, lambda obj: [obj, *gathered], 2
    return mine


@pytest.mark.parametrize(("reduction", "expected"), [("mean", 2.5), ("sum", 4.0), ("max", 3.0), ("min", 1.0)])
def test_an_epoch_adds_up_by_its_reduction(reduction: str, expected: float) -> None:
    metrics = alone()
    metrics.series["x"] = series(reduction)
    metrics.series["x"].add(torch.tensor(1.0), 1, step=1)
    metrics.series["x"].add(torch.tensor(3.0), 3, step=2)
    assert metrics.joined(["x"], epoch=True)["x"].item() == expected


def test_a_step_is_the_weighted_mean_of_its_microbatches() -> None:
    metrics = alone()
    metrics.series["x"] = series()
    metrics.series["x"].add(7.0, 4, step=1)
    metrics.series["x"].add(1.0, 1, step=2)
    metrics.series["x"].add(2.0, 3, step=2)
    assert metrics.joined(["x"], epoch=False)["x"].item() == 1.75


def test_names_are_due_only_in_the_step_that_logged_them() -> None:
    metrics = alone()
    metrics.series["x"] = series()
    metrics.series["x"].add(1.0, 1, step=3)
    assert metrics.due(epoch=False, step=3) == ["x"]
    assert metrics.due(epoch=False, step=4) == []


def test_ranks_that_logged_different_names_are_listed() -> None:
    metrics = alone()
    metrics.series["loss"] = series()
    metrics.series["loss"].add(1.0, 1, step=1)
    metrics = two_ranks(metrics, [torch.tensor([5, -5, 0])], [(False, {"acc": series().kind()})])
    with pytest.raises(RanksDisagree, match=r"rank 0: 'loss'\n  rank 1: 'acc'"):
        metrics.joined(["loss"], epoch=True)


def test_a_rank_without_a_batch_learns_the_names_and_changes_no_value() -> None:
    metrics = alone()
    gathered = [(False, {"loss": series().kind()})]
    metrics = two_ranks(metrics, [torch.tensor([5, -5, 0]), torch.tensor([[6.0, 3.0]])], gathered)
    assert metrics.joined([], epoch=True, idle=True)["loss"].item() == 2.0


def test_only_one_number_can_be_logged() -> None:
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        as_value(torch.zeros(2), "x", CPU)
    with pytest.raises(ValueError, match="str"):
        as_value("high", "x", CPU)
    assert as_value(torch.ones(1), "x", CPU).dim() == 0
