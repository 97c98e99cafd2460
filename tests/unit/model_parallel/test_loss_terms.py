"""Means over unequal numbers of targets are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fabricx.model_parallel.loss_terms import LossTerms

LOGITS = torch.zeros(4, 3, requires_grad=True)
FULL, PADDED = torch.tensor([0, 1, 2, 0]), torch.tensor([0, 1, -100, -100])


def compute(loss: Any, *targets: Tensor, shares: tuple[float, ...] = (0.5, 0.5), weighted: bool = False) -> None:
    terms = LossTerms(weighted=weighted)
    for share, target in zip(shares, targets, strict=True):
        with terms:
            value = loss(target)
        terms.end_microbatch(share, value)
    terms.check()
    terms.check()


def test_a_mean_over_unequal_numbers_of_targets_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cross_entropy is a mean over 4, 2 .* parts 0\.5, 0\.5 of it.*batch_weight"):
        compute(lambda target: F.cross_entropy(LOGITS, target), FULL, PADDED)
    with pytest.raises(ValueError, match=r"nll_loss is a mean over 3, 4"):
        compute(lambda target: LOGITS.sum() + 2 * F.nll_loss(LOGITS, target, ignore_index=2), FULL, FULL.clamp(max=1))
    weight = torch.tensor([1.0, 2.0, 4.0])
    with pytest.raises(ValueError, match=r"is a mean over 8, 4 .* which by batch_weight are parts"):
        compute(lambda target: F.cross_entropy(LOGITS, target, weight), FULL, FULL * 0, weighted=True)


def test_means_that_are_those_of_the_batch_are_not_refused() -> None:
    compute(lambda target: F.cross_entropy(LOGITS, target), FULL, FULL)
    compute(lambda target: F.cross_entropy(LOGITS, target), FULL, PADDED, shares=(2 / 3, 1 / 3), weighted=True)
    compute(lambda target: F.cross_entropy(LOGITS[: len(target)], target), FULL, FULL[:2], shares=(2 / 3, 1 / 3))
    compute(lambda target: F.cross_entropy(LOGITS, target, reduction="sum"), FULL, PADDED)
    compute(lambda target: F.cross_entropy(LOGITS.detach(), target), FULL, PADDED)  # a metric
    compute(lambda target: (F.cross_entropy(LOGITS, target), LOGITS.sum())[1], FULL, PADDED)  # a metric with a graph
    compute(lambda target: F.cross_entropy(LOGITS, target, reduction="none").sum(), FULL, PADDED)
    compute(lambda target: F.cross_entropy(LOGITS, LOGITS.softmax(-1)), FULL, PADDED)
    compute(lambda target: F.mse_loss(LOGITS, LOGITS), FULL, PADDED)
    compute(lambda target: F.cross_entropy(LOGITS, target).detach(), FULL, PADDED)  # refused by the loop
