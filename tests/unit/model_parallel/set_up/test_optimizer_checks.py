"""Checks for optimizers that step parameters, or elements of parameters, independently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fabricx.model_parallel.set_up.optimizer_checks import check_elementwise, check_separate, is_coupled


@pytest.mark.parametrize(
    "name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD"]
)
def test_elementwise_optimizers_of_torch_are_accepted_and_unchanged(name: str) -> None:
    parameter = nn.Parameter(torch.ones(4, 4))
    optimizer = getattr(torch.optim, name)([parameter], lr=0.0)  # a warm-up may begin with 0
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = repr(optimizer.state)
    check_elementwise(optimizer, "tensor=2")
    assert repr(optimizer.state) == before
    assert torch.equal(parameter, torch.ones(4, 4))
    assert optimizer.param_groups[0]["lr"] == 0.0


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS", "Muon"])
def test_optimizers_of_whole_matrices_are_refused(name: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip("not in this version of torch")
    with pytest.raises(ValueError, match=r"tensor=2 divides .*such as AdamW|tensor=2 divides them: use AdamW"):
        check_elementwise(getattr(torch.optim, name)([nn.Parameter(torch.ones(4, 4))]), "tensor=2")


class OfNorms(torch.optim.Optimizer):
    """Scales each update by the norm of the parameter, as LARS does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.norm() * p.grad)


class OfFour(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        assert len(self.param_groups[0]["params"][0]) == 4
        return super().step(closure)


def test_a_users_optimizer_of_norms_is_refused_as_is_one_that_cannot_be_tried() -> None:
    with pytest.raises(ValueError, match="OfNorms computes an update from a whole matrix"):
        check_elementwise(OfNorms([nn.Parameter(torch.ones(2, 2))]), "tensor=2")
    with pytest.raises(ValueError, match="OfFour fails in a test with a part of a parameter"):
        check_elementwise(OfFour([nn.Parameter(torch.ones(4, 2))]), "tensor=2")


class OfAll(torch.optim.Optimizer):
    """Scales each update by the norm of all gradients; `steps` is changed in place."""

    def __init__(self, parameters: Any, *, closure: bool = False) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.closure, self.steps = closure, [0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.closure:
            closure()
        self.steps[0] += 1
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = float(torch.stack([p.grad.norm() for p in parameters]).norm())
        for p in parameters:
            p.sub_(p.grad / norm)


def test_a_users_optimizer_of_all_parameters_is_refused_where_these_are_on_several_ranks() -> None:
    optimizer = OfAll([nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(ValueError, match="OfAll computes the update of a parameter from several"):
        check_separate(optimizer, "pipeline=2")
    with pytest.raises(ValueError, match="OfAll computes an update from a whole matrix or from several parameters"):
        check_elementwise(optimizer, "tensor=2")
    assert optimizer.steps == [0], "copies of it have stepped"


def test_optimizers_of_separate_parameters_and_untestable_optimizers_are_accepted() -> None:
    parameters = [nn.Parameter(torch.ones(2, 2))]
    check_separate(OfNorms(parameters), "pipeline=2")
    check_separate(torch.optim.AdamW(parameters), "pipeline=2")
    assert not is_coupled(OfAll(parameters, closure=True))
