"""Dims of features after views, permutations and indices."""

from __future__ import annotations

import pytest
import torch

from fabricx.model_parallel.tensor.feature_dims import Features, broadcast, indices, permuted, viewed

SPANS = (("layer", 0, 24),)


@pytest.mark.parametrize(
    ("dims", "before", "after", "expected"),
    [
        ((2,), (2, 6, 24), (12, 24), (1,)),
        ((1,), (12, 24), (2, 6, 24), (2,)),
        ((2,), (2, 6, 24), (2, 6, 3, 4, 2), (2, 3, 4)),
        ((2,), (2, 6, 24), (2, 6, 1, 24), (3,)),
        ((0, 2, 4), (3, 2, 4, 6, 2), (3, 2, 4, 12), (0, 2)),
        ((1, 3), (2, 4, 6, 2), (8, 6, 2), None),  # heads are merged with the batch
        ((2,), (2, 6, 24), (2, 144), None),  # features are merged with the length
        ((2, 3), (2, 6, 4, 6), (2, 6, 24), (2,)),
    ],
)
def test_a_view_divides_or_merges_the_dims_of_features(dims, before, after, expected):
    result = viewed(Features(SPANS, dims), before, after)
    assert (result and result.dims) == expected


def test_a_permutation_moves_the_feature_dims():
    features = Features(SPANS, (2, 3))
    assert permuted(features, torch.Tensor.transpose, [torch.empty(2, 6, 4, 6), 1, 2], {}).dims == (1, 3)
    assert permuted(features, torch.Tensor.permute, [torch.empty(2, 6, 4, 6), (3, 0, 1, 2)], {}).dims == (3, 0)
    assert permuted(Features(SPANS, (1,)), torch.Tensor.mT.__get__, [torch.empty(2, 6)], {}).dims == (0,)


def test_elementwise_operations_keep_feature_dims_and_sums_over_them_do_not():
    features = Features(SPANS, (1, 3))
    assert broadcast(features, (2, 4, 6, 6), (5, 2, 4, 6, 6)).dims == (2, 4)
    assert broadcast(features, (2, 4, 6, 6), (2, 4, 6, 1)).dims == (1,)
    assert broadcast(features, (2, 4, 6, 6), (2, 6, 6)) is None


def test_an_index_with_a_tensor_is_not_followed():
    assert indices((4, 6), torch.tensor([0])) is None
    result = indices((4, 6, 2), (0, None, ..., slice(1, None)))
    assert result is not None
    assert [entry.dim for entry in result] == [0, None, 1, 2]
