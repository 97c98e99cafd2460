"""The rank for `rank_zero_only` of lightning-utilities; `tests/process/test_lightning.py` has several ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest
from lightning_utilities.core.rank_zero import rank_zero_only

from fabricx.core.rank_zero import set_launched_rank, set_rank


def test_the_launchers_rank_is_set_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # restored afterwards
    runs = rank_zero_only(lambda: "ran")
    machines = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}
    for variables, rank in (
        ({}, 0), ({"RANK": "1"}, 1), ({"SLURM_PROCID": "2"}, 2), ({"RANK": "none"}, 0), ({"PMI_RANK": "3"}, 3),
        ({"OMPI_COMM_WORLD_RANK": "1", "SLURM_PROCID": "0"}, 1), (machines, 1),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.delattr(rank_zero_only, "rank")
            for name, value in variables.items():
                patch.setenv(name, value)
            set_launched_rank()
            assert rank_zero_only.rank == rank  # type: ignore[attr-defined]
            assert runs() == (None if rank else "ran")
    set_rank(3)
    set_launched_rank()
    assert rank_zero_only.rank == 3  # type: ignore[attr-defined]


def test_the_rank_is_set_before_the_first_trainer() -> None:
    program = "from fabricx.pytorch.utilities.rank_zero import rank_zero_only as only; print(only(lambda: 'ran')())"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "ran\n"
