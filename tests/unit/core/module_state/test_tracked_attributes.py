"""Attributes that a run changes are copied, and restored in the same object or in a new one."""

from __future__ import annotations

import copy
import io
import pickle
from collections import defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fabricx.core.module_state.tracked_attributes import TrackedAttributes, decoded, differing, encoded, on_cpu


class Mean:
    def __init__(self) -> None:
        self.total, self.values = 0.0, [1.0]
        self.owner: Any = None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.steps, self.rate, self.name = 0, 0.5, "net"
        self.best: Any = None
        self.losses: list[float] = []
        self.sizes = {"a": 1}
        self.nested = [{"a": torch.zeros(2)}, (1, [2])]
        self.recent: deque[int] = deque(maxlen=2)
        self.counts: defaultdict[str, int] = defaultdict(lambda: 0)
        self.known = {1}
        self.center = torch.zeros(3)
        self.table = np.zeros(2)
        self.mean = Mean()


def change(net: Any) -> None:
    net.steps, net.rate, net.name, net.best = 3, float("nan"), "trained", np.float64(0.5)
    net.losses.append(1.5)
    net.sizes["a"] = 2
    net.nested[0]["a"].add_(1)
    net.recent.extend([1, 2, 3])
    net.counts["x"] += 1
    net.known.add(2)
    net.center.add_(1)
    net.table[0] = 4
    net.mean.total = 2.0
    net.mean.values.append(3.0)
    net.code, net.root, net.fixed = b"ab", 1j, frozenset({1})
    net.added = [1]


def values(net: Any) -> str:
    attributes = {name: value for name, value in vars(net).items() if not name.startswith("_")}
    return repr({**attributes, "counts": dict(net.counts), "mean": (net.mean.total, net.mean.values), "training": 0})


def torch_loaded(state: Any) -> Any:
    torch.save(state, buffer := io.BytesIO())
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def tracked(net: nn.Module) -> TrackedAttributes:
    return TrackedAttributes({"": net, "layer": net.get_submodule("layer")}, observed=[""])


def test_attributes_that_have_not_changed_are_not_copied() -> None:
    net = Net()
    attributes = tracked(net)
    net.layer.weight.data.add_(1)
    net.steps = 0
    net.losses = []
    assert attributes.changed() == {}


@pytest.mark.parametrize(
    "sent",
    [
        lambda copies: pickle.loads(pickle.dumps(on_cpu(copies))),
        lambda copies: decoded(torch_loaded(encoded(copies))),
    ],
    ids=["record", "checkpoint"],
)
def test_changed_attributes_are_restored_in_another_object(sent: Any) -> None:
    net, other = Net(), Net()
    attributes, of_other = tracked(net), tracked(other)
    change(net)
    copies = sent(attributes.changed())
    assert len(copies) == 17
    of_other.restore(copies)
    assert values(other) == values(net)
    assert other.recent.maxlen == 2
    assert other.counts.default_factory is not None
    assert differing(of_other.changed(), attributes.changed()).keys() == {("", "rate")}  # NaN


def test_later_changes_are_undone_in_the_same_objects() -> None:
    net = Net()
    attributes = tracked(net)
    net.steps = 1
    net.losses.append(0.5)
    center, mean, losses = net.center, net.mean, net.losses
    expected, copies = values(net), attributes.changed()
    change(net)
    attributes.restore(copies)
    assert values(net) == expected
    assert net.center is center
    assert net.mean is mean
    assert net.losses is losses
    change(net)
    del net.added
    attributes.restore(copies, others=False)
    assert net.steps == 1
    assert net.losses == [0.5]
    assert net.rate != net.rate


def test_copies_do_not_change_with_the_attributes() -> None:
    net = Net()
    attributes = tracked(net)
    change(net)
    copies = attributes.changed()
    before = copy.deepcopy(copies)
    change(net)
    assert repr(copies) == repr(before)
    attributes.restore(copies)
    change(net)
    assert repr(copies) == repr(before)


@pytest.mark.parametrize("observed", [True, False])
def test_the_first_change_within_a_collection_of_other_owners_is_found_later(observed: bool) -> None:
    net = Net()
    attributes = TrackedAttributes({"net": net}, observed=["net"] * observed)
    for _ in range(16):
        assert attributes.changed() == {}
    net.losses.append(0)
    net.steps += 1
    for _ in range(15):
        copies = attributes.changed()
        assert (("net", "losses") in copies) is observed
        assert copies["net", "steps"] == 1
    assert attributes.changed()["net", "losses"] == [0]
    net.losses.append(1)
    assert attributes.changed()["net", "losses"] == [0, 1]


def test_attributes_that_become_too_large_are_named() -> None:
    net = Net()
    attributes = tracked(net)
    net.losses.append(0.5)
    assert attributes.changed() == {("", "losses"): [0.5]}
    net.losses.extend([0.5] * 4096)
    assert attributes.changed() == {}
    assert attributes.lost == {"losses"}
    attributes.restore({})
    assert len(net.losses) == 4097


@pytest.mark.parametrize(
    "value",
    [
        nn.Parameter(torch.ones(1)), nn.Linear(1, 1), torch.zeros(1 << 17), [object()], {object(): 1}, print, Mean,
        [torch.zeros(2)] * 300, "x" * 5000, torch.Generator(), torch.optim.SGD([nn.Parameter(torch.ones(1))]),
        [[[[[[1, [2, [3]]]]]]]], np.array([object()]), np.array(["a"]), np.datetime64("2026-01-01"),
    ],
)  # fmt: skip
def test_objects_of_other_kinds_are_not_tracked(value: Any) -> None:
    net: Any = Net()
    net.mean.owner = net
    attributes = tracked(net)
    vars(net)["other"] = value
    assert attributes.changed() == {}
    attributes.restore({("", "steps"): 2, ("absent", "steps"): 2})
    assert net.steps == 2
    assert vars(net)["other"] is value


def test_a_tensor_with_a_graph_is_restored_without_it() -> None:
    net: Any = Net()
    attributes = tracked(net)
    net.best = net.layer(torch.ones(2)).sum()
    attributes.restore(attributes.changed())
    assert not net.best.requires_grad
