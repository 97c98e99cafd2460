"""Names of arguments."""

from __future__ import annotations

from typing import Any

import pytest

import fabricx as fx
from fabricx.core.callback import Callback


def test_a_misspelt_argument_names_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"Trainer has no argument 'device'\. Did you mean 'devices'\?"):
        fx.Trainer(device=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Trainer\(3\): write the argument with its name, such as Trainer\(acc"):
        fx.Trainer(3)  # type: ignore[misc]

    class CustomCallback(Callback):
        def __init__(self, patience: int, **options: Any) -> None:
            self.given = (patience, options)

    assert CustomCallback(patience=3, anything=4).given == (3, {"anything": 4})  # type: ignore[attr-defined]
