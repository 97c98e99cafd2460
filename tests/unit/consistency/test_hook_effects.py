"""Weights changed by hooks: weights on servers are protected, and changes on some ranks are sent to all other ranks."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fabricx as fx
from fabricx.callbacks import EMA
from fabricx.consistency.hook_effects import HookChecks, fingerprint
from fabricx.core.strategy import Strategy, Traits
from fabricx.core.strategy_parts import HasServers
from fabricx.errors import RanksDisagree
from fabricx.testing import QUIET, TinyModule, tiny_loader


class OnServer(Strategy, HasServers):
    """A single rank whose weights would be on a server."""

    traits = Traits(max_ranks=1)
    weight_pulls = 0
    overwrites = True


def changes(hook: str, *, restores: bool = False) -> fx.Callback:
    def change(self: Any, trainer: Any, module: Any, *rest: Any) -> None:
        for weight in module.parameters():
            before = weight.detach().clone()
            weight.data.mul_(0.5)  # not detected by torch's version counters
            if restores:
                weight.data.copy_(before)

    made: fx.Callback = type("Changes", (fx.Callback,), {hook: change})()
    return made


def fit(*callbacks: fx.Callback) -> None:
    trainer = fx.Trainer(max_epochs=1, strategy=OnServer(), callbacks=list(callbacks), **QUIET)
    trainer.fit(TinyModule(), tiny_loader(), tiny_loader())


@pytest.mark.parametrize(
    "hook",
    [
        "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_after_backward",
        "on_before_optimizer_step", "on_train_batch_end", "on_validation_end", "on_train_epoch_end",
    ],
)  # fmt: skip
def test_a_hook_that_changes_weights_held_by_servers_is_refused(hook: str) -> None:
    name = "a hook of the validation" if "validation" in hook else "change"
    with pytest.raises(ValueError, match=rf"{name} changes weights, but servers hold the weights"):
        fit(changes(hook))


def test_hooks_that_restore_the_weights_and_weight_averaging_are_accepted() -> None:
    fit(changes("on_train_batch_end", restores=True), EMA(0.5))
    fit(changes("on_train_end"))


@pytest.mark.parametrize("restores", [False, True])
def test_an_optimizer_step_that_changes_weights_held_by_servers_is_refused(restores: bool) -> None:
    class Scales(TinyModule):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer_closure()  # a server would step
            trainer.strategy.optimizer_step = lambda *args: None  # type: ignore[method-assign]
            optimizer.step()
            weight = next(self.parameters())
            before = weight.detach().clone()
            weight.data.mul_(0.5)
            if restores:
                weight.data.copy_(before)

    trainer = fx.Trainer(max_epochs=1, strategy=OnServer(), **QUIET)
    refused = pytest.raises(ValueError, match="optimizer_step changes weights, but servers hold the weights")
    with contextlib.nullcontext() if restores else refused:
        trainer.fit(Scales(), tiny_loader())


def test_an_embedding_with_max_norm_is_refused_if_its_changes_would_be_lost() -> None:
    """Otherwise each rank would have changed different rows; `max_norm` works on a single process."""

    class LooksUp(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(4, 2, max_norm=0.5)

    with pytest.raises(ValueError, match=r"table has max_norm, .* remove max_norm, and scale the vectors"):
        fx.Trainer(max_epochs=1, strategy=OnServer(), **QUIET).fit(LooksUp(), tiny_loader())
    fx.Trainer(max_epochs=1, **QUIET).fit(LooksUp(), tiny_loader())


def trained() -> tuple[HookChecks, Any, list[torch.Tensor]]:
    trainer = fx.Trainer(max_epochs=1, **QUIET)
    module = TinyModule()
    trainer.fit(module, tiny_loader())
    trainer.optimizers[:] = [torch.optim.Adam(module.parameters(), lr=0.1, betas=(0.5, 0.6))]
    return trainer.session.checks, trainer, list(module.parameters())


def test_learning_rates_and_frozen_parameters_are_sent_to_ranks_that_called_no_hook() -> None:
    checks, trainer, parameters = trained()
    noted, group = checks.effects(), trainer.optimizers[0].param_groups[0]
    assert noted.changes() == ""
    group["lr"], group["betas"] = 0.025, (0.1, 0.2)
    parameters[0].requires_grad_(False)
    sent_changes = noted.changes()
    group["lr"], group["betas"] = 0.1, (0.5, 0.6)
    parameters[0].requires_grad_(True)
    checks.apply_changes(sent_changes, idle=True)
    assert (group["lr"], group["betas"], parameters[0].requires_grad) == (0.025, (0.1, 0.2), False)
    assert noted.changes() == sent_changes
    with pytest.raises(RanksDisagree, match="in a batch of which some ranks have no sample"):
        noted.check()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("rows", [4, 9000])
def test_a_fingerprint_detects_changes_that_keep_norms(dtype: torch.dtype, rows: int) -> None:
    module = torch.nn.ParameterList([torch.randn(1 + rows * 4).to(dtype)])
    weight = module[0].data[1:].view(rows, 4)  # not aligned to whole words
    module[0].data[0] = float("nan")
    for change in (
        weight.neg_,
        weight[1].neg_,
        weight[:, 2].neg_,
        lambda: weight.copy_(weight.roll(1, 0)),
        lambda: weight.copy_(weight.roll(1, 1)),
        lambda: weight[2].copy_(weight[2].flip(0)),
        lambda: weight[:3].copy_(weight[:3].flip(0)),
        lambda: weight[3, 3].mul_(1.01),
    ):
        before, same = fingerprint(module), fingerprint(module)
        change()
        assert torch.equal(before, same)
        assert not torch.equal(before, fingerprint(module))


def test_changed_weights_are_an_error_if_they_are_sharded() -> None:
    checks, trainer, parameters = trained()
    noted = checks.effects()
    parameters[0].data.mul_(2.0)
    trainer.strategy.traits = Traits(sharded=True)
    with pytest.raises(RanksDisagree, match="changed weights at a batch of which some ranks have no sample"):
        checks.apply_changes(noted.changes(), idle=True)


@pytest.mark.parametrize(
    ("first", "now", "alike"),
    [
        ([1.0, 2.0], [1.0, 2.001], True), ([1.0, 2.0], [1.0, 2.1], False), ([1.0, 2.0], [1.0, float("nan")], False),
        ([1.0, float("nan")], [1.0, 2.0], False), ([1.0, float("nan")], [1.0005, float("nan")], True),
        ([1.0, float("inf")], [1.0, float("inf")], True), ([1.0, float("inf")], [1.0, 2.0], False),
        ([0.0, 0.0], [0.0, 0.0], True),
    ],
)  # fmt: skip
def test_weights_that_are_no_numbers_on_one_rank_differ(first: list[float], now: list[float], alike: bool) -> None:
    checks: Any = object.__new__(HookChecks)
    checks._strategy = SimpleNamespace(step_ranks=SimpleNamespace(broadcast=lambda tensor: torch.tensor(first)))
    assert (checks._distance(torch.nn.Parameter(torch.tensor(now))) == "alike") is alike
