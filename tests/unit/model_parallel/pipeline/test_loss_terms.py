"""Means over unequal numbers of targets are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fabricx.model_parallel.pipeline.loss_terms import LossTerms

SAMPLES = 4
LOGITS = torch.zeros(SAMPLES, 3, requires_grad=True)
ERRORS = LOGITS.sum(1)  # by sample
FULL, PADDED = torch.tensor([0, 1, 2, 0]), torch.tensor([0, 1, -100, -100])


def compute(loss: Any, *targets: Tensor, shares: tuple[float, ...] = (0.5, 0.5), weighted: bool = False) -> None:
    terms = LossTerms(weighted=weighted)
    for share, target in zip(shares, targets, strict=True):
        with terms:
            value = loss(target)
        terms.end_microbatch(share, value, SAMPLES)
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


def test_means_equal_to_the_mean_of_the_batch_are_not_refused() -> None:
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


MASKED_MEANS: dict[str, Any] = {
    "mean of a selection": lambda used: ERRORS[used].mean(),
    "mean over the first dimension": lambda used: torch.mean(LOGITS[used], dim=(0, 1)),
    "mean by columns": lambda used: LOGITS[used].mean(0).sum(),
    "mean squared error": lambda used: F.mse_loss(LOGITS[used], LOGITS.detach()[used]),
    "cross entropy of probabilities": lambda used: F.cross_entropy(LOGITS[used], LOGITS.softmax(-1).detach()[used]),
    "margin": lambda used: F.triplet_margin_loss(LOGITS[used], LOGITS[used] + 1, LOGITS[used] + 2),
    "nanmean": lambda used: LOGITS.where(used[:, None], torch.nan).nanmean(),
    "batchmean": lambda used: F.kl_div(LOGITS[used], LOGITS.softmax(-1).detach()[used], reduction="batchmean"),
    "elements by a number of terms": lambda used: (ERRORS * used / used.sum()).sum(),
    "sum by a number of terms": lambda used: (ERRORS * used).sum() / used.sum(),
    "sum by a number of terms in place": lambda used: (ERRORS * used).sum().div_(used.sum().item()),
    "within a sum": lambda used: 0.5 * (ERRORS[used].mean() + LOGITS.sum()),
}


@pytest.mark.parametrize("loss", MASKED_MEANS.values(), ids=MASKED_MEANS)
def test_a_mean_over_unequal_numbers_of_terms_is_refused(loss: Any) -> None:
    used = torch.tensor([True, True, False, False])
    with pytest.raises(ValueError, match=r"is a mean over (4, 2|12, 6) .* parts 0\.5, 0\.5 of it.*batch_weight"):
        compute(loss, used | True, used)
    compute(loss, used | True, used, shares=(2 / 3, 1 / 3), weighted=True)
    compute(loss, used | True, used.roll(1) | True)
    compute(lambda used: (loss(used), LOGITS.sum())[1], used | True, used)  # a metric


def test_constants_and_means_by_sample_are_not_refused() -> None:
    first, second = torch.arange(3), torch.arange(1)
    compute(lambda rows: ERRORS[rows].sum() / SAMPLES, first, second, shares=(0.75, 0.25))
    compute(lambda rows: ERRORS[rows].mean() + LOGITS.pow(2).mean(), first, second, shares=(0.75, 0.25))
    compute(lambda rows: LOGITS[rows].mean(1).mean(), first, second, shares=(0.75, 0.25))
    compute(lambda rows: F.mse_loss(LOGITS[rows], LOGITS[rows], reduction="sum"), first, second)
    compute(lambda rows: ERRORS[rows].sum() / len(rows), first, second, shares=(0.75, 0.25))
    half = torch.ones(1000).to(torch.bfloat16)
    compute(lambda used: LOGITS.sum() / used.sum(), half, half[:257], shares=(1000 / 1257, 257 / 1257), weighted=True)
    # A microbatch of weight 0, with a smallest denominator of 1:
    compute(lambda rows: ERRORS[rows].sum() / max(1, len(rows)), first, second[:0], shares=(1.0, 0.0), weighted=True)


SELECTIONS: dict[str, Any] = {
    "topk": lambda errors: errors.topk(2).values.mean(),
    "torch.topk": lambda errors: torch.topk(errors, 2)[0].sum(),
    "sort": lambda errors: errors.sort(descending=True)[0][:2].sum(),
    "median": lambda errors: errors.median(),
    "quantile": lambda errors: torch.quantile(errors, 0.5),
    "kthvalue": lambda errors: errors.kthvalue(2)[0],
}


@pytest.mark.parametrize("loss", SELECTIONS.values(), ids=SELECTIONS)
def test_a_selection_among_samples_is_refused(loss: Any) -> None:
    with pytest.raises(ValueError, match=r"over 4 values of 4 samples.*Select within each sample"):
        compute(lambda target: loss(ERRORS), FULL, FULL)
    with pytest.raises(ValueError, match=r"over 12 values of 4 samples"):
        compute(lambda target: loss(LOGITS.flatten()), FULL, FULL)
    compute(lambda target: (loss(ERRORS), ERRORS.sum())[1], FULL, FULL)  # a metric
    compute(lambda target: loss(ERRORS.detach()) + ERRORS.sum(), FULL, FULL)
    compute(lambda target: LOGITS.topk(2, dim=1)[0].sum() + loss(LOGITS[0]), FULL, FULL)  # within a sample


def test_loops_over_samples_are_not_refused() -> None:
    def loop(lengths: Any) -> Tensor:
        errors = [F.mse_loss(LOGITS[row, :n], LOGITS.detach()[row, :n]) for row, n in enumerate(lengths)]
        return torch.stack(errors).sum() / SAMPLES

    def pooled(lengths: Any) -> Tensor:
        return torch.stack([LOGITS[:n].mean(0) for n in lengths]).pow(2).sum() / SAMPLES

    def hardest(lengths: Any) -> Tensor:
        return torch.stack([torch.cat([row, row[:1]]).topk(2)[0].sum() for row in LOGITS]).mean()

    for loss in (loop, pooled, hardest):
        compute(loss, (1, 2, 3, 1), (3, 3, 3, 3))


def test_loops_over_microbatches_of_two_samples_and_one_are_not_refused() -> None:
    terms = LossTerms(weighted=False)
    for lengths in ((1, 2), (3,)):
        with terms:
            loss = torch.stack([LOGITS[row, :n].mean() for row, n in enumerate(lengths)]).mean()
        terms.end_microbatch(len(lengths) / 3, loss, len(lengths))
    terms.check()


def test_a_term_of_some_microbatches_only_is_refused() -> None:
    def guarded(used: Tensor) -> Tensor:
        return ERRORS.sum() + (ERRORS[used].mean() if used.any() else 0.0)

    used = torch.tensor([True, True, False, False])
    with pytest.raises(ValueError, match="is a mean over 2, 0"):
        compute(guarded, used, used & False)
    with pytest.raises(ValueError, match="is a mean over 0, 2"):
        compute(guarded, used & False, used)
    compute(guarded, used, used)


@pytest.mark.filterwarnings("ignore:size_average and reduce args")
def test_selections_among_parameters_and_sums_by_former_arguments_are_not_refused() -> None:
    knots = torch.nn.Parameter(torch.zeros(8))
    compute(lambda target: knots.sort()[0].sum() + ERRORS.sum() + knots.abs().quantile(0.5), FULL, FULL)
    used = torch.tensor([True, True, False, False])
    compute(lambda used: F.mse_loss(ERRORS[used], ERRORS[used] + 1, False) / SAMPLES, used | True, used)
    compute(lambda used: F.mse_loss(ERRORS[used], ERRORS[used] + 1, size_average=False) / SAMPLES, used | True, used)


def test_a_count_changed_in_place_belongs_to_its_microbatch() -> None:
    number = torch.zeros(())
    used = torch.tensor([True, True, False, False])
    with pytest.raises(ValueError, match="is a mean over 4, 2"):
        compute(lambda used: (ERRORS * used).sum() / number.copy_(used.sum()), used | True, used)


@pytest.mark.parametrize(
    "normalise", [torch.nn.utils.spectral_norm, torch.nn.utils.parametrizations.spectral_norm], ids=["old", "new"]
)
def test_spectral_normalisation_of_a_layer_before_the_loss_is_no_mean(normalise: Any) -> None:
    torch.manual_seed(0)
    # the norm differs between microbatches, by a power iteration in each
    layers = torch.nn.Sequential(torch.nn.Linear(3, 64), normalise(torch.nn.Linear(64, 64)), torch.nn.Linear(64, 3))
    compute(lambda target: F.cross_entropy(layers(LOGITS + 1), target), FULL, FULL)
