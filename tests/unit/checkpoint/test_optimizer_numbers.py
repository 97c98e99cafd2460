"""States of optimizers with numbers of parameters."""

from __future__ import annotations

from typing import Any

from fabricx.checkpoint.optimizer_numbers import HELD, numbered


def test_a_state_has_the_numbers_of_torch_and_no_held_gradients() -> None:
    named: dict[str, Any] = {
        "state": {"b": {"step": 3, HELD: 0.5}, "a": {HELD: 0.5}, "c": {"step": 4}, "elsewhere": {"step": 5}},
        "param_groups": [{"lr": 0.1, "params": ["a", "b"]}, {"lr": 0.2, "params": ["c"]}],
    }
    assert numbered(named) == {
        "state": {1: {"step": 3}, 2: {"step": 4}},
        "param_groups": [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": [2]}],
    }
