"""Attributes of a module that a trial step has changed are restored; other objects stay."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import nn

from fabricx.core.module_state.attributes import AttributeMark, lists_of, numbers_of


class Meter:
    def __init__(self) -> None:
        self.total, self.recent = 0.0, deque([1, 2], maxlen=2)

    def update(self, value: float) -> None:
        self.total += value
        self.recent.append(value)


class Reader:
    def __init__(self) -> None:
        self.file, self.lines = iter("ab"), 0  # not recorded: its state is not only in its attributes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.calls, self.losses, self.seen = 0, [0.5], {"epochs": {"a": 1}}
        self.meter, self.reader = Meter(), Reader()
        self.table, self.array, self.constant = torch.zeros(2), np.zeros(2), np.zeros(1)
        self.constant.flags.writeable = False

    def forward(self, x: Any) -> Any:
        self.calls += 1
        self.losses.append(1.5)
        self.seen["epochs"]["b"] = 2
        self.seen["more"] = {}
        self.meter.update(3.0)
        self.reader.lines += 1
        self.table[0] += 1
        self.array[1] = 4
        self.layer.cache = x
        self.layer.register_forward_hook(lambda *args: None)
        return self.layer(x)


def state(net: Net) -> Any:
    values = {name: value for name, value in vars(net).items() if name not in ("reader", "meter", "_modules")}
    inner = {name: value for name, value in vars(net.layer).items() if name != "_parameters"}
    return copy.deepcopy((values, vars(net.meter), inner))


def test_attributes_hooks_and_their_content_are_restored_in_place():
    net = Net()
    mark, before, losses, epochs = AttributeMark(net), state(net), net.losses, net.seen["epochs"]
    assert lists_of(net) == {"losses": 1}
    net(torch.ones(1, 1))
    numbers = numbers_of(net)
    assert (numbers["calls"], numbers["meter.total"], numbers["seen.epochs.b"]) == (1, 3.0, 2)
    assert str(state(net)) != str(before)
    mark.restore()
    assert str(state(net)) == str(before)
    assert net.losses is losses
    assert net.seen["epochs"] is epochs
    assert net.reader.lines == 1
    assert not hasattr(net.layer, "cache")


def test_a_step_that_replaces_modules_keeps_its_attributes():
    net = Net()
    mark = AttributeMark(net)
    net.layer, net.calls = nn.Linear(1, 1), 5
    mark.restore()
    assert net.calls == 5
