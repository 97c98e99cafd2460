"""Optimizers of tensors that are not parameters of the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fabricx as fx
from fabricx.testing import QUIET


class Net(fx.Module):
    """A layer, and an optimizer of its parameters and of what a function adds to the module."""

    def __init__(self, add: Callable[[Net], list[Tensor]]) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.body = nn.Sequential(nn.Linear(2, 2))
        added = add(self)
        self.added = lambda: added

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.added()], lr=0.1)


def _tensor(net: Any) -> list[Tensor]:
    net.log_alpha = torch.zeros(1, requires_grad=True)
    return [net.log_alpha]


def _layers(net: Any) -> list[Tensor]:
    net.heads = [nn.Linear(2, 1), nn.Linear(2, 1)]
    return [p for head in net.heads for p in head.parameters()]


def _layers_by_name(net: Any) -> list[Tensor]:
    net.heads = {"a": nn.Linear(2, 1)}
    return list(net.heads["a"].parameters())


def _tensors(net: Any) -> list[Tensor]:
    net.scales = (torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True))
    return list(net.scales)


def _within(net: Any) -> list[Tensor]:
    net.body[0].scale = torch.zeros(1, requires_grad=True)
    return [net.body[0].scale]


def _volatile(net: Any) -> list[Tensor]:
    net.register_buffer("scale", torch.zeros(1, requires_grad=True), persistent=False)
    return [net.scale]


def _nowhere(net: Any) -> list[Tensor]:
    return [torch.zeros(4, 3, requires_grad=True)]


@pytest.mark.parametrize(
    ("add", "text"),
    [
        (_tensor, r"trains self\.log_alpha, .* Assign it as self\.log_alpha = nn\.Parameter\(\.\.\.\)\. .* initial"),
        (_layers, r"Assign it as self\.heads = nn\.ModuleList\("),
        (_layers_by_name, r"Assign it as self\.heads = nn\.ModuleDict\("),
        (_tensors, r"Assign it as self\.scales = nn\.ParameterList\("),
        (_within, r"Assign it as self\.body\.0\.scale = nn\.Parameter\("),
        (_volatile, r"Assign it as self\.scale = nn\.Parameter\("),
        (_nowhere, r"of shapes \[4, 3\]\. Create the optimizer in configure_optimizers, from self\.parameters\(\)"),
    ],
)  # fmt: skip
def test_warning_on_one_rank(add: Callable[[Any], list[Tensor]], text: str) -> None:
    with pytest.warns(UserWarning, match=text):
        fx.Trainer(**QUIET, max_steps=1).fit(Net(add), [torch.ones(2, 2)])


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_epoch_start"])
def test_warning_of_tensors_that_a_hook_adds(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def adds(net: Any) -> None:
        net.trainer.optimizers[0].add_param_group({"params": _tensor(net)})

    monkeypatch.setattr(Net, hook, adds)
    with pytest.warns(UserWarning, match=r"trains self\.log_alpha, .* Assign it as self\.log_alpha"):
        fx.Trainer(**QUIET, max_steps=1).fit(Net(lambda net: []), [torch.ones(2, 2)])


def _parameter(net: Any) -> list[Tensor]:
    net.scale = nn.Parameter(torch.zeros(1))
    return []


def _saved(net: Any) -> list[Tensor]:
    net.register_buffer("scale", torch.zeros(1, requires_grad=True))
    return [net.scale]


@pytest.mark.parametrize("add", [_parameter, _saved])
def test_no_warning_for_values_in_checkpoints(add: Callable[[Any], list[Tensor]]) -> None:
    fx.Trainer(**QUIET, max_steps=1).fit(Net(add), [torch.ones(2, 2)])


def _frozen(net: Any) -> list[Tensor]:
    net.teachers = [nn.Linear(2, 2).requires_grad_(False)]
    return []


def _registered(net: Any) -> list[Tensor]:
    net.order = [net.body, net.layer]
    return []


def test_warning_of_layers_in_a_list_that_no_optimizer_trains() -> None:
    def add(net: Any) -> list[Tensor]:
        _layers(net)
        return []

    text = r"the layers in self\.heads are not in self\.parameters\(\).* assign self\.heads = nn\.ModuleList\("
    with pytest.warns(UserWarning, match=text):
        fx.Trainer(**QUIET, max_steps=1).fit(Net(add), [torch.ones(2, 2)])
    for allowed in (_frozen, _registered):
        fx.Trainer(**QUIET, max_steps=1).fit(Net(allowed), [torch.ones(2, 2)])
