"""Accumulation of values of self.log."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torchmetrics

import fabricx as fx
from fabricx.core.strategy import Traits
from fabricx.distributed.world import World
from fabricx.metrics.collector import Logbook
from fabricx.metrics.series import Series, as_value
from fabricx.testing import TinyModule, tiny_loader


def test_a_value_logged_by_step_and_by_epoch_has_three_names(quiet: dict[str, Any]) -> None:
    seen: list[float] = []

    class Net(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.log("index", float(batch_idx), on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(float(self.trainer.callback_metrics["index"]))

        def on_train_epoch_end(self) -> None:
            seen.append(float(self.trainer.callback_metrics["index"]))

    trainer = fx.Trainer(max_epochs=1, **quiet)
    trainer.fit(Net(), tiny_loader(16, 4))
    assert seen == [0.0, 1.0, 2.0, 3.0, 1.5]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("index")}
    assert metrics == {"index": 1.5, "index_step": 3.0, "index_epoch": 1.5}


def test_only_one_number_can_be_logged() -> None:
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        as_value(torch.zeros(2), "x")
    with pytest.raises(ValueError, match="str"):
        as_value("high", "x")
    with pytest.raises(ValueError, match="a complex number; log its abs"):
        as_value(torch.tensor(1.7 + 0.0j), "x")
    assert as_value(torch.ones(1), "x").dim() == 0


def logbook() -> Logbook:
    """Return a logbook in the middle of a training batch of 1024 samples."""
    book = Logbook(cast(Any, SimpleNamespace(world=World(), traits=Traits(), module=None)), training=True)
    book.begin_batch(None, 1024, step=1)
    return book


def log(to: Logbook, value: Any, **options: Any) -> None:
    arguments = {"name": "x", "on_step": None, "on_epoch": True, "reduce_fx": "mean", "joined": True, "indexed": True}
    arguments |= options
    reduction, indexed = arguments["reduce_fx"], arguments["indexed"]
    to.log(
        arguments["name"], value, False, True, arguments["on_step"], arguments["on_epoch"], reduction, None, indexed,
        arguments["joined"],
    )  # fmt: skip


@pytest.mark.parametrize("weigh", [None, lambda batch: 0.0], ids=["batch_size", "batch_weight"])
def test_a_batch_of_weight_zero_is_excluded_only_from_means(weigh: Any) -> None:
    book = logbook()
    log(book, 3.0)
    log(book, -7.0, name="lowest", reduce_fx="max")
    book._weigh = weigh
    book.begin_batch(None, 0, step=2)
    log(book, torch.tensor(torch.nan))  # of no samples
    log(book, -5.0, name="lowest", reduce_fx="max")
    assert {name: float(value) for name, value in book.epoch_values(ended=True).items()} == {"x": 3.0, "lowest": -5.0}


def test_logged_integers_are_exact() -> None:
    number = 2**24 + 1  # float32 has 24 bits
    for options, value in itertools.product(
        ({}, {"reduce_fx": "sum"}, {"reduce_fx": "max"}), (torch.tensor(number), number, float(number))
    ):
        book = logbook()
        for size in (3, 3):
            book.begin_batch(None, size, step=1)
            log(book, value, **options, on_step=True)
        twice = 2 * number if options == {"reduce_fx": "sum"} else number
        assert float(book.step_values(1)["x"]) == float(book.epoch_values(ended=True)["x"]) == twice


def test_sums_of_another_process_have_full_precision() -> None:
    total = 205.0 + 2**-44
    books = [logbook(), logbook()]
    for book, sums in zip(books, (torch.tensor(total, dtype=torch.float64), total), strict=True):
        book.metrics.add_sums({"x": [["mean", False, True, False, True, False], sums, 1.0]})
    exact, received = [book.metrics._pack(["x"], ["x"], epoch=True)[0, 0].item() for book in books]
    assert received == exact == total


@pytest.mark.parametrize(
    "options", [{"reduce_fx": "max"}, {"on_epoch": False}, {"joined": False}, {"on_step": False}], ids=str
)
def test_a_name_logged_with_different_options_is_an_error(options: dict[str, Any]) -> None:
    book = logbook()
    log(book, 1.0)
    log(book, 2.0)
    with pytest.raises(ValueError, match=r"self.log\('x', ...\) is called twice in different ways.*another name"):
        log(book, 3.0, **options)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_mean_over_batches_excludes_values_logged_between_batches(reduction: str) -> None:
    book = logbook()
    log(book, 1.0, on_step=False, reduce_fx=reduction)
    book.end_batch()
    if reduction == "sum":
        log(book, 2.0, on_step=False, reduce_fx=reduction)
        assert book.epoch_values(ended=True)["x"].item() == 3.0
        return
    with pytest.raises(ValueError, match="within a batch and between batches"):
        log(book, 2.0, on_step=False, reduce_fx=reduction)


def test_a_hook_at_the_end_of_an_epoch_logs_a_name_of_the_steps_again() -> None:
    book = logbook()
    for epoch in range(2):
        book.begin_batch(torch.zeros(2), 2, epoch + 1)
        log(book, epoch, on_step=True, on_epoch=bool(epoch))
        assert book.step_values(epoch + 1)["x"].item() == epoch
        book.end_batch()
        assert book.epoch_values(ended=False) == ({"x": epoch} if epoch else {})
        log(book, 10.0)
        assert book.epoch_values(ended=True)["x"].item() == 10.0
        assert book.names("x", epoch=True) == "x"


def test_a_rank_without_outputs_has_only_reduced_values() -> None:
    stage = World(axes={"pipeline": World(rank=0, size=2)})
    book = Logbook(cast(Any, SimpleNamespace(world=stage, traits=Traits(), module=None)), training=True)
    book.metrics.series["x"] = Series.of_kind(("mean", True, True, True, True, False))
    book.metrics.series["x"].value = 1.0
    assert book.local_values() == {}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_pipeline_stage_may_not_log_a_value_of_the_main_rank_only(rank: int) -> None:
    stage = World(axes={"pipeline": World(rank=rank, size=2)})
    book = Logbook(cast(Any, SimpleNamespace(world=stage, traits=Traits(), module=None)), training=True)
    log(book, 1.0)
    with pytest.raises(ValueError, match=r"self\.log\('x', \.\.\., sync_dist=False .* Remove the argument"):
        log(book, 1.0, joined=False)


class Unreachable(torchmetrics.MeanMetric):
    """A mean whose reduction would wait for ranks that do not take part."""

    def __init__(self) -> None:
        super().__init__()
        self.distributed_available_fn = lambda: True
        self.dist_sync_fn = self._refuse

    def _refuse(self, *_: Any, **options: Any) -> Any:
        raise AssertionError("a collective at a rank's own pace")


def test_the_step_of_a_metric_object_at_own_pace_belongs_to_this_rank() -> None:
    mean = Unreachable()
    book = Logbook(cast(Any, SimpleNamespace(world=World(), traits=Traits(lockstep=False), module=None)), training=True)
    book.begin_batch(None, 4, step=1)
    mean.update(2.0)
    log(book, mean, on_step=True)
    assert float(book.step_values(1)["x"]) == 2.0
    with pytest.raises(AssertionError, match="own pace"):  # this rank's value is not kept as the value of all
        mean.compute()


def test_a_name_is_a_string() -> None:
    with pytest.raises(ValueError, match=r"self.log\(3, ...\): the name must be text, such as '3'"):
        logbook().log(3, 1.0, False, True, None, None, "mean", None, True, True)  # type: ignore[arg-type]


def test_a_name_may_not_have_a_loader_suffix() -> None:
    with pytest.raises(ValueError, match="remove this part of the name"):
        logbook().log("x/dataloader_idx_0", 1.0, False, True, None, None, "mean", None, True, True)


def test_a_value_is_shown_and_written_if_any_call_requests_it() -> None:
    logs = logbook()
    for bar, to_logger in ((False, False), (True, False), (False, True), (False, False)):
        logs.log("a", 1.0, bar, to_logger, None, None, "mean", None, True, True)
    assert (logs.metrics.series["a"].bar, logs.metrics.series["a"].to_logger) == (True, True)


@pytest.mark.parametrize("on_step", [True, False])
def test_a_metric_object_with_several_values_is_refused(on_step: bool, quiet: dict[str, Any]) -> None:
    class TwoValues(torchmetrics.MeanMetric):
        def compute(self) -> Any:
            return super().compute(), torch.ones(())

    class Net(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.both = TwoValues()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.both.update(1.0)
            self.log("both", self.both, on_step=on_step, on_epoch=not on_step)
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match=r"self.log\('both', ...\): compute\(\) of the metric object returns tuple"):
        fx.Trainer(max_epochs=1, log_every_n_steps=1, **quiet).fit(Net(), tiny_loader(8, 4))


def test_a_metric_object_made_anew_in_each_batch_is_refused_for_the_value_of_an_epoch() -> None:
    book, first, second = logbook(), torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
    for metric, value in ((first, 0.0), (second, 3.0)):
        metric.update(value)
    log(book, first)
    log(book, first)
    with pytest.raises(ValueError, match=r"another MeanMetric than that of an earlier batch.*assign it to self"):
        log(book, second)
    steps = logbook()
    log(steps, first, on_step=True, on_epoch=False)
    log(steps, second, on_step=True, on_epoch=False)  # the value of each step
    assert float(steps.step_values(1)["x"]) == 3.0


def test_a_metric_object_of_steps_begins_each_epoch_without_samples() -> None:
    book, metric = logbook(), torchmetrics.SumMetric()
    for _ in range(2):
        metric.update(2.0)
        log(book, metric, on_step=True, on_epoch=False)
        book.epoch_values(ended=False)
        assert float(metric.compute()) == 2.0  # in a hook at the end of the epoch
        book.epoch_values(ended=True)


def test_a_metric_object_belongs_to_a_single_loader() -> None:
    book, metric = logbook(), torchmetrics.MeanMetric()
    book.loader = 0
    log(book, metric)
    log(book, metric, name="other")
    log(book, metric, name="step", on_step=True, on_epoch=False)
    log(book, metric, name="both", indexed=False)
    book.loader = 1
    log(book, torchmetrics.MeanMetric())
    log(book, metric, name="step", on_step=True, on_epoch=False)  # the value of a batch includes no other samples
    log(book, metric, name="both", indexed=False)
    with pytest.raises(ValueError, match=r"the same MeanMetric is logged for the loaders 0 and 1.*nn\.ModuleList"):
        log(book, metric, name="other")


def test_a_metric_object_with_a_name_for_each_loader_belongs_to_a_single_loader() -> None:
    book, metric = logbook(), torchmetrics.MeanMetric()
    for loader in (0, 1):  # a name of all loaders
        book.loader = loader
        log(book, metric, name="all", indexed=False)
    log(book, metric, name="late", indexed=False)
    book.loader = 2
    with pytest.raises(ValueError, match="is logged for the loaders 1 and 2"):
        log(book, metric, name="own", indexed=False)


class _Unknown(torchmetrics.Metric):
    """Has a value only after an update."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, value: torch.Tensor) -> None:
        self.total += value

    def compute(self) -> torch.Tensor | None:
        return self.total if self.total else None


