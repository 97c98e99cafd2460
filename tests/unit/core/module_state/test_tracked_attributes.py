"""Attributes that a run changes are copied, and restored in the same object or in a new one."""

from __future__ import annotations

import io
import pickle
from collections import defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fabricx.core.module_state.packed_attributes import differing, packed, unpacked
from fabricx.core.module_state.tracked_attributes import TrackedAttributes


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


@pytest.mark.parametrize("sent", [lambda state: pickle.loads(pickle.dumps(state)), torch_loaded])
def test_changed_attributes_are_restored_in_another_object(sent: Any) -> None:
    net, other = Net(), Net()
    attributes, of_other = tracked(net), tracked(other)
    change(net)
    copies = unpacked(sent(packed(attributes.changed())))
    assert len(copies) == 16
    of_other.restore(copies)
    assert values(other) == values(net)
    assert other.recent.maxlen == 2
    assert other.counts.default_factory is not None
    assert differing(packed(of_other.changed()), packed(attributes.changed())) == []


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
    before = pickle.dumps(packed(copies))
    change(net)
    assert pickle.dumps(packed(copies)) == before
    attributes.restore(copies)
    change(net)
    assert pickle.dumps(packed(copies)) == before


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
    assert attributes.changed()["net", "losses"].content == [0]
    net.losses.append(1)
    assert attributes.changed()["net", "losses"].content == [0, 1]


def test_attributes_that_become_too_large_are_named() -> None:
    net = Net()
    attributes = tracked(net)
    net.losses.append(0.5)
    assert packed(attributes.changed())[0][:2] == ["", "losses"]
    net.losses.extend([0.5] * 4096)
    copies = attributes.changed()
    assert packed(copies) == []
    assert attributes.lost == {"losses"}
    net.losses.append(0.5)
    attributes.restore({})
    assert len(net.losses) == 4098
    attributes.restore(copies)
    assert len(net.losses) == 4097


@pytest.mark.parametrize(
    "value",
    [
        nn.Parameter(torch.ones(1)), nn.Linear(1, 1), torch.zeros(1 << 17), [object()], {object(): 1}, print, Mean,
        [torch.zeros(2)] * 16, [[1] * 20] * 20, torch.zeros(1, requires_grad=True), "x" * 5000, torch.Generator(),
        torch.optim.SGD([nn.Parameter(torch.ones(1))]), np.array([object()]), np.array(["a"]),
        np.datetime64("2026-01-01"),
    ],
)  # fmt: skip
def test_objects_of_other_kinds_are_not_tracked(value: Any) -> None:
    net: Any = Net()
    net.mean.owner = net
    attributes = tracked(net)
    vars(net)["other"] = value
    assert packed(attributes.changed()) == []
    attributes.restore({("", "steps"): 2, ("absent", "steps"): 2})
    assert net.steps == 2
    assert vars(net)["other"] is value


def test_a_tensor_with_a_graph_is_restored_without_it() -> None:
    net: Any = Net()
    attributes = tracked(net)
    net.best = net.layer(torch.ones(2)).sum()
    attributes.restore(unpacked(packed(attributes.changed())))
    assert not net.best.requires_grad


class Refuses:
    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


def test_an_attribute_that_refers_to_a_part_of_something_is_bound_again() -> None:
    net: Any = Net()
    net.table = [[0.0], [1.0], [2.0]]
    net.register_buffer("rows", torch.arange(3.0))
    net.weights = [net.layer.weight.data]
    net.hostile = Refuses()
    attributes = tracked(net)
    net.row, net.part, net.stage, net.view = net.table[1], net.rows[1:2], net.mean, net.layer.weight.data[0]
    copies = attributes.changed()
    row, part = net.row, net.part
    net.row, net.part, net.stage = net.table[2], net.rows[2:3], Mean()
    net.layer.weight.data.add_(1)
    attributes.restore(copies)
    assert net.row is row
    assert net.table == [[0.0], [1.0], [2.0]]
    assert net.rows.tolist() == [0.0, 1.0, 2.0]
    assert net.stage is net.mean
    assert net.weights[0].data_ptr() == net.layer.weight.data_ptr() == net.view.data_ptr()
    del part


def test_objects_with_several_names_stay_the_same_object() -> None:
    net, other = Net(), Net()
    for module in (net, other):
        module.best = module.losses
    attributes, of_other = tracked(net), tracked(other)
    net.losses.append(1.0)
    of_other.restore(unpacked(packed(attributes.changed())))
    assert other.losses == [1.0]
    assert other.best is other.losses


