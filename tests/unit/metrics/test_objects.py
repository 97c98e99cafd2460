"""States of metric objects are taken and given back."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fabricx.distributed.world import World
from fabricx.metrics.objects import metric_objects, reduce_along, set_states, states_of


class Metric(nn.Module):
    """Has the attributes of a torchmetrics object: tensors, and lists of tensors that grow."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self.reset()

    def reset(self) -> None:
        self.total, self.seen, self._update_count = torch.zeros(()), list[Tensor](), 0

    def update(self, value: float) -> None:
        self.total += value  # in place
        self.seen.append(torch.tensor(value))
        self._update_count += 1

    @property
    def metric_state(self) -> dict[str, Any]:
        return {"total": self.total, "seen": self.seen}


def test_metric_objects_are_found_at_any_depth() -> None:
    module = nn.Module()
    module.inner = nn.ModuleDict({"accuracy": Metric(), "layer": nn.Linear(1, 1)})
    assert list(metric_objects(module)) == ["inner.accuracy"]


def test_a_state_is_not_changed_by_later_updates_and_can_be_sent() -> None:
    metric, other = Metric(), Metric()
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
    metric = SimpleNamespace(dist_sync_fn=None, distributed_available_fn=lambda: True)
    before = metric.dist_sync_fn, metric.distributed_available_fn
    undo = reduce_along(metric, World())
    assert not metric.distributed_available_fn()
    assert copy.deepcopy(metric).dist_sync_fn is metric.dist_sync_fn
    assert pickle.loads(pickle.dumps(metric.dist_sync_fn)) is None
    undo()
    assert (metric.dist_sync_fn, metric.distributed_available_fn) == before
