"""Records of a step, and the name of the first difference between two records."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fabricx.model_parallel.trial import StepChanged, check_unchanged, first_difference, recorded_step


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.drop, self.second = (
            nn.Linear(4, 4),
            nn.BatchNorm1d(4),
            nn.Dropout(),
            nn.Linear(4, 1),
        )
        self.factor = 1.0

    def forward(self, x):
        return self.second(self.drop(self.norm(self.first(x)))) * self.factor


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def record(net):
    return recorded_step(net, lambda: net(X).square().sum())


def test_recording_does_not_change_the_module():
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    random = torch.get_rng_state()
    record(net)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())


def test_two_records_of_a_module_are_equal_also_with_dropout():
    before, after = record(Net()), record(Net())
    check_unchanged(before, after, [], 1)
    assert first_difference(before, after) == ""
    assert [name for name, _ in before.outputs] == ["first", "norm", "drop", "second"]


def test_the_first_output_that_differs_is_named():
    net = Net()
    before = record(net)
    net.norm.weight.data[2] *= 1.1
    with pytest.raises(StepChanged, match=r"first output that differs is that of norm.*plan=\{'norm\*': 'replicate'\}"):
        check_unchanged(before, record(net), [], 1)


def test_the_order_of_elements_is_compared():
    net = Net()
    before = record(net)
    net.first.weight.data = net.first.weight.data.flip(0)
    net.first.bias.data = net.first.bias.data.flip(0)
    assert first_difference(before, record(net)) == "first"


def test_gradients_wrong_by_a_factor_are_detected():
    net = Net()
    before = record(net)
    net.first.weight.register_hook(lambda gradient: gradient / 2)
    after = record(net)
    with pytest.raises(StepChanged, match=r"the gradient of first\.weight has the norm"):
        check_unchanged(before, after, [], 1)
    assert before.loss == after.loss


def test_norms_of_shards_are_combined_and_norms_of_copies_are_compared_separately():
    before, after = record(Net()), record(Net())
    norm = before.gradients["second.weight"][0]
    after.gradients["second.weight"] = [norm * 0.6, norm * 0.8]
    check_unchanged(before, after, ["second.weight"], 2)
    with pytest.raises(StepChanged, match=r"second\.weight"):
        check_unchanged(before, after, [], 2)


def test_a_different_loss_after_equal_outputs_is_detected():
    net = Net()
    before = record(net)
    net.factor = 2.0
    with pytest.raises(StepChanged, match=r"the loss of the parallelised step.* set weight_decay of the optimizer"):
        check_unchanged(before, record(net), [], 1)


def test_an_error_names_the_submodule_that_raised_it():
    net = Net()
    net.norm.forward = lambda x: x.no_such_method()
    with pytest.raises(StepChanged, match=r"fails in norm, but not in one process: AttributeError: .*'replicate'"):
        record(net)
