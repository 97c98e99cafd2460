"""Hyperparameters as plain data."""

from __future__ import annotations

import torch
from torch import nn

from fabricx.checkpoint.hyperparameters import is_plain, plain


def test_plain_data_is_json_data_and_other_values_become_strings() -> None:
    shaped = nn.ReLU()
    shaped.shape = torch.Size()  # type: ignore[assignment]  # as environments of torchrl
    hyperparameters = {
        "sizes": (1, 2),
        "nested": {"net": nn.ReLU(), "shaped": shaped},
        3: None,
        "scalar": torch.tensor(2),
    }
    assert not is_plain(hyperparameters)
    texts = {"net": "ReLU()", "shaped": "ReLU()"}
    assert plain(hyperparameters) == {"sizes": [1, 2], "nested": texts, "3": None, "scalar": 2}
    assert is_plain(plain(hyperparameters))
