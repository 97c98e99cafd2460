"""Restarts of all workers after failures, and the limits of recovery in place."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fabricx.callbacks import FaultRecovery
from fabricx.errors import WorkerFailed
from fabricx.fault_tolerance.controller import ElasticPolicy
from fabricx.session.status import FailureLog
from fabricx.strategies import DDP, AsyncSGD
from fabricx.trainer import restart, worker_run


@pytest.mark.parametrize("recovering", [True, False])
def test_a_death_that_was_not_recovered_in_place_counts_once(
    recovering: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = WorkerFailed("rank 1 failed:\n\nkilled", rank=1, traceback="killed")
    log = FailureLog(errors=["rank 2 failed: killed"])
    if recovering:
        log.errors.append("rank 1 failed: killed")
        error.not_in_place = "recovery in place failed on rank 0: ValueError: of a hook"
    job: Any = SimpleNamespace(ckpt_path=None)
    callback: Any = SimpleNamespace(restarts_after=lambda error, step: True)
    error.exhausted = True
    assert not restart.restarts(job, tmp_path, [callback], log, None, error)
    error.exhausted = False
    assert restart.restarts(job, tmp_path, [callback], log, None, error)
    wanted = "rank 1 failed: killed" + f"; {error.not_in_place}" * recovering
    assert log.errors == ["rank 2 failed: killed", wanted]
    assert capsys.readouterr().err == f"{wanted}\nall workers restart from step 0\n"


def test_workers_at_their_own_pace_have_the_limits_of_fault_recovery_and_do_not_wait() -> None:
    recovery = FaultRecovery(max_restarts=1, min_ranks=2, patience=5.0)
    assert worker_run.elastic_policy(AsyncSGD(), [recovery]) == ElasticPolicy(least=2, tries=1)
    assert worker_run.elastic_policy(DDP(), [recovery]) == ElasticPolicy(waits=5.0, least=2, tries=1)
    assert worker_run.elastic_policy(AsyncSGD(), []) == ElasticPolicy()
