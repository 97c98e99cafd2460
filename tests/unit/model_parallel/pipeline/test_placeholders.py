from __future__ import annotations

import pytest
import torch
from torch import nn

from fabricx.model_parallel.pipeline.placeholders import release, restore


def test_placeholders_use_no_memory_and_are_detected_in_results():
    module = nn.BatchNorm1d(1000)
    weight, before = module.weight, module.weight.detach().clone()
    weight.grad = torch.ones(1000)
    release(module, ["weight", "running_mean", "num_batches_tracked"])
    assert module.weight is weight
    assert weight.requires_grad
    assert weight.grad is None
    assert weight.shape == (1000,)
    assert weight.untyped_storage().nbytes() == 4
    assert weight.isnan().all()
    assert module.running_mean.isnan().all()
    assert module.num_batches_tracked == 0
    assert not module.running_var.isnan().any()
    restore(module, {"weight": before})
    assert module.weight is weight
    assert torch.equal(weight, before)
    assert weight.untyped_storage().nbytes() == 4000


def test_an_unknown_name_is_refused():
    with pytest.raises(LookupError, match="no parameter or buffer 'weigh'"):
        restore(nn.Linear(1, 1), {"weigh": torch.ones(1)})
