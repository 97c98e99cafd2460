"""Parts of a checkpoint that only strategies with servers have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fabricx.distributed.world import World
from fabricx.parameter_server.saved_state import restore_feedback, velocity_by_name, velocity_by_parameter
from fabricx.parameter_server.worker.protocol import NoProtocol


class Kept(NoProtocol):  # type: ignore[misc]
    """Notes the error feedback that it is given."""

    restored: Any = None

    def load_error_feedback(self, kept: Any) -> None:
        self.restored = kept


def test_a_velocity_is_saved_by_name_and_loaded_in_the_order_of_the_optimizers() -> None:
    module = nn.Linear(3, 2)
    parameters = [module.bias, module.weight]
    velocity = [torch.tensor([7.0, 8.0]), torch.arange(6.0).view(2, 3)]
    saved = velocity_by_name(module, parameters, velocity)
    assert {name: value.tolist() for name, value in saved.items()} == {
        "weight": [[0, 1, 2], [3, 4, 5]], "bias": [7, 8],
    }  # fmt: skip
    earlier = {"0": torch.tensor([0.0, 1, 2, 3, 4, 5, 7, 8])}  # in the order of the module
    for state in (saved, earlier):
        loaded = velocity_by_parameter(module, parameters, state)
        assert loaded is not None
        assert all(torch.equal(a, b) for a, b in zip(loaded, velocity, strict=True))


def test_a_velocity_of_other_parameters_is_not_loaded() -> None:
    module = nn.Linear(3, 2)
    assert velocity_by_parameter(module, [module.weight, module.bias], {"0": torch.zeros(7)}) is None
    assert velocity_by_parameter(module, [module.weight, module.bias], {}) is None


def test_error_feedback_is_restored_for_as_many_workers_and_servers() -> None:
    protocol = Kept()
    restore_feedback({"workers": ["mine"], "servers": [None, None]}, protocol, World(), servers=2)
    assert (protocol.restored, protocol.server_feedback) == ("mine", [None, None])
    restore_feedback(None, protocol, World(), servers=2)
    assert protocol.server_feedback == ()


@pytest.mark.parametrize("kept", [{"workers": ["a", "b"], "servers": [None]}, {"workers": ["a"], "servers": []}])
def test_error_feedback_of_other_workers_or_servers_is_lost_with_a_warning(kept: Any) -> None:
    protocol = Kept()
    with pytest.warns(UserWarning, match="the error feedback of compression is lost"):
        restore_feedback(kept, protocol, World(), servers=1)
    assert protocol.restored is None
