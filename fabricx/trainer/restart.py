"""Decides whether all workers of a run start again after a failure, and from which checkpoint."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fabricx.checkpoint import read_manifest
from fabricx.trainer.run_dir import checkpoints_of, newest_whole

if TYPE_CHECKING:
    from pathlib import Path

    from fabricx.core.callback import Callback
    from fabricx.errors import WorkerFailed
    from fabricx.session.status import FailureLog
    from fabricx.telemetry.aggregator import Aggregator
    from fabricx.trainer.run_request import Job


def restarts(
    job: Job, run_dir: Path, callbacks: Iterable[Callback], log: FailureLog, aggregator: Aggregator | None,
    error: WorkerFailed,
) -> bool:  # fmt: skip
    """Prepare a restart from the newest checkpoint of the run; returns False if no callback requests a restart.

    Args:
        job: receives the path of the checkpoint.
        run_dir: folder of the run.
        callbacks: of the run.
        log: receives a line about the error.
        aggregator: records the failure; None without telemetry.
        error: because of which the workers have ended.
    """
    checkpoints = checkpoints_of(run_dir)
    newest = newest_whole(checkpoints) if checkpoints else None
    step: int = read_manifest(newest)["step"] if newest is not None else -1
    progress = max(step, error.reached) if error.__cause__ is None else step  # an error may occur again
    if error.exhausted:
        error.add_remedy(
            f"the run ends, because workers failed {len(log.errors) + 1} times, in the end at the same step each time; "
            "FaultRecovery(max_restarts=...) sets how often it continues without a further step"
        )
        return False
    if not any(callback.restarts_after(error, progress) for callback in callbacks):
        return False
    first = next(line for line in str(error).splitlines() if line)
    what = f"{first} {error.summary}"[:300]
    if error.not_in_place and log.errors:  # the death has been counted
        what = log.errors[-1] = f"{log.errors[-1]}; {error.not_in_place}"[:600]
    else:
        log.errors.append(what)
    log.newest_at = time.time()
    copied = error.reached >= 0  # then a rank reports the steps to train again, when it has restored a copy
    if aggregator is not None:
        again = {} if copied else {"steps_again": float(max(0, aggregator.run.steps - max(0, step)))}
        aggregator.record_event("failure", str(error), **again)
    start = f"from in-memory checkpoints, or from step {max(0, step)}" if copied else f"from step {max(0, step)}"
    print(f"{what}\nall workers restart {start}", file=sys.stderr, flush=True)
    job.ckpt_path = newest or job.ckpt_path
    return True
