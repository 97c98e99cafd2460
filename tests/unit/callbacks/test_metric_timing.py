from __future__ import annotations

from typing import Any

import pytest

from fabricx.callbacks.metric_timing import reads_at_epoch_end


@pytest.mark.parametrize(
    ("schedule", "at_epoch_end"),
    [
        ({}, True),
        ({"val_check_interval": 0.5}, False),
        ({"val_check_interval": 1}, False),  # after each batch: a number of batches, and no fraction
        ({"val_check_interval": "500st"}, False),
        ({"check_val_every_n_epoch": 2}, False),
        ({"check_val_every_n_epoch": None}, False),
        ({"check_val_every_n_epoch": 2, "num_val_batches": [0]}, True),
        ({"check_val_every_n_epoch": 2, "num_val_batches": []}, True),
    ],
    ids=str,
)
def test_a_metric_is_read_when_training_and_validation_metrics_are_complete(
    trainer: Any, schedule: dict[str, Any], at_epoch_end: bool
) -> None:
    run = trainer(**schedule)
    assert reads_at_epoch_end(run, None) is at_epoch_end
    for requested in (True, False):
        assert reads_at_epoch_end(run, requested) is requested
