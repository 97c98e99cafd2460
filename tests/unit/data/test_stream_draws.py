"""Random numbers of a data source and of the training are independent."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import torch

from fabricx.core.module_state.rng import RandomState
from fabricx.data.stream_draws import OwnDraws


class Noise:
    def __iter__(self) -> Iterator[tuple[float, float, float]]:
        while True:
            yield random.random(), float(np.random.rand()), float(torch.rand(()))


def test_training_and_data_source_have_separate_random_numbers() -> None:
    torch.manual_seed(1)
    alone = [next(draws) for draws in [OwnDraws(Noise())] for _ in range(4)]
    after = RandomState()
    torch.manual_seed(1)
    draws, read, states = OwnDraws(Noise()), [], []
    assert not RandomState().differs(after)  # the training draws the same numbers for any number of batches
    for number in range(4):
        random.seed(number)
        np.random.seed(number)
        torch.manual_seed(number)
        read.append(next(draws))
        states.append(draws.drawn.state)
    assert read == alone
    continued = OwnDraws(Noise(), states[1])
    assert [next(continued), next(continued)] == alone[2:]


def test_each_epoch_has_different_random_numbers() -> None:
    assert next(OwnDraws(Noise())) != next(OwnDraws(Noise()))
