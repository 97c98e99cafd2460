"""Random numbers are repeated from a snapshot, in each form in which it is kept."""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fabricx.core.module_state.rng import (
    GLOBAL_SEED,
    RandomState,
    generators_of,
    random_kept,
    reset_seed,
    seed_everything,
    seed_generators,
    seed_often,
)


def drawn() -> list[Any]:
    """Draw from each generator; normal numbers are drawn in pairs, of which each generator caches the second."""
    return [
        random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.normal()),
        *torch.randn(3).tolist(), *torch.rand(1).tolist(),
    ]  # fmt: skip


FORMS: dict[str, Callable[[RandomState], RandomState]] = {
    "as it is": lambda state: state,
    "packed": lambda state: RandomState.unpacked(pickle.loads(pickle.dumps(state.packed()))),
    "a checkpoint": lambda state: RandomState.of(state.state_dict()),
}


@pytest.fixture(autouse=True)
def own_numbers() -> Any:
    with random_kept():
        seed_everything(3)
        yield


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("before", range(3))
def test_random_numbers_after_a_snapshot_are_drawn_again(form: str, before: int) -> None:
    for _ in range(before):  # in the middle of pairs of normal numbers, too
        drawn()
    kept = FORMS[form](RandomState())
    first = [drawn() for _ in range(2)]
    seed_everything(99)
    kept.restore()
    assert [drawn() for _ in range(2)] == first


@pytest.mark.parametrize(
    "draw", [random.random, lambda: random.gauss(0, 1), np.random.rand, np.random.normal, lambda: random.seed(1)]
)
def test_a_snapshot_has_the_current_state_after_any_draw(draw: Callable[[], Any]) -> None:
    """States are cached, so every kind of change must be detected."""
    for _ in range(3):
        state = RandomState()
        assert state.python == random.getstate()
        wanted: Any = np.random.get_state()
        assert all(np.array_equal(a, b) for a, b in zip(state.numpy, wanted, strict=True))
        draw()


@pytest.mark.parametrize(
    "draw",
    [
        drawn, lambda: [], lambda: [np.random.rand()], lambda: [np.random.normal()], lambda: [random.gauss(0, 1)],
        lambda: [random.random()], lambda: torch.rand(1).tolist(),
    ],
)  # fmt: skip
def test_two_alternating_streams_of_random_numbers_are_independent(draw: Callable[[], list[Any]]) -> None:
    def alone(seed: int) -> list[Any]:
        seed_everything(seed)
        return [draw() for _ in range(6)]

    wanted = [alone(1), alone(2)]
    states, draws = [], list[list[Any]]()
    for seed in (1, 2):
        seed_everything(seed)
        states.append(RandomState())
        draws.append([])
    for turn in range(12):
        states[turn % 2].restore()
        draws[turn % 2].append(draw())
        states[turn % 2] = RandomState()
    assert draws == wanted


def test_random_numbers_are_restored_after_an_error_in_the_block() -> None:
    after = RandomState()
    with contextlib.suppress(KeyError), random_kept():
        drawn()
        raise KeyError
    first = drawn()
    after.restore()
    assert drawn() == first


def test_a_seed_out_of_range_is_refused() -> None:
    assert seed_everything(2**32 - 1) == 2**32 - 1
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match=f"seed={seed}: must be an integer from 0 to 4294967295"):
            seed_everything(seed)


def test_the_seed_of_the_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GLOBAL_SEED, raising=False)
    before = random.getstate()
    reset_seed()
    assert random.getstate() == before
    assert seed_everything() == 0
    assert seed_everything("17", workers=True, verbose=False) == 17  # type: ignore[arg-type]
    numbers = drawn()
    assert seed_everything() == 17
    assert drawn() == numbers
    reset_seed()
    assert drawn() == numbers
    monkeypatch.setenv(GLOBAL_SEED, "many")
    with pytest.raises(ValueError, match="environment variable PL_GLOBAL_SEED='many': must be an integer"):
        seed_everything()
    with pytest.raises(ValueError, match="seed='x': must be an integer"):
        seed_everything("x")  # type: ignore[arg-type]


def test_both_seed_functions_draw_the_same_numbers():
    with random_kept():
        drawn = []
        for seed in (seed_generators, seed_often):
            seed(7)
            drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
        assert drawn[0] == drawn[1]


def test_generators_of_a_module_are_restored() -> None:
    module = nn.Sequential(nn.Module())
    dropout: Any = module[0]
    dropout.torch, dropout.numpy, dropout.python = torch.Generator(), np.random.default_rng(1), random.Random(1)

    def draw() -> list[float]:
        return [float(torch.rand((), generator=dropout.torch)), dropout.numpy.random(), dropout.python.random()]

    restores = [*generators_of(module)]
    first = draw()
    for restore in restores:
        restore()
    assert draw() == first
