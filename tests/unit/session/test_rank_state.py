from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torchmetrics
from torch import nn

import fabricx as fx
from fabricx.core.strategy import Traits
from fabricx.distributed.world import World
from fabricx.metrics.collector import Logbook
from fabricx.session.rank_state import BufferCopies, RankState, load_buffers, restore_rank_states

CHANGES = {
    "complex": torch.tensor([1 + 2j, -3j]),
    "large": torch.tensor([2**60 + 1]),  # more than a 64-bit floating point number holds
    "flag": torch.tensor(True),
    "small": torch.tensor([1.5, -2.0, 0.25], dtype=torch.bfloat16),
    "wide": torch.tensor([1 / 3], dtype=torch.float64),
}


def with_buffers() -> nn.Module:
    module = nn.Module()
    for name, value in CHANGES.items():
        module.register_buffer(name, torch.zeros_like(value))
    return module


def test_buffers_of_each_dtype_are_restored_bit_for_bit() -> None:
    trained, replacement = with_buffers(), with_buffers()
    copies = BufferCopies(trained)
    for name, value in CHANGES.items():
        trained.get_buffer(name).copy_(value)
    load_buffers(replacement, copies.packed())
    assert all(torch.equal(replacement.get_buffer(name), value) for name, value in CHANGES.items())


def test_a_buffer_that_is_a_view_is_restored() -> None:
    trained, replacement = nn.Module(), nn.Module()
    for module in (trained, replacement):
        module.register_buffer("column", torch.zeros(3, 4)[:, 1])
    copies = BufferCopies(trained)
    trained.get_buffer("column").copy_(torch.tensor([1.0, 2.0, 3.0]))
    load_buffers(replacement, copies.packed())
    assert replacement.get_buffer("column").tolist() == [1.0, 2.0, 3.0]


def test_a_buffer_with_two_names_is_restored() -> None:
    module = nn.Module()
    module.register_buffer("one", torch.zeros(2))
    module.register_buffer("other", module.one)
    copies = BufferCopies(module)
    point: Any = SimpleNamespace(buffers=copies.take())
    module.get_buffer("one").fill_(3.0)
    packed = copies.packed()
    RankState.restore_buffers(point, module)
    assert module.get_buffer("other").tolist() == [0.0, 0.0]
    load_buffers(module, packed)
    assert module.get_buffer("other").tolist() == [3.0, 3.0]


class Means(fx.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_metric_object_logged_only_by_another_rank_is_reduced_by_all_ranks(rank: int) -> None:
    """A rank at its own pace may have had no batch of the epoch: its object would miss the reduction and the reset."""
    module, updated = Means(), torchmetrics.MeanMetric()
    states = [{"updates": 0, "values": dict(updated.metric_state)}]
    updated.update(2.0)
    states.append({"updates": 1, "values": dict(updated.metric_state)})
    logged: list[dict[str, Any]] = [{}, {"mean": ["mean", ["mean", False, True, False, True, False]]}]
    ranks = [
        {"sums": {}, "objects": {"mean": states[number]}, "logged": logged[number], "position": None}
        for number in range(2)
    ]
    book = Logbook(cast(Any, SimpleNamespace(world=World(), traits=Traits(), module=module)), training=True)
    metrics = cast(Any, SimpleNamespace(training=book))
    restore_rank_states(module, cast(Any, None), metrics, World(), ranks, rank=rank)
    assert list(book.metrics.objects) == ["mean"]
    assert book.metrics.objects["mean"][0] is module.mean


@pytest.mark.parametrize("rank", [0, 1, None])
def test_the_step_of_a_metric_object_is_restored_on_its_rank_and_present_on_all_others(rank: int | None) -> None:
    """A rank without a sample, or another stage of a pipeline, would compute a value while other ranks reduce."""
    module = Means()
    states = {"mean": {"updates": 1, "values": dict(torchmetrics.MeanMetric().metric_state)}}
    kind = ["mean", True, True, False, True, False]
    steps = [None, [torch.tensor(2.0), 3, 4], [torch.tensor(5.0), 3, 8], [torch.tensor(7.0), 2, 8]]
    ranks = [
        {"sums": {}, "objects": states, "logged": {"mean": ["mean", kind, step]}, "position": None} for step in steps
    ]
    book = Logbook(cast(Any, SimpleNamespace(world=World(), traits=Traits(), module=module)), training=True)
    metrics = cast(Any, SimpleNamespace(training=book))
    restore_rank_states(module, cast(Any, None), metrics, World(), ranks, rank=rank)
    restored = float(module.mean._forward_cache), book.updated
    wanted: Any = {0: (0.0, {}), 1: (2.0, {"mean": (3, 4)}), None: (4.0, {"mean": (3, 12)})}  # None: all are joined
    assert restored == wanted[rank]
