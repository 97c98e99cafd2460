"""Synchronised batch normalisation on a single process; tests/process/test_norm.py has several ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabricx.distributed.statistics.sync_batchnorm import synchronise


def test_an_evaluation_without_running_statistics_waits_for_no_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.BatchNorm1d(2, track_running_stats=False)
    synchronised = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False)).eval()
    synchronise(synchronised, torch.device("cpu"))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)  # without a group, a collective would be an error
    batch = torch.randn(4, 2)
    assert torch.equal(synchronised(batch), layer(batch))
