from __future__ import annotations

import torch
from torch import nn

from fabricx.model_parallel.pipeline.block_calls import intercept


class Checkpointed(nn.Linear):
    """Overrides `__call__`, as layers of transformers do."""

    def __call__(self, *args, **kwargs):
        return 10 * super().__call__(*args, **kwargs)


def test_calls_pass_through_the_function_before_hooks_and_a_call_of_the_class():
    layer, seen = Checkpointed(2, 2), []
    layer.register_forward_pre_hook(lambda *_: seen.append("hook"))
    inputs = torch.ones(1, 2)
    expected = layer(inputs)
    seen.clear()

    def call(function, args, kwargs):
        seen.append("before")
        return function(*args, **kwargs)

    restore = intercept(layer, call)
    other = Checkpointed(2, 2)
    assert torch.equal(layer(inputs), expected)
    assert seen == ["before", "hook"]
    assert isinstance(layer, Checkpointed)
    assert type(layer).__name__ == "Checkpointed"
    other(inputs)
    assert len(seen) == 2, "other modules of the class are not intercepted"
    restore()
    assert type(layer) is Checkpointed
    layer(inputs)
    assert seen == ["before", "hook", "hook"]


def test_an_interception_may_be_within_another():
    layer, seen = nn.Linear(2, 2), []

    def named(name):
        def call(function, args, kwargs):
            seen.append(name)
            return function(*args, **kwargs)

        return call

    first = intercept(layer, named("inner"))
    second = intercept(layer, named("outer"))
    layer(torch.ones(1, 2))
    assert seen == ["outer", "inner"]
    second()
    first()
    assert type(layer) is nn.Linear
