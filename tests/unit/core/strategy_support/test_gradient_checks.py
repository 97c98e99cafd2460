"""Common checks of gradients: the message names the parameter and the remedy."""

from __future__ import annotations

import pytest
from torch import nn

from fabricx.core.strategy_support.gradient_checks import (
    check_dense,
    check_frozen,
    sparse_tables,
    warn_of_lost_residuals,
)
from fabricx.distributed.world import World


def test_only_embeddings_that_are_trained_with_sparse_gradients_are_refused() -> None:
    module = nn.ModuleDict({"dense": nn.Embedding(4, 2), "sparse": nn.Embedding(4, 2, sparse=True)})
    assert sparse_tables(module) == ["sparse"]
    with pytest.raises(ValueError, match="fsdp does not support sparse gradients, which sparse has; set sparse=False"):
        check_dense(module, "fsdp")
    module["sparse"].weight.requires_grad_(False)
    check_dense(module, "fsdp")


def test_a_parameter_that_is_unfrozen_after_set_up_is_refused() -> None:
    layer = nn.Linear(2, 1)
    layer.bias.requires_grad_(False)
    check_frozen(layer, [layer.bias], "mine")
    layer.bias.requires_grad_(True)
    with pytest.raises(ValueError, match="bias was frozen at set-up and is trained now, but mine"):
        check_frozen(layer, [layer.bias], "mine")


def test_one_rank_warns_of_lost_residuals() -> None:
    warn_of_lost_residuals(World(rank=1, size=2))
    with pytest.warns(UserWarning, match="resume with the same number of ranks"):
        warn_of_lost_residuals(World(rank=0, size=2))
