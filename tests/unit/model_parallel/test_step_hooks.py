"""Hooks of an optimizer's step, called around it in a separate context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from fabricx.model_parallel.step_hooks import step_beside_hooks


def test_hooks_run_in_their_context_and_the_step_without_hooks() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    calls: list[str] = []

    @contextmanager
    def context() -> Iterator[None]:
        calls.append("begin")
        yield
        calls.append("end")

    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    handle = optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def step() -> str:
        optimizer.step()
        calls.append("step")
        return "result"

    assert step_beside_hooks(optimizer, context, step) == "result"
    assert calls == ["begin", "before", "end", "step", "begin", "after", "end"]
    handle.remove()
    calls.clear()
    optimizer.step()
    assert calls == ["before"]


def test_a_step_that_fails_keeps_the_hooks_and_one_without_hooks_has_no_context() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

    def fail() -> Any:
        raise RuntimeError("no step")

    def context() -> Any:
        raise AssertionError

    with pytest.raises(RuntimeError, match="no step"):
        step_beside_hooks(optimizer, context, fail)
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(AssertionError):
        step_beside_hooks(optimizer, context, optimizer.step)
    assert len(optimizer._optimizer_step_post_hooks) == 1


def test_a_hook_that_replaces_the_arguments_is_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: ((), {}))

    @contextmanager
    def context() -> Iterator[None]:
        yield

    with pytest.raises(ValueError, match="replaces the arguments of the step of SGD"):
        step_beside_hooks(optimizer, context, optimizer.step)
