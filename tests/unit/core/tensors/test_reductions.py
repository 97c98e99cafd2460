from __future__ import annotations

import pytest
import torch

from fabricx.core.tensors.reductions import REDUCTIONS, check_reduction


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction_has_a_name_or_is_the_function_of_torch(name: str) -> None:
    assert check_reduction("loss", name) == check_reduction("loss", getattr(torch, name)) == name
    assert check_reduction("loss", name.upper()) == name


@pytest.mark.parametrize("unknown", ["median", torch.median, None])
def test_an_unknown_reduction_is_an_error_with_the_valid_names(unknown: object) -> None:
    with pytest.raises(ValueError, match=r"self.log\('loss'.*unknown reduction.\n  known: mean, sum, max, min"):
        check_reduction("loss", unknown)
