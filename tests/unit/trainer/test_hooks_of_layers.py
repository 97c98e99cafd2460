"""Hooks of layers: numbers in workers, and hooks that return to the caller's module."""

from __future__ import annotations

import pickle
import threading
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fabricx import by_value
from fabricx.testing import TinyModule
from fabricx.trainer.attributes import AttributesBefore
from fabricx.trainer.hooks_of_layers import reserve_numbers
from tests.unit.trainer.test_attributes import changed, sent


def plus(module: Any, arguments: Any, output: Any, *, by: int = 1) -> Any:
    return output + by


def seen(module: Any, gradients: Any, *rest: Any) -> None:
    module.gradients = module.gradients + 1 if hasattr(module, "gradients") else 1


def test_a_hook_registered_by_a_worker_does_not_replace_a_hook_of_the_script() -> None:
    module = nn.Linear(2, 2)
    handle = module.register_forward_hook(plus)
    RemovableHandle.next_id = handle.id  # as in a process that has not counted it
    reserve_numbers(module)
    module.register_forward_hook(partial(plus, by=10))
    out = nn.functional.linear(torch.ones(2), module.weight, module.bias)
    torch.testing.assert_close(module(torch.ones(2)), out + 11)


def test_hooks_that_a_run_has_registered_return_to_the_caller() -> None:
    caller, worker = TinyModule(), TinyModule()
    worker.layer.load_state_dict(caller.layer.state_dict())
    for module in (caller, worker):
        module.layer.register_forward_hook(plus)
    before = AttributesBefore(worker, None)
    by, lock = 20, threading.Lock()

    def keyword(module: Any, arguments: Any, options: dict[str, Any], output: Any) -> Any:
        return output + by + len(options)

    worker.layer.register_forward_hook(keyword, with_kwargs=True)
    worker.layer.register_forward_hook(lambda *_: lock.locked() or None)  # can't be pickled
    worker.layer.register_forward_hook(nn.Identity())  # of torch
    worker.layer.register_forward_pre_hook(lambda module, arguments: (arguments[0] * 2,))
    worker.layer.register_full_backward_hook(seen)
    worker.layer.register_full_backward_pre_hook(seen)
    received = sent(changed(before, worker, None), {}, {})
    assert len(received.hooks) == 4
    received.absorb(caller, None)
    data = torch.ones(1, caller.layer.in_features, requires_grad=True)
    out = nn.functional.linear(data * 2, caller.layer.weight, caller.layer.bias) + 21
    torch.testing.assert_close(caller.layer(data), out)
    caller.layer(data).sum().backward()
    assert caller.layer.gradients == 2
    assert changed(before, TinyModule(), None).hooks == []


def test_handles_in_attributes_remove_the_hooks_of_the_caller_and_a_removed_hook_is_removed_there() -> None:
    caller = TinyModule()
    caller.handle = caller.layer.register_forward_hook(plus, with_kwargs=False, always_call=True)
    caller.removed = caller.layer.register_forward_hook(partial(plus, by=10), always_call=True)
    pickled = by_value.dumps(caller)
    following = RemovableHandle.next_id
    worker = pickle.loads(pickled)
    reserve_numbers(worker)
    before = AttributesBefore(worker, None)
    worker.removed.remove()
    worker.added = [worker.layer.register_forward_pre_hook(lambda module, arguments: (arguments[0] * 2,))]
    RemovableHandle.next_id = following  # the caller's process has not counted the new hook
    with by_value.shared_objects({f"module.{name}": part for name, part in worker.named_modules()}):
        attributes = {name: getattr(worker, name) for name in ("handle", "removed", "added")}
        result = by_value.dumps((attributes, changed(before, worker, None)), home=True)
    with by_value.shared_objects({f"module.{name}": part for name, part in caller.named_modules()}):
        attributes, received = pickle.loads(result)
    caller.__dict__.update(attributes)
    received.absorb(caller, None)
    assert list(caller.layer._forward_hooks.values()) == [plus]
    assert len(caller.layer._forward_pre_hooks) == 1
    assert caller.layer._forward_hooks_always_called == {caller.handle.id: True}
    pickle.loads(by_value.dumps(caller))  # for the next run
    caller.added[0].remove()
    caller.handle.remove()
    assert not caller.layer._forward_hooks
    assert not caller.layer._forward_pre_hooks
    assert not caller.layer._forward_hooks_always_called
    assert caller.layer.register_forward_hook(plus).id > caller.added[0].id


def test_a_handle_of_hooks_that_no_longer_exist_is_sent() -> None:
    handle = nn.Linear(2, 2).register_forward_hook(plus)
    received = pickle.loads(by_value.dumps([handle, handle]))
    assert received[0] is received[1]
    received[0].remove()
