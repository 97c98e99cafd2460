"""Main module of a rank or server that a launcher has started: `python -m fabricx.trainer.launched_rank FOLDER`."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fabricx import by_value
from fabricx.core.rank_zero import set_launched_rank
from fabricx.core.strategy_parts import HasServers, as_part
from fabricx.distributed import world as worlds
from fabricx.distributed.messages import authentication
from fabricx.launch import cluster
from fabricx.launch.ranks import COPIES
from fabricx.launch.signals import EarlySignals, termination_signals
from fabricx.launch.worker import failure_of
from fabricx.trainer import cluster_run
from fabricx.trainer.set_up import next_job
from fabricx.trainer.worker_run import work


def main(folder: Path, alive: int = 0) -> None:
    """Run the job in the parent of a folder, and write the result or the failure to the folder.

    A file `stopped` there says that a signal has stopped the run.

    Args:
        folder: folder of this rank.
        alive: end of a pipe, of which the parent has the other end.

    Raises:
        SystemExit: with status 1 after a failure.
    """
    threading.Thread(target=_end_with_parent, args=(alive,), daemon=True).start()
    early = EarlySignals()
    rank = int(os.environ["RANK"])
    try:
        with authentication.open_private(folder.parent / "job") as file:
            outcome, stopped = run(file.read(), early, lambda error: _report(folder / "failure", rank, error))
        if stopped:
            (folder / "stopped").touch()
        if rank == 0:
            with (folder / "result").open("wb") as result:
                by_value.dump(outcome, result, home=True)
    except BaseException as error:
        _report(folder / "failure", rank, error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    worlds.leave()


def run(
    job: bytes, early: EarlySignals | None = None, report: Callable[[Exception], None] | None = None
) -> tuple[Any, bool]:  # fmt: skip
    """Run a job in this process.

    Args:
        job: the job of a `Program`.
        early: signals that arrived before; None if the engine's process handles signals.
        report: called with the error before this process ends, if it is blocked for ever; None to print the error.

    Returns:
        the outcome, None on other ranks than the main rank; and whether a signal has stopped the run.
    """
    caller, content = pickle.loads(job)
    caller.enter()
    set_launched_rank()
    by_value.supply_children()
    trainer, work_of_rank, logs = pickle.loads(content)
    return _run(trainer, work_of_rank, logs, early, report), trainer.interrupted


def _run(
    trainer: Any, job: Any, logs: Any, early: EarlySignals | None, report: Callable[[Exception], None] | None
) -> Any:  # fmt: skip
    launched = cluster.detect()
    assert launched is not None
    servers = as_part(trainer.strategy, HasServers).servers if job.stage == "fit" else 0  # else there are none
    if (server := cluster_run.launched_server(servers)) is not None:
        cluster_run.serve_launch(trainer.strategy, server, next_job(), fits=True)
        return None
    world = cluster_run.connected(cluster_run.workers_of(launched, servers), trainer.strategy)
    copies, signals = os.environ.get(COPIES), (signal.SIGINT, *termination_signals())
    with cluster_run.watched(world, report):
        return work(world, trainer, job, logs, signals, early, None if copies is None else Path(copies))


def _report(file: Path, rank: int, error: BaseException) -> None:
    """Write the report of a failure."""
    failure = failure_of(rank, error, time.time())
    file.with_suffix(".new").write_bytes(pickle.dumps(failure))
    file.with_suffix(".new").rename(file)


def _end_with_parent(alive: int) -> None:
    """Kill this process and its child processes when the parent's end of the pipe closes."""
    with contextlib.suppress(ConnectionResetError):  # the parent had not read all that this process has sent
        while os.read(alive, 1):
            pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
