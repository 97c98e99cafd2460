"""States of metric objects are saved and restored."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from fabricx.distributed.world import World
from fabricx.metrics.objects import (
    computed_together,
    held_metrics,
    merge_states,
    metric_objects,
    reduce_along,
    set_states,
    states_of,
)


class Metric(torchmetrics.Metric):
    """Has a tensor, and a list of tensors that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("seen", [], dist_reduce_fx="cat")

    def update(self, value: float) -> None:
        self.total += value  # in place
        self.seen.append(torch.tensor(value))

    def compute(self) -> Tensor:
        return self.total


def test_metric_objects_are_found_at_any_depth() -> None:
    module = nn.Module()
    module.inner = nn.ModuleDict({"accuracy": Metric(), "layer": nn.Linear(1, 1)})
    assert list(metric_objects(module)) == ["inner.accuracy"]


def test_a_state_is_not_changed_by_later_updates_and_can_be_sent() -> None:
    metric: Any = Metric()
    other: Any = Metric()
    metric.update(2.0)
    saved = states_of(metric)
    metric.update(3.0)
    other.update(9.0)
    set_states(other, pickle.loads(pickle.dumps(saved)))
    assert (float(other.total), [float(value) for value in other.seen], other._update_count) == (2.0, [2.0], 1)
    set_states(metric, saved)
    other.update(3.0)
    metric.update(3.0)
    assert float(metric.total) == float(other.total) == 5.0
    assert metric._update_count == 2


def test_a_metric_reduces_over_some_ranks_until_it_is_undone() -> None:
    metric = SimpleNamespace(_reductions={}, dist_sync_fn=None, distributed_available_fn=lambda: True)
    before = metric.dist_sync_fn, metric.distributed_available_fn
    undo = reduce_along(metric, World(), fits=True)
    assert not metric.distributed_available_fn()
    assert copy.deepcopy(metric).dist_sync_fn is metric.dist_sync_fn
    assert pickle.loads(pickle.dumps(metric.dist_sync_fn)) is None
    undo()
    assert (metric.dist_sync_fn, metric.distributed_available_fn) == before


def test_a_list_of_one_number_is_gathered_as_a_list_with_that_of_a_rank_with_two_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = []

    def all_gather(headers: list[Tensor], own: Tensor, group: Any) -> None:
        headers[0].copy_(own)
        headers[1][:3] = torch.tensor([0, 1, 2])  # float32, one dimension, two numbers

    def gather(state: Tensor, group: Any) -> list[Tensor]:
        sent.append(state.tolist())
        return [state, torch.ones(2)]

    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr("torchmetrics.utilities.distributed.gather_all_tensors", gather)
    metric: Any = torchmetrics.CatMetric()
    metric.update(3.0)
    reduce_along(metric, World(), fits=True)
    metric.distributed_available_fn = lambda: True
    assert float(metric.compute()) == 3.0
    assert sent == [[3.0]]


def merged(metric: Any, *ranks: list[Any]) -> tuple[Any, bool]:
    """Return the metric with the states of ranks that had these updates, and whether updates may follow."""
    states = []
    for updates in ranks:
        local = metric.clone()
        for update in updates:
            local.update(*update)
        states.append(states_of(local))
    return metric, merge_states(metric, states)


@pytest.mark.parametrize(
    "kind",
    [
        torchmetrics.MeanMetric, torchmetrics.MinMetric, torchmetrics.MaxMetric, torchmetrics.SumMetric,
        torchmetrics.CatMetric,
    ],
)  # fmt: skip
def test_the_reduced_state_is_equal_to_that_of_a_rank_with_all_updates(kind: Any) -> None:
    metric = kind()
    alone, updates = metric.clone(), [(torch.tensor([value, value**2]),) for value in (1.0, 3.0, -2.0)]
    for update in updates:
        alone.update(*update)
    joined, may_follow = merged(metric, updates[:2], updates[2:], [])
    assert may_follow
    assert torch.equal(joined.compute(), alone.compute())
    assert joined.update_called
    for state in (joined, alone):
        state.update(torch.tensor([5.0]))
    assert torch.equal(joined.compute(), alone.compute())


@pytest.mark.filterwarnings("ignore:Metric `PearsonCorrCoef`")
def test_a_state_with_a_row_per_rank_computes_and_refuses_updates() -> None:
    x, y = torch.randn(2, 8, generator=torch.Generator().manual_seed(2))
    first, second = [(x[:3], y[:3])], [(x[3:], y[3:])]
    joined, continues = merged(torchmetrics.PearsonCorrCoef(), first, second)
    assert not continues
    assert float(joined.compute()) == pytest.approx(float(torch.corrcoef(torch.stack([x, y]))[0, 1]), rel=1e-5)
    assert merged(torchmetrics.PearsonCorrCoef(), first, [])[1]  # a single rank had batches


def test_states_are_set_in_any_order_also_those_of_a_wrapper_that_resets_its_metric() -> None:
    module = nn.Module()
    module.best = torchmetrics.MinMaxMetric(torchmetrics.MaxMetric())
    module.best.update(4.0)
    saved = {name: states_of(metric) for name, metric in metric_objects(module).items()}
    for name in ("best._base_metric", "best"):
        set_states(metric_objects(module)[name], saved[name])
    assert module.best._base_metric.update_called
    assert float(module.best._base_metric.compute()) == 4.0


def test_each_member_of_a_compute_group_receives_its_state() -> None:
    def collection() -> Any:
        kinds = torchmetrics.classification
        return torchmetrics.MetricCollection([kinds.BinaryAUROC(), kinds.BinaryAveragePrecision()])

    module, other = nn.Module(), nn.Module()
    module.group, other.group = collection(), collection()
    batches = [(torch.tensor([0.1, 0.8]), torch.tensor([0, 1])), (torch.tensor([0.3, 0.2]), torch.tensor([0, 1]))]
    for _ in range(2):  # also for states that members share
        for name, metric in metric_objects(module).items():
            set_states(metric, states_of(metric_objects(other)[name]))
        module.group.update(*batches[0])
        other.group.update(*batches[0])
        module.group.update(*batches[1])
        other.group.update(*batches[1])
        assert module.group.compute() == other.group.compute()


def test_metrics_in_lists_and_dicts_of_a_module_or_callback_are_found_once() -> None:
    module, metric, other = nn.Module(), torchmetrics.SumMetric(), torchmetrics.SumMetric()
    module.metric, module.listed, module.losses = metric, [other], [0.5] * 1000
    callback = SimpleNamespace(seen={"all": torchmetrics.SumMetric()}, net=module)
    assert list(metric_objects(module)) == ["metric", "listed.0"]
    names = held_metrics({"module": module, "Watch 0": callback})
    assert list(names) == ["module.metric", "module.listed.0", "Watch 0.seen.all"]


def test_a_rank_without_an_update_since_the_last_value_takes_part_in_the_next_reduction() -> None:
    """torchmetrics returns a value that it keeps, without a collective: the last stage of a pipeline waited."""
    metric, joined = torchmetrics.SumMetric(), []
    metric.distributed_available_fn = lambda: True
    metric.dist_sync_fn = lambda state, group=None: joined.append(group) or [state, state]
    with pytest.warns(UserWarning, match="before the ``update`` method"):
        values = [float(metric.compute()), float(metric.compute()), float(computed_together(metric))]
    assert (values, len(joined)) == ([0.0] * 3, 2)
