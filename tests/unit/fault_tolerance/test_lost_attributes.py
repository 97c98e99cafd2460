"""Attributes that training has changed and a recovery does not restore."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

import fabricx as fx
from fabricx.callbacks import EarlyStopping
from fabricx.fault_tolerance.lost_attributes import NotedAttributes, message


class Saves(fx.Callback):
    """Has a state."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}


class Forgets(fx.Callback):
    """Has no state."""

    count = 0


class SavesEntries(fx.Module):
    """Adds entries to checkpoints."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        pass

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        pass


def _module() -> Any:
    module: Any = fx.Module()
    module.layer, module.metric = nn.BatchNorm1d(2), MeanMetric()
    module.seen, module.outputs, module.best, module.table = 0, [], float("nan"), {"a": [1]}
    module.average, module.array = torch.zeros(3), np.zeros(2)
    return module


def test_changed_values_are_named_and_parts_of_the_state_are_not() -> None:
    module, saves, forgets, stops = _module(), Saves(), Forgets(), EarlyStopping("val")
    attributes = NotedAttributes(module, [saves, forgets, stops])
    module.seen = 1
    assert attributes.changed() == []  # nothing is noted yet
    attributes.note()
    module.layer(torch.ones(2, 2))
    module.metric.update(1.0)
    module.eval()
    module.empty = []
    saves.count = stops.wait_count = 3
    assert attributes.changed() == []
    module.seen, module.layer.calls, module.text = 2, 1, "a"
    module.outputs.append(torch.ones(()))
    module.table["a"].append(2)
    module.average += 1
    module.array[0] = 1
    forgets.count = 2
    assert sorted(attributes.changed()) == [
        "Forgets.count", "self.array", "self.average", "self.layer.calls", "self.outputs", "self.seen", "self.table",
        "self.text",
    ]  # fmt: skip


@pytest.mark.parametrize("size", [3, 10_000])
def test_another_tensor_and_a_change_within_a_tensor_are_noticed(size: int) -> None:
    module: Any = fx.Module()
    module.average = torch.zeros(size)
    attributes = NotedAttributes(module, [])
    attributes.note()
    module.average += 1
    assert attributes.changed() == ["self.average"]
    attributes.note()
    module.average = 0.5 * module.average
    assert attributes.changed() == ["self.average"]


def test_attributes_of_a_module_that_saves_entries_are_its_own_matter() -> None:
    module: Any = SavesEntries()
    attributes = NotedAttributes(module, [])
    attributes.note()
    module.seen = 1
    assert attributes.changed() == []


def test_a_message_names_each_attribute_once_and_the_remedy() -> None:
    assert message([[], []]) == ""
    text = message([["self.seen"], [], ["self.seen", "Forgets.count"]])
    assert "worker: self.seen, Forgets.count. A replacement" in text
    assert "Register a buffer" in text
    assert "self.4, ...." in message([[f"self.{number}" for number in range(9)]])
