from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fabricx.callbacks.forward_sizes import forward_sizes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.noise = nn.Linear(4, 2), nn.Dropout(0.5)
        self.unused = nn.Identity()

    def forward(self, first: Tensor, second: Tensor) -> Any:
        assert not torch.is_grad_enabled()
        assert not self.training
        torch.rand(1)
        return self.noise(self.layer(first)), {"second": self.layer(second[:1])}


@pytest.mark.parametrize("example", [(torch.zeros(3, 4),) * 2, dict.fromkeys(("first", "second"), torch.zeros(3, 4))])
def test_the_first_call_of_each_submodule_is_measured_and_the_module_is_not_changed(example: Any) -> None:
    net = Net()
    net.noise.eval()
    before = torch.random.get_rng_state()
    sizes = forward_sizes(net, example, net)
    assert sizes == {"": ([[3, 4], [3, 4]], [[3, 2], "?"]), "layer": ([3, 4], [3, 2]), "noise": ([3, 2], [3, 2])}
    assert torch.equal(torch.random.get_rng_state(), before)
    assert [part.training for part in (net, net.layer, net.noise)] == [True, True, False]
    assert not net.layer._forward_hooks


def test_an_error_of_the_forward_leaves_no_hook() -> None:
    net = Net()
    with pytest.raises(RuntimeError):
        forward_sizes(net, (torch.zeros(3, 5), torch.zeros(3, 4)), net)
    assert net.training
    assert not net.layer._forward_hooks
