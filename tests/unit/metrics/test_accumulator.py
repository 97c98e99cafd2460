"""Logged values are merged by weight; different names or options on ranks are errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from fabricx.core.strategy import Traits
from fabricx.distributed.world import World
from fabricx.errors import RanksDisagree
from fabricx.metrics.accumulator import Metrics, position
from fabricx.metrics.collector import Logbook
from fabricx.metrics.series import Series

CPU = torch.device("cpu")


def series(reduction: Any = "mean", **flags: bool) -> Series:
    options = {"on_step": True, "on_epoch": True, "bar": False, "to_logger": True, "local": False, **flags}
    return Series(reduction, **options)


def alone() -> Metrics:
    return Metrics(lambda values, op: values, lambda obj: [obj], 1, CPU)


def two_ranks(local: Metrics, others: Sequence[Tensor], gathered: list[Any]) -> Metrics:
    """A metrics object whose reductions use the fixed tensors of a second rank."""
    queue = list(others)

    def reduce(values: Tensor, op: str) -> Tensor:
        other = queue.pop(0).to(values.dtype)
        return {"sum": values + other, "max": torch.maximum(values, other), "min": torch.minimum(values, other)}[op]

    local._reduce, local._gather, local._size = reduce, lambda obj: [obj, *((*entry, {}, {}) for entry in gathered)], 2
    return local


@pytest.mark.parametrize(("reduction", "expected"), [("mean", 2.5), ("sum", 4.0), ("max", 3.0), ("min", 1.0)])
def test_an_epoch_value_is_accumulated_by_its_reduction(reduction: str, expected: float) -> None:
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


def test_names_are_required_only_in_the_step_that_logged_them() -> None:
    metrics = alone()
    metrics.series["x"] = series()
    metrics.series["x"].add(1.0, 1, step=3)
    assert metrics.due(epoch=False, step=3) == ["x"]
    assert metrics.due(epoch=False, step=4) == []


def test_a_step_of_another_rank_keeps_the_incomplete_value_of_the_next_step() -> None:
    """Regression: a validation between the microbatches of a window discarded the first of them."""
    metrics = alone()
    metrics.series["x"] = series()
    metrics.series["x"].add(1.0, 1, step=3)
    named = {"x": metrics.series["x"].logged_as()}
    digest = torch.tensor([float(2**48), float(2**48)])  # of other names
    joined = two_ranks(metrics, [digest, torch.tensor([[8.0, 2.0]])], [([1], named, {"x": math.inf})])
    assert joined.joined(metrics.due(epoch=False, step=2), epoch=False)["x"].item() == 4.0
    metrics.series["x"].add(2.0, 1, step=3)
    assert alone_value(metrics) == 1.5


def alone_value(metrics: Metrics) -> float:
    return metrics.joined(["x"], epoch=False, alone=True)["x"].item()


def test_ranks_that_logged_different_names_are_listed() -> None:
    metrics = alone()
    metrics.series["loss"] = series()
    metrics.series["loss"].add(1.0, 1, step=1, batch=1)
    metrics = two_ranks(metrics, [torch.tensor([5, -5])], [([1], {"acc": series().logged_as()}, {"acc": 1})])
    with pytest.raises(RanksDisagree, match=r"rank 0: 'loss'\n  rank 1: 'acc'"):
        metrics.joined(["loss"], epoch=True, batches=[1])


@pytest.mark.parametrize("batches", [0, 2])
def test_names_first_logged_by_other_ranks_in_a_later_batch_change_no_value(batches: int) -> None:
    metrics = alone()
    gathered = [([3], {"loss": series().logged_as()}, {"loss": batches + 1})]
    metrics = two_ranks(metrics, [torch.tensor([5, -5]), torch.tensor([[6.0, 3.0]])], gathered)
    assert metrics.joined([], epoch=True, batches=[batches])["loss"].item() == 2.0


@pytest.mark.parametrize("first", [0, 2])
def test_all_ranks_with_the_batch_or_hook_must_log_the_same_names(first: int) -> None:
    metrics = two_ranks(alone(), [torch.tensor([5, -5])], [([3], {"loss": series().logged_as()}, {"loss": first})])
    with pytest.raises(RanksDisagree, match=r"rank 0: nothing\n  rank 1: 'loss'"):
        metrics.joined([], epoch=True, batches=[2])


def test_a_rank_without_a_batch_of_a_loader_has_no_value_of_it() -> None:
    of_second = {"loss": position(1, 1)}
    gathered = [([1, 1], {"loss": series().logged_as()}, of_second)]
    metrics = two_ranks(alone(), [torch.tensor([5, -5]), torch.tensor([[6.0, 3.0]])], gathered)
    assert metrics.joined([], epoch=True, batches=[2, 0])["loss"].item() == 2.0
    metrics = two_ranks(alone(), [torch.tensor([5, -5])], gathered)
    with pytest.raises(RanksDisagree, match=r"rank 0: nothing\n  rank 1: 'loss'"):
        metrics.joined([], epoch=True, batches=[0, 1])


def test_a_series_records_the_batch_where_its_step_and_epoch_began() -> None:
    book = logbook()
    for batch, step in ((2, 1), (3, 2)):
        log(book, 1.0)
        book.begin_batch(None, 1, step)
        assert book.series("x").epoch_batch == 1, batch
    log(book, 1.0)
    assert book.series("x").step_batch == 3
    book.metrics.set_latest(book.metrics.latest())  # of an earlier point, to which all ranks return
    assert (book.series("x").step, book.series("x").step_batch) == (2, math.inf)
    book.end_batch()
    book.metrics.forget_epoch()
    assert book.series("x").epoch_batch == math.inf


def logbook() -> Logbook:
    """Return a logbook in the middle of a training batch of 1024 samples."""
    book = Logbook(cast(Any, SimpleNamespace(world=World(), traits=Traits(), module=None)), training=True)
    book.begin_batch(None, 1024, step=1)
    return book


def log(to: Logbook, value: Any, **options: Any) -> None:
    arguments = {"on_step": None, "on_epoch": True, "reduce_fx": "mean", "joined": True, **options}
    to.log(
        "x",
        value,
        False,
        True,
        arguments["on_step"],
        arguments["on_epoch"],
        arguments["reduce_fx"],
        None,
        True,
        arguments["joined"],
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor(100.0, dtype=torch.float16), 100.0),  # 100 x 1024 is more than float16 holds
        (torch.tensor(1.0, dtype=torch.bfloat16), 1.0),  # its sums stop growing at 256 times the added value
        (torch.tensor(100, dtype=torch.uint8), 100.0),
        (torch.tensor(True), 1.0),
    ],
    ids=["float16", "bfloat16", "uint8", "bool"],
)
def test_sums_do_not_depend_on_the_precision_of_logged_values(value: Tensor, expected: float) -> None:
    book = logbook()
    for _ in range(600):
        log(book, value)
    assert book.step_values(1)["x"].item() == expected
    assert book.epoch_values(ended=True)["x"].item() == expected


def test_integers_are_summed_exactly() -> None:
    book = logbook()
    for value in (2**24, 1, 1, 1):  # float32 has no 2**24 + 1
        log(book, torch.tensor(value), reduce_fx="sum")
    assert book.metrics.series["x"].total.item() == 2**24 + 3


def votes_of(way: tuple[Any, ...]) -> Tensor:
    """The message of a rank before the merge of a value with these options."""
    votes: list[Tensor] = []
    other = alone()
    other.series["x"] = Series.of_kind(way[:6])
    other.series["x"].inside = way[6]
    other.series["x"].add(1.0, 1, step=1)
    other._reduce, other._size = lambda values, op: (votes.append(values.clone()), values)[1], 2  # type: ignore
    other.joined(["x"], epoch=True)
    return votes[0]


@pytest.mark.parametrize(
    ("reduction", "flags", "inside", "message"),
    [
        ("max", {}, True, "rank 1: reduce_fx=max, on_step=True, on_epoch=True"),
        ("mean", {"on_step": False}, True, "rank 1: reduce_fx=mean, on_step=False, on_epoch=True"),
        ("mean", {}, False, "rank 1: reduce_fx=mean, on_step=True, on_epoch=True, between batches"),
        ("mean", {}, None, ""),
        ("mean", {"bar": True}, True, ""),
    ],
)
def test_ranks_that_log_a_name_with_different_options_are_an_error(
    reduction: str, flags: dict[str, bool], inside: bool | None, message: str
) -> None:
    local, other = alone(), series(reduction, **flags)
    local.series["x"], other.inside = series("mean"), inside
    local.series["x"].inside = True
    local.series["x"].add(1.0, 1, step=1)
    values = [votes_of(other.logged_as()), torch.tensor([[3.0, 1.0]])]
    joined = two_ranks(local, values, [(1, {"x": other.logged_as()}, {"x": 1})])
    if not message:
        assert joined.joined(["x"], epoch=True)["x"].item() == 2.0
        return
    with pytest.raises(RanksDisagree, match=f"'x' in different ways.*\n  rank 0: reduce_fx=mean.*\n  {message}"):
        joined.joined(["x"], epoch=True)


def test_a_value_of_the_main_rank_alone_needs_no_other_rank_to_log_it() -> None:
    local = alone()
    local.series["x"], local.series["y"] = series(local=True), series()
    for name in ("x", "y"):
        local.series[name].add(3.0, 1, step=1)
    other = alone()
    other.series["y"] = local.series["y"]
    votes: list[Tensor] = []
    other._reduce, other._size = lambda values, op: (votes.append(values.clone()), values)[1], 2  # type: ignore
    other.joined(["y"], epoch=True)
    values = two_ranks(local, votes, []).joined(["x", "y"], epoch=True)
    assert (values["x"].item(), values["y"].item()) == (3.0, 3.0)


def test_values_only_on_other_ranks_are_added() -> None:
    metrics = alone()
    for name, local in (("a", False), ("mine", True)):
        metrics.series[name] = series(local=local)
    others = [{"a": (series().kind(), 5.0), "b": (series("max").kind(), 3.0)}]
    asked: list[Any] = []

    def gather(obj: Any) -> list[Any]:
        asked.append(obj)
        return [obj, *others]

    metrics._size, metrics._gather = 2, gather
    metrics._reduce = lambda values, op: torch.maximum(
        values, torch.zeros_like(values)
    )  # other names on the second rank
    values = {"a": torch.tensor(1.0), "mine": torch.tensor(2.0)}
    assert {name: float(value) for name, value in metrics.filled(values).items()} == {"a": 1.0, "mine": 2.0, "b": 3.0}
    assert asked == [{"a": (series().kind(), 1.0)}]
    assert metrics.series["b"].kind() == series("max").kind()
    metrics._reduce = lambda values, op: values  # the same names on both
    assert metrics.filled(values) is values
    assert len(asked) == 1


@pytest.mark.parametrize(("local", "other"), [(math.nan, 1.0), (1.0, math.nan), (math.nan, math.nan)])
@pytest.mark.parametrize("reduction", ["max", "min"])
def test_an_extreme_over_ranks_is_nan_if_a_rank_has_nan(reduction: Any, local: float, other: float) -> None:
    """As gloo does, the reduction forgets NaN."""

    def ranks(value: float) -> Metrics:
        metrics = alone()
        for name, logged in (("x", value), ("y", 3.0)):
            metrics.series[name] = series(reduction)
            metrics.series[name].add(logged, 1, step=1)
        return metrics

    sent: list[Tensor] = []
    theirs, ours = ranks(other), ranks(local)
    theirs._reduce, theirs._size = lambda values, op: (sent.append(values.clone()), values)[1], 2  # type: ignore
    theirs.joined(["x", "y"], epoch=True)
    forgets = {"max": torch.fmax, "min": torch.fmin}
    ours._reduce = lambda values, op: forgets[op](values, sent.pop(0))
    ours._size = 2
    values = ours.joined(["x", "y"], epoch=True)
    assert math.isnan(values["x"])
    assert float(values["y"]) == 3.0
