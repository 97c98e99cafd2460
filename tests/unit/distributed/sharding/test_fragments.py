"""Fragments of a model as vectors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fabricx.distributed.sharding import fragments
from fabricx.distributed.sharding.fragments import in_fragments


def test_a_vector_has_the_elements_of_the_parameters_in_their_order() -> None:
    module = nn.Linear(2, 3)
    [fragment] = in_fragments(dict(module.named_parameters()), {}, 1, momentum=True)
    assert fragment.flat().tolist() == [*module.weight.flatten().tolist(), *module.bias.tolist()]
    fragment.set(torch.arange(9.0))
    assert module.bias.tolist() == [6.0, 7.0, 8.0]
    parts = fragment.by_name(fragment.velocity)
    assert {name: part.shape for name, part in parts.items()} == {"weight": (3, 2), "bias": (3,)}
    parts["bias"].fill_(1.0)
    assert fragment.velocity.tolist() == [0.0] * 6 + [1.0] * 3
    assert fragment.equal_on_ranks.keys() == {"base", "velocity"}


def test_fragments_follow_the_sizes_of_whole_parameters_and_are_cut_into_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fragments, "_BLOCK", 8)
    parameters = {name: torch.zeros(4, dtype=torch.float64 if name == "d" else None) for name in "abcd"}
    divided = in_fragments(parameters, {"a": 12}, 2, momentum=False)
    assert [(f.number, "".join(f.parameters)) for f in divided] == [(0, "a"), (1, "bc"), (1, "d")]
    assert [f.base.dtype for f in divided] == [torch.float32, torch.float32, torch.float64]
    assert not divided[0].velocity.numel()
