from __future__ import annotations

import torch
from torch import nn

from fabricx.core.module_state.rng import random_kept
from fabricx.model_parallel.pipeline.seeds import seeded, seeds_of_evaluation


def test_batches_of_an_evaluation_have_random_numbers_of_their_own_without_an_effect_on_training() -> None:
    torch.manual_seed(1)
    before, drawn = torch.get_rng_state(), set()
    for indices in ((0,), (1,), (0, 1)):
        seed = seeds_of_evaluation(indices)
        assert torch.equal(torch.get_rng_state(), before)
        with random_kept():
            seed(0)
            drawn.add(float(torch.rand(())))
    assert len(drawn) == 3


def test_random_numbers_between_blocks_do_not_depend_on_those_that_blocks_draw():
    layers, seeds = nn.Sequential(nn.Dropout(), nn.Linear(2, 2)), []

    def seed(number):
        seeds.append(number)
        torch.manual_seed(number)

    with seeded(layers, ["0", "1"], seed):
        layers[0](torch.ones(2))
        between = torch.rand(2)
        layers[1](torch.ones(2))
    assert seeds == [0, 3, 4, 5, 6]
    torch.manual_seed(4)
    assert torch.equal(between, torch.rand(2))
    assert type(layers[0]) is nn.Dropout
