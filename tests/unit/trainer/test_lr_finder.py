"""Rates of the range test, and the suggested rate."""

from __future__ import annotations

import math

import pytest
import torch

import fabricx as fx
from fabricx.testing import QUIET, TinyModule, tiny_loader
from fabricx.trainer.lr_finder import LRFinder, rate_at, steepest


def test_rates_increase_from_the_minimum_to_the_maximum() -> None:
    assert [rate_at(step, 5, 1.0, 2.0, "linear") for step in range(5)] == [1.0, 1.25, 1.5, 1.75, 2.0]
    rates = [rate_at(step, 5, 1e-4, 1.0, "exponential") for step in range(5)]
    assert rates == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1.0])


def test_the_suggestion_is_where_the_loss_falls_fastest_without_the_ends() -> None:
    finder = LRFinder("linear", 0.0, 1.0, 7)
    assert finder.suggestion() is None
    finder.results = {"lr": [1, 2, 3, 4, 5, 6, 7], "loss": [90.0, 9, 8.9, 8, 3, math.nan, 2]}
    assert finder.suggestion(skip_begin=0) == 1
    assert finder.suggestion(skip_begin=1) == 5
    assert steepest([math.inf, math.nan, 1.0], 0, 0) is None


def test_a_negative_loss_is_no_divergence() -> None:
    class Negative(TinyModule):
        def training_step(self, batch: object, batch_idx: int) -> torch.Tensor:
            return self.layer.weight.sum() * 0 - 1.0

    finder = fx.Tuner(fx.Trainer(**QUIET)).lr_find(Negative(), tiny_loader(), num_training=20, update_attr=False)
    assert finder is not None
    assert len(finder.results["lr"]) == 20
