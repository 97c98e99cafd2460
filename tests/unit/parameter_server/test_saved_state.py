"""Parts of a checkpoint that exist only for strategies with servers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fabricx.distributed.world import World
from fabricx.parameter_server.saved_state import loaded_rule, restore_feedback, saved_rule
from fabricx.parameter_server.worker.protocol import NoProtocol


class RecordsFeedback(NoProtocol):  # type: ignore[misc]
    """Records its error feedback."""

    restored: Any = None

    def load_error_feedback(self, kept: Any) -> None:
        self.restored = kept


def test_a_rule_is_saved_by_name_and_loaded_in_the_order_of_the_optimizers() -> None:
    module = nn.Linear(3, 2)
    parameters = [module.bias, module.weight]
    velocity = [torch.tensor([7.0, 8.0]), torch.arange(6.0).view(2, 3)]
    saved = saved_rule(module, parameters, {"velocity": velocity, "gathered": velocity}, 5)
    assert {name: value.tolist() for name, value in saved["outer"].items()} == {
        "weight": [[0, 1, 2], [3, 4, 5]], "bias": [7, 8],
    }  # fmt: skip
    earlier = {"outer": {"0": torch.tensor([0.0, 1, 2, 3, 4, 5, 7, 8])}}  # in the order of the module
    for state, names, number in ((saved, ["velocity", "gathered"], 5), (earlier, ["velocity"], 0)):
        loaded = loaded_rule(module, parameters, state)
        assert loaded is not None
        tensors, rounds = loaded
        assert ([*tensors], rounds) == (names, number)
        for values in tensors.values():
            assert all(torch.equal(a, b) for a, b in zip(values, velocity, strict=True))


def test_a_rule_of_other_parameters_is_not_loaded() -> None:
    module = nn.Linear(3, 2)
    assert loaded_rule(module, [module.weight, module.bias], {"outer": {"0": torch.zeros(7)}}) is None
    assert loaded_rule(module, [module.weight, module.bias], {}) is None


def test_error_feedback_is_restored_for_as_many_workers_and_servers() -> None:
    protocol = RecordsFeedback()
    restore_feedback({"workers": ["mine"], "servers": [None, None]}, protocol, World(), servers=2)
    assert (protocol.restored, protocol.server_feedback) == ("mine", [None, None])
    restore_feedback(None, protocol, World(), servers=2)
    assert protocol.server_feedback == ()


@pytest.mark.parametrize("kept", [{"workers": ["a", "b"], "servers": [None]}, {"workers": ["a"], "servers": []}])
def test_error_feedback_of_other_workers_or_servers_is_lost_with_a_warning(kept: Any) -> None:
    protocol = RecordsFeedback()
    with pytest.warns(UserWarning, match="the error feedback of compression is lost"):
        restore_feedback(kept, protocol, World(), servers=1)
    assert protocol.restored is None