def test_a_metric_object_without_a_value_is_omitted(quiet: dict[str, Any]) -> None:
    class Net(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.some, self.none = _Unknown(), _Unknown()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.some.update(torch.tensor(2.0))
            self.none.update(torch.tensor(0.0))
            self.log_dict({"some": self.some, "none": self.none})

    [results] = fx.Trainer(**quiet).validate(Net(), tiny_loader(8, 4), verbose=False)
    assert results == {"some": 4.0}


def test_results_are_in_the_order_of_the_calls(quiet: dict[str, Any]) -> None:
    class Net(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.of_values = torchmetrics.MeanMetric()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.of_values.update(1.0)
            self.log("z", 1.0)
            self.log("metric", self.of_values)
            self.log("a", 1.0)

        def on_validation_epoch_end(self) -> None:
            self.log_dict({"y": 2.0, "b": 3.0})

    [result] = fx.Trainer(**quiet).validate(Net(), tiny_loader(8, 4), verbose=False)
    assert list(result) == ["z", "metric", "a", "y", "b"]


def test_a_logged_value_is_not_affected_by_later_changes_of_its_tensor() -> None:
    book, loss, weight = logbook(), torch.tensor(2.0), torch.nn.Parameter(torch.tensor(3.0))
    for value in (loss, weight, loss.view(1)):
        log(book, value, on_epoch=False, reduce_fx="sum")
    other = logbook()
    log(other, loss, on_epoch=False)
    with torch.no_grad():
        loss += 100.0
        weight += 100.0
    assert {name: float(value) for name, value in book.step_values(1).items()} == {"x": 7.0}
    assert {name: float(value) for name, value in other.step_values(1).items()} == {"x": 2.0}
