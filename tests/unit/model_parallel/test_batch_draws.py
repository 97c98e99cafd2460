"""Random numbers of a batch, replayed for its parts; `test_trial_run.py` has steps."""

from __future__ import annotations

import pytest
import torch

from fabricx.model_parallel.batch_draws import BatchDraws, DifferentDraws, rows_of_draw


def test_random_numbers_of_selected_samples_are_found_in_any_dim() -> None:
    drawn = torch.arange(24).view(2, 6, 2)  # of 3 samples, which have 2 entries in dim 1
    part = rows_of_draw(drawn, [2, 2, 2], begin=2, rows=1, total=3)
    assert part is not None
    assert torch.equal(part, drawn[:, 4:6])
    for shape in ([2, 3, 2], [2, 2], [2, 2, 1]):
        assert rows_of_draw(drawn, shape, begin=2, rows=1, total=3) is None


def test_new_tensors_and_changed_ones_are_replayed() -> None:
    draws = BatchDraws(4)
    with draws.record():
        whole = torch.rand(4), torch.empty(3, 4).normal_(), torch.bernoulli(torch.full((4,), 0.5))
    with draws.replay(1, 2):
        part = torch.rand(2), torch.empty(3, 2).normal_(), torch.bernoulli(torch.full((2,), 0.5))
    assert torch.equal(part[0], whole[0][1:3])
    assert torch.equal(part[1], whole[1][:, 1:3])
    assert torch.equal(part[2], whole[2][1:3])


def test_a_draw_that_the_batch_has_not_made_is_an_error() -> None:
    draws = BatchDraws(2)
    with draws.record():
        torch.rand(2)
    with draws.replay(0, 1):
        torch.rand(1)
        with pytest.raises(DifferentDraws, match="in another way"):
            torch.rand(1)
