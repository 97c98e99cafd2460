"""States of the stages of a pipeline, joined."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fabricx.distributed.world import World
from fabricx.model_parallel.pipeline.stage_states import of_all_stages, without


def test_the_state_of_all_stages_has_the_tensors_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"module": {"a": torch.ones(2), "b": torch.zeros(1)}, "moments": [{"a": {"m": torch.ones(2)}}], "step": 3}
    second = {"module": {"a": torch.zeros(2), "b": torch.ones(1)}, "moments": [{"b": {"m": torch.ones(1)}}], "step": 3}
    sent: list[Any] = []
    monkeypatch.setattr(World, "gather_objects", lambda self, obj: sent.append(obj) or [])
    for state, absent in ((first, {"b"}), (second, {"a"})):
        with pytest.raises(IndexError):  # no return value
            of_all_stages(state, absent, World(size=2))
    monkeypatch.setattr(World, "gather_objects", lambda self, obj: sent)
    joined = of_all_stages(first, {"b"}, World(size=2))
    assert torch.equal(joined["module"]["a"], torch.ones(2))
    assert torch.equal(joined["module"]["b"], torch.ones(1))
    assert {name: list(values) for name, values in joined["moments"][0].items()} == {"a": ["m"], "b": ["m"]}
    assert joined["step"] == 3


def test_a_single_stage_keeps_its_state() -> None:
    state = {"a": torch.ones(1)}
    assert of_all_stages(state, set(), World()) is state
    assert without({"a": 1, "b": [{"a": 2, "c": 3}]}, {"a"}) == {"b": [{"c": 3}]}