def test_deleted_attributes_are_deleted_again() -> None:
    net, other = Net(), Net()
    attributes, of_other = tracked(net), tracked(other)
    del net.name, net.table
    copies = attributes.changed()
    of_other.restore(unpacked(packed(copies)))
    assert not hasattr(other, "name")
    assert not hasattr(other, "table")
    net.name = "later"
    attributes.restore(copies)
    assert not hasattr(net, "name")


def test_an_object_that_other_objects_refer_to_is_not_changed_in_another_process() -> None:
    net: Any = Net()
    net.stages = [Mean(), Mean()]
    net.stage = net.stages[0]
    other: Any = Net()
    other.stages = [Mean(), Mean()]
    other.stage = other.stages[0]
    attributes, of_other = tracked(net), tracked(other)
    net.stage = net.stages[1]
    net.stage.total = 5.0
    of_other.restore(unpacked(packed(attributes.changed())))
    assert other.stages[0].total == 0.0
    assert of_other.lost == {"stage"}


def test_tensors_of_the_inference_mode_are_restored() -> None:
    net: Any = Net()
    attributes = tracked(net)
    with torch.inference_mode():
        net.best, net.center = torch.ones(2), torch.ones(3)
    for _ in range(20):
        copies = attributes.changed()
    with torch.inference_mode():
        net.best.mul_(2)
        net.center = torch.zeros(3)
    attributes.restore(copies)
    assert net.best.tolist() == [1.0, 1.0]
    assert net.center.tolist() == [1.0, 1.0, 1.0]


class Running:
    def __init__(self) -> None:
        self.total = 0.0


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.history: dict[str, list[float]] = {"loss": [], "rate": []}
        self.means = [Running(), Running()]
        self.mean = Running()
        self.layer = nn.Linear(1, 1)
        self.layer.register_buffer("seen", torch.zeros(2), persistent=False)
        self.layer.register_buffer("unused", None, persistent=False)
        self.register_buffer("mask", torch.zeros(5000), persistent=False)
        self.register_buffer("saved", torch.zeros(2))
        self.large = torch.zeros(5000)


@pytest.mark.parametrize("calls", [1, 20])
def test_changes_in_nested_collections_objects_and_buffers_are_noticed_at_each_call(calls: int) -> None:
    net, other = Nested(), Nested()
    attributes, others = TrackedAttributes({"": net, "layer": net.layer}, [""]), TrackedAttributes(
        {"": other, "layer": other.layer}, [""]
    )  # fmt: skip
    for _ in range(calls):
        assert attributes.changed() == {}
    net.history["loss"].append(0.5)
    net.means[1].total, net.mean.total = 2.0, 3.0
    net.layer.seen[0], net.mask[4] = 1.0, 5.0
    net.saved[0] = 7.0
    copies = attributes.changed()
    buffer = other.mask
    others.restore(unpacked(torch_loaded(packed(copies))))
    assert other.history == {"loss": [0.5], "rate": []}
    assert (other.means[1].total, other.mean.total) == (2.0, 3.0)
    assert (other.layer.seen[0], other.mask[4], other.saved[0]) == (1.0, 5.0, 0.0)
    assert other.mask is buffer
    assert not others.lost
    net.history["loss"].append(0.6)
    net.means[1].total, net.layer.seen = 4.0, torch.ones(2)
    attributes.restore(copies)
    assert (net.history["loss"], net.means[1].total, net.layer.seen.tolist()) == ([0.5], 2.0, [1.0, 0.0])
    attributes.restore({})
    assert (net.history["loss"], net.means[1].total, net.layer.seen.tolist(), net.mask[4]) == ([], 0.0, [0.0, 0.0], 0.0)


def test_large_tensors_that_change_are_named() -> None:
    net = Nested()
    attributes = TrackedAttributes({"": net}, [""])
    for _ in range(20):
        attributes.changed()
    assert not attributes.lost
    net.large[0] = 1.0
    attributes.changed()
    assert attributes.lost == {"large"}


def test_tensors_in_collections_and_objects_that_are_a_part_of_weights_are_not_copied() -> None:
    net: Any = Nested()
    net.weights, net.mean.weights = [net.layer.weight.data], net.layer.weight.data
    attributes = TrackedAttributes({"": net}, [""])
    net.layer.weight.data.add_(1.0)
    assert packed(attributes.changed()) == []


def test_buffers_that_are_too_large_in_all_are_named() -> None:
    net = Nested()
    for number in range(3):
        net.register_buffer(f"large_{number}", torch.zeros(2**17 - 2500), persistent=False)
    attributes = TrackedAttributes({"": net}, [""])
    for _ in range(2):
        for buffer in net.buffers():
            buffer.add_(1.0)
        assert attributes.changed().keys() == {("buffers of ", name) for name in ("large_0", "large_1", "mask")}
    assert attributes.lost == {"large_2"}
