"""Buffers that were changed in place, assigned, registered or removed are restored."""

from __future__ import annotations

import torch
from torch import nn

from fabricx.core.module_state.buffers import BufferMark


def test_buffers_are_restored_after_any_kind_of_change():
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Identity())
    module.register_buffer("average", torch.ones(2))
    module.register_buffer("late", None)
    module[1].register_buffer("mask", torch.zeros(3), persistent=False)
    before, state = dict(module.named_buffers()), {name: value.clone() for name, value in module.state_dict().items()}
    mark = BufferMark(module)
    module[0](torch.randn(4, 2))  # in place
    module.average = torch.full((2,), 0.5)
    module.late = torch.zeros(5)
    module[1].mask = torch.ones(7)
    module.register_buffer("new", torch.ones(1))
    mark.restore()
    assert dict(module.named_buffers()).keys() == before.keys()
    assert all(buffer is before[name] for name, buffer in module.named_buffers())
    assert module.late is None
    assert not hasattr(module, "new")
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())


def test_buffers_of_excluded_parts_keep_their_changes():
    module = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    mark = BufferMark(module, {module[1]})
    module(torch.randn(4, 2))
    mark.restore()
    assert [int(part.num_batches_tracked) for part in module] == [0, 1]
