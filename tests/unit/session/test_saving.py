"""What a checkpoint contains, and what hooks may read and replace of it."""

from __future__ import annotations

from typing import Any

import pytest

import fabricx as fx
from fabricx.session.callback_states import by_key
from fabricx.session.saving import weights_as_state_dict


class Keyed(fx.Callback):
    def __init__(self, key: str) -> None:
        self.key = key

    @property
    def state_key(self) -> str:
        return self.key


def test_states_of_callbacks_with_the_same_key_are_numbered_in_their_order() -> None:
    callbacks = [Keyed(key) for key in ("a", "b", "a", "a/2", "a")]
    assert by_key(callbacks) == dict(zip(("a", "b", "a/2", "a/2/2", "a/3"), callbacks, strict=True))


@pytest.mark.parametrize("trains", [True, False])
def test_hooks_see_weights_and_position_under_lightning_s_names_and_only_new_weights_are_kept(trains: bool) -> None:
    state: dict[str, Any] = {"strategy": {"module": {"weight": 1}}}
    if trains:
        state["state"] = {"epoch": 3, "step": 40}
    position = {"epoch": 3, "global_step": 40} if trains else {}
    before = {**state, "strategy": {**state["strategy"]}}
    with weights_as_state_dict(state):
        assert state == {**before, "state_dict": {"weight": 1}, **position}
        state["state_dict"]["weight"] = 2  # the same dict
        state["mine"] = "kept"
    assert state == {**before, "strategy": {"module": {"weight": 2}}, "mine": "kept"}
    with weights_as_state_dict(state):
        state["state_dict"] = {"other": 5}
    assert state["strategy"]["module"] == {"other": 5}
    with weights_as_state_dict(state):
        del state["state_dict"]  # by a hook that doesn't want Lightning's entry
    assert state["strategy"]["module"] == {"other": 5}
