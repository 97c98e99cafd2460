"""Validation of the Trainer's options."""

from __future__ import annotations

from typing import Any

import pytest

import fabricx as fx
from fabricx.testing import QUIET


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"val_check_interval": 1.5}, "val_check_interval=1.5: set a fraction of an epoch"),
        ({"val_check_interval": 0}, "val_check_interval=0: "),
        ({"val_check_interval": -3}, "val_check_interval=-3: "),
        ({"num_sanity_val_steps": -2}, "num_sanity_val_steps=-2: set an integer number of batches, -1 or more"),
        ({"num_sanity_val_steps": True}, "num_sanity_val_steps=True: set an integer number of batches"),
        ({"fast_dev_run": -1}, "fast_dev_run=-1: "),
        ({"deterministic": 1}, "deterministic=1: set False, True, 'warn' or 'elastic'"),
        ({"deterministic": 0}, "deterministic=0: "),
        ({"gradient_clip_val": "low"}, "gradient_clip_val='low': set a limit of 0 or more"),
        ({"gradient_clip_val": float("nan")}, "gradient_clip_val=nan: "),
        ({"reload_dataloaders_every_n_epochs": -1}, "reload_dataloaders_every_n_epochs=-1: "),
    ],
)
def test_an_invalid_value_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fx.Trainer(**options, **QUIET)
