"""A run on ranks that a launcher starts, for the process that has called it."""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fabricx import by_value
from fabricx.core.strategy_parts import HasServers, as_part
from fabricx.errors import Terminated, WorkerFailed
from fabricx.launch import cluster
from fabricx.launch.launcher import Program
from fabricx.launch.pickling import check_picklable
from fabricx.launch.signals import TERMINATED
from fabricx.telemetry.logs import LogSettings
from fabricx.trainer.calling_process import Caller

if TYPE_CHECKING:
    from fabricx.core.strategy import Strategy
    from fabricx.launch.launcher import Ended, Launcher
    from fabricx.trainer.interface import TrainerInterface
    from fabricx.trainer.result import Outcome
    from fabricx.trainer.run_request import Job


def check_launcher_use(launcher: Launcher, strategy: Strategy) -> None:
    """Refuse a launcher where it cannot start the ranks of a run.

    Args:
        launcher: of the trainer.
        strategy: the run's strategy.

    Raises:
        ValueError: another launcher has started this process, or the launcher cannot start the strategy's servers.
    """
    name = type(launcher).__name__
    if (launched := cluster.detect()) is not None and launched.size > 1:
        raise ValueError(
            f"launcher={name}, but another launcher has started this process, as rank {launched.rank} of "
            f"{launched.size}: remove the launcher, or start the script once"
        )
    if (servers := as_part(strategy, HasServers).servers) and not launcher.starts_servers:
        raise ValueError(
            f"launcher={name} starts ranks but no server processes, and {type(strategy).__name__} needs {servers}: "
            "choose launcher=ray or launcher=kubernetes, start the script with torchrun and an additional process for "
            "each server, or choose another strategy"
        )


def run_ranks(
    launcher: Launcher, trainer: TrainerInterface, job: Job, named: Mapping[str, object]
) -> Outcome:  # fmt: skip
    """Run a job on the ranks of a launcher, and return the outcome of the main rank.

    Args:
        launcher: the launcher.
        trainer: the caller's trainer; ranks receive a copy.
        job: validated; its run has a folder.
        named: names of the objects of the job, for the error if an object cannot be pickled.

    Raises:
        WorkerFailed: a rank or a machine failed.
        NotPicklable: an object cannot be pickled; the message names the attribute.
    """
    try:
        content = by_value.dumps((trainer, job, LogSettings.of_this_process()))
    except Exception as error:
        check_picklable(named, error)
        raise
    whole = pickle.dumps((Caller.of_this_process(secrets.token_hex(32)), content))
    gpus = trainer.accelerator == "cuda"
    unused = not gpus and not trainer.accelerator_given
    fits = job.stage == "fit"
    servers = as_part(trainer.strategy, HasServers).servers if fits else 0
    program = Program(whole, trainer.num_nodes, len(trainer.device_ids), gpus, unused, fits, servers)
    ended = launcher.run(program)
    if ended.failures:
        raise _first_failure(ended)
    if ended.result is None:
        raise WorkerFailed("the ranks ended without a result and without a failure", rank=0)
    outcome: Outcome = pickle.loads(ended.result)
    return outcome


def _first_failure(ended: Ended) -> BaseException:
    """Return the error to raise: the earliest failure that is not a consequence of another failure."""
    failures = ended.failures
    first = min(failures, key=lambda failure: (failure.secondary, failure.error is not None, failure.at))
    others = sorted({failure.rank for failure in failures} - {first.rank})
    also = f"\n(rank {', '.join(map(str, others))} failed, too)" if others else ""
    failed = WorkerFailed(
        f"rank {first.rank} failed:\n\n{first.traceback.rstrip()}{also}",
        rank=first.rank,
        traceback=first.traceback,
        summary=first.summary,
    )
    failed.stopping, failed.reached = ended.stopping, ended.reached
    failed.__cause__ = None if first.error is None else pickle.loads(first.error)
    failed.__suppress_context__ = True
    if isinstance(failed.__cause__, SystemExit) and failed.__cause__.code == TERMINATED:
        return Terminated()
    return failed
