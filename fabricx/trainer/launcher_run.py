"""A run on ranks that a launcher starts, for the process that has called it, or that takes its place."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from fabricx import by_value
from fabricx.core.callback import recovery_policy_of
from fabricx.core.strategy_parts import HasServers, as_part
from fabricx.errors import Terminated, WorkerFailed
from fabricx.launch import cluster
from fabricx.launch.launcher import Ended, Program
from fabricx.launch.pickling import check_picklable
from fabricx.launch.signals import TERMINATED
from fabricx.telemetry.aggregator import Aggregator
from fabricx.telemetry.logs import LogSettings
from fabricx.trainer.calling_process import Caller
from fabricx.trainer.restart import restarts
from fabricx.trainer.result import shared_names
from fabricx.trainer.set_up import ranks_that_began

if TYPE_CHECKING:
    from fabricx.core.strategy import Strategy
    from fabricx.launch.launcher import Launcher
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
    fits, policy = job.stage == "fit", recovery_policy_of(trainer.callbacks)
    servers = as_part(trainer.strategy, HasServers).servers if fits else 0
    recovers = fits and trainer.writes and policy is not None and policy.max_restarts > 0
    run_dir = os.path.abspath(trainer.run_dir) if recovers and trainer.run_dir is not None else ""
    program = Program(whole, trainer.num_nodes, len(trainer.device_ids), gpus, unused, fits, servers, run_dir)
    ended = launcher.run(program)
    if ended.failures:
        raise _first_failure(ended)
    if ended.result is None:
        raise WorkerFailed("the ranks ended without a result and without a failure", rank=0)
    outcome: Outcome = pickle.loads(ended.result)
    return outcome


@contextlib.contextmanager
def continued(program: Program) -> Iterator[Callable[[Ended], Program | None]]:
    """Take the place of the process that has called the Trainer and has died.

    Args:
        program: of the newest start.

    Yields:
        a function that receives the end of the ranks, and returns the program of the next start; None if the run ends.

    Raises:
        ValueError: this machine does not have the working directory of the process.
    """
    caller, content = pickle.loads(program.job)
    caller.enter()
    trainer, job, logs = pickle.loads(content)
    named = shared_names(trainer, job.module, job.datamodule, trainer.callbacks, trainer.loggers)
    with by_value.shared_objects(named):
        board = any(logger.shows_telemetry for logger in trainer.loggers)
        aggregator = Aggregator(trainer.run_dir, board=board, separate=True) if trainer.enable_telemetry else None
        _announce(f"the process that called fit has died; the run in {trainer.run_dir} continues", aggregator)
        ending = "failed"

        def following(ended: Ended) -> Program | None:
            nonlocal ending
            if not ended.failures:
                ending = "interrupted" if ended.stopping else "success"
                return None
            error = _first_failure(ended)
            if (
                isinstance(error, WorkerFailed)
                and not error.stopping
                and not isinstance(error.__cause__, (KeyboardInterrupt, SystemExit))  # of a hook
                and restarts(job, trainer.run_dir, trainer.callbacks, trainer.failure_log, aggregator, error)
            ):
                job.began_with = ranks_that_began(job)
                content = by_value.dumps((trainer, job, logs))
                return replace(program, job=pickle.dumps((replace(caller, key=secrets.token_hex(32)), content)))
            _announce(f"the run in {trainer.run_dir} has ended: {error}", aggregator)
            return None

        try:
            yield following
        finally:
            if aggregator is not None:
                aggregator.close(ending)


def _announce(text: str, aggregator: Aggregator | None) -> None:
    print(text, file=sys.stderr, flush=True)
    if aggregator is not None:
        aggregator.record_event("caller", text)


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
