"""The mode of each submodule is restored after an evaluation, also after an error."""

from __future__ import annotations

import pytest
from torch import nn

from fabricx.core.module_state.evaluation_mode import evaluation_mode


@pytest.mark.parametrize("fails", [False, True])
def test_frozen_submodules_stay_in_evaluation_mode(fails: bool) -> None:
    module = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2))
    module[1].eval()
    try:
        with evaluation_mode(module):
            assert not any(part.training for part in module.modules())
            if fails:
                raise RuntimeError
    except RuntimeError:
        assert fails
    assert [part.training for part in module.modules()] == [True, True, False]
