"""Gradient hooks are kept, or refused where they would be lost silently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fabricx.distributed.sharding import grad_hooks
from fabricx.distributed.sharding.grad_hooks import (
    check_before_pickling,
    check_before_sharding,
    check_sharded,
    keep_hooks,
    number_of_hooks,
)
from fabricx.errors import NotPicklable

KINDS = ("register_hook", "register_post_accumulate_grad_hook")


def hooked(kind: str) -> nn.Module:
    module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    getattr(module[1].weight, kind)(lambda *_: None)
    return module


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("check", "error"), [(check_before_pickling, NotPicklable), (check_before_sharding, ValueError)]
)
def test_a_module_with_a_gradient_hook_is_refused_with_the_hook_that_may_add_it(
    check: Any, error: Any, kind: str
) -> None:
    check(nn.Linear(1, 1))
    with pytest.raises(error, match=r"1\.weight.*on_fit_start"):
        check(hooked(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_of_a_shard_is_refused_unless_it_waits_for_the_gradient(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    module = hooked(kind)
    check_sharded(module)  # nothing is sharded yet
    monkeypatch.setattr(grad_hooks, "is_dtensor", lambda value: value is module[1].weight)  # type: ignore[index]
    if kind == "register_post_accumulate_grad_hook":
        check_sharded(module)
        return
    with pytest.raises(ValueError, match=r"1\.weight has a hook of register_hook, which is never called"):
        check_sharded(module)


def test_hooks_move_to_the_sharded_parameters() -> None:
    before, calls = dict(hooked(KINDS[1]).named_parameters()), []
    before["0.weight"].register_post_accumulate_grad_hook(calls.append)
    now = {name: nn.Parameter(torch.ones(1)) for name in before} | {"1.weight": before["1.weight"]}
    keep_hooks(before, now)
    now["0.weight"].sum().backward()
    assert calls == [now["0.weight"]]
    assert number_of_hooks(now["1.weight"]) == 1  # the same parameter, and not its hook twice
