"""The guide docs/strategy.md: it names every method of the contract, in the order in which a run calls them."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fabricx as fx
from fabricx.core import strategy_parts
from fabricx.core.strategy import Strategy, Traits
from fabricx.strategies import DDP, LocalSGD, Single
from fabricx.testing import QUIET, TinyModule, tiny_loader

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "strategy.md").read_text()
METHODS = [name for name, value in vars(Strategy).items() if callable(value) and not name.startswith("_")]


class Recorded(Strategy):
    """Records the first call of each method."""

    traits = Traits(max_ranks=1)

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name not in METHODS:
            return value

        @functools.wraps(value)
        def noted(*arguments: Any, **options: Any) -> Any:
            if name not in self.calls:
                self.calls.append(name)
            return value(*arguments, **options)

        return noted


class Saves(fx.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:  # the last of an epoch
            trainer.save_checkpoint(self.path)


def calls_of_a_resumed_run(folder: Path) -> list[str]:
    options: dict[str, Any] = {**QUIET, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    first = fx.Trainer(max_epochs=1, callbacks=[Saves(folder / "first.ckpt")], **options)
    first.fit(TinyModule(), tiny_loader(16, 4))
    strategy = Recorded()
    resumed = fx.Trainer(max_epochs=2, strategy=strategy, callbacks=[Saves(folder / "second.ckpt")], **options)
    resumed.fit(TinyModule(), tiny_loader(16, 4), ckpt_path=folder / "first.ckpt")
    return strategy.calls


def table(title: str) -> list[str]:
    """Return the names in the first column of a table of the guide."""
    section = GUIDE.partition(f"## {title}")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`(\w+)", row)]


def test_the_guide_has_all_methods_in_the_order_of_calls(tmp_path: Path) -> None:
    named = table("Methods, in the order of calls")
    assert sorted(named) == sorted(METHODS)
    calls = calls_of_a_resumed_run(tmp_path)
    assert calls == [name for name in named if name in calls]
    assert len(calls) > 12


def test_the_guide_has_all_traits_and_parts() -> None:
    traits = {field.name for field in dataclasses.fields(Traits)} - {"replicas"}  # in the row of `sharded`
    assert set(table("Traits")) == traits
    parts = {name for name, value in vars(strategy_parts).items() if isinstance(value, type) and _is_here(value)}
    assert set(table("Parts that few strategies need")) == parts


def _is_here(part: type) -> bool:
    return part.__module__ == strategy_parts.__name__


def test_the_guide_shows_the_smallest_example() -> None:
    assert (ROOT / "examples" / "plain_ddp.py").read_text() in GUIDE


def test_the_example_of_the_guide_has_the_stated_length() -> None:
    lines = (ROOT / "examples" / "quantized_ddp.py").read_text().count("\n")
    assert f"a complete strategy in {lines} lines" in GUIDE
    assert lines < 60


def test_a_limit_of_elements_holds_without_a_gradient_too() -> None:
    """A pipeline stage may hold no parameter of an optimizer."""
    with_gradient, without = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    with_gradient.grad = torch.tensor([-3.0, 0.5])
    strategy = Strategy()
    strategy.clip_value([with_gradient, without], 1.0)
    assert with_gradient.grad.tolist() == [-1.0, 0.5]
    strategy.clip_value([without], 1.0)
    strategy.clip_value([], 1.0)


def test_each_strategy_has_the_norm_of_the_gradient() -> None:
    """Hooks call `trainer.strategy.gradient_norm`, and the module trains under any strategy."""
    layer, table = nn.Linear(2, 1), nn.Embedding(4, 2, sparse=True)
    layer.weight.grad, layer.bias.grad = torch.tensor([[3.0, 4.0]]), None
    norm = Single().gradient_norm([torch.optim.SGD(layer.parameters())])
    assert norm is not None
    assert float(norm) == 5.0
    table(torch.tensor([1, 1])).sum().backward()  # a row of [2, 2], twice
    norm = DDP().gradient_norm([torch.optim.SGD(table.parameters())])
    assert norm is not None
    assert abs(float(norm) - 8**0.5) < 1e-6  # float32
    assert LocalSGD().gradient_norm([torch.optim.SGD([layer.bias])]) is None
