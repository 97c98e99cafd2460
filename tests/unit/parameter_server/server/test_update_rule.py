"""State of update rules: a rule that starts with the state of another rule computes the same updates."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fabricx.parameter_server.gradients import Gradient
from fabricx.parameter_server.server.update_rule import Correction, Outer
from fabricx.parameter_server.wire.messages import RuleState, ServerInit
from tests.unit.parameter_server.server.test_server import SIZE, begin


def initial(**settings: Any) -> ServerInit:
    init, _ = begin(**settings)
    return init


def moved(number: int) -> Gradient:
    return Gradient(torch.arange(SIZE) / 7 - number / 3)


def test_nesterov_momentum_resumes_between_the_rounds_of_a_velocity_update() -> None:
    init = initial(workers=3, outer="nesterov", outer_lr=0.7, outer_momentum=0.9)
    whole = Outer(copy.deepcopy(init))
    for number in range(5):  # the newest velocity has 3 of these rounds
        whole.update(moved(number), None)
    saved = whole.state()
    for piece, (start, stop) in zip(init.pieces, init.shard.spans, strict=True):
        piece.data = whole.values[start:stop].view(piece.shape).clone()
    resumed = Outer(
        replace(init, rule=RuleState({n: tensor.clone() for n, tensor in saved.tensors.items()}, saved.rounds))
    )
    for number in range(5, 12):
        whole.update(moved(number), None)
        resumed.update(moved(number), None)
        assert torch.equal(resumed.values, whole.values)


def test_an_adaptive_compensation_continues_after_a_restart() -> None:
    init = initial(workers=1, compensation="dc-adaptive", dc_lambda=0.5, dc_momentum=0.9)
    whole, now, base = Correction(init), torch.ones(SIZE), torch.zeros(SIZE)

    def compensated(correction: Correction, number: int) -> Tensor:
        return correction(moved(number), base, now, 2).dense

    for number in range(4):
        compensated(whole, number)
    assert whole.mean_square is not None
    resumed = Correction(replace(init, rule=RuleState({"mean_square": whole.mean_square.clone()})))
    fresh = Correction(init)
    for number in range(4, 8):
        expected = compensated(whole, number)
        assert torch.equal(compensated(resumed, number), expected)
        assert not torch.equal(compensated(fresh, number), expected)
