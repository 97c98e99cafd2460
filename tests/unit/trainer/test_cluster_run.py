"""The run that processes continue after a restart by a launcher."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from fabricx.distributed.world import World
from fabricx.launch import cluster, launch_store
from fabricx.launch.launch_store import Attempt
from fabricx.trainer import cluster_run
from fabricx.trainer.cluster_run import Continuation


def begun(root: Path, monkeypatch: pytest.MonkeyPatch, attempt: Attempt, launch: str = "job[12]/*") -> Continuation:
    """Return the run of the first fit in processes that have just started."""
    monkeypatch.setattr(cluster, "launch", lambda: launch)
    monkeypatch.setattr(launch_store, "attempt", lambda world: attempt)
    monkeypatch.setattr(cluster_run, "_FITS", iter([0]))
    run = cluster_run.continue_launch(World(), root, None)
    assert run is not None
    return run


def test_a_run_continues_where_an_agent_of_the_last_attempt_has_started_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = begun(tmp_path, monkeypatch, Attempt(0, ["a", "b"]))
    assert first.restarts == 0
    for number, agents in enumerate((["a", "spare"], ["spare", "other"]), 1):  # not counted: other machines were lost
        again = begun(tmp_path, monkeypatch, Attempt(0, agents))
        assert (again.run_dir, again.restarts) == (first.run_dir, number)
    counted = begun(tmp_path, monkeypatch, Attempt(5, ["other", "a"]))
    assert (counted.run_dir, counted.restarts) == (first.run_dir, 5)


def test_each_attempt_sets_up_with_the_random_numbers_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(restarts: int) -> tuple[float, list[int], float]:
        random.seed(restarts)
        np.random.seed(restarts)
        torch.manual_seed(restarts)
        begun(tmp_path, monkeypatch, Attempt(restarts, ["a"]))
        return random.random(), np.random.permutation(8).tolist(), float(torch.rand(()))

    assert drawn(0) == drawn(1) == drawn(2)


def test_a_later_launch_of_the_same_name_does_not_continue_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, later = (begun(tmp_path, monkeypatch, Attempt(0, [agent])) for agent in ("a", "of a later launch"))
    assert (later.run_dir != first.run_dir, later.restarts) == (True, 0)
    again = begun(tmp_path, monkeypatch, Attempt(1, ["a"]))  # both runs have a marker of this name
    assert (again.run_dir, again.restarts) == (first.run_dir, 1)
    assert begun(tmp_path, monkeypatch, Attempt(0, ["a"]), launch="other").run_dir not in (first.run_dir, later.run_dir)


def test_an_unreadable_marker_is_accepted_if_the_launcher_reports_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = begun(tmp_path, monkeypatch, Attempt(0, ["a"]))
    next((first.run_dir / "recovery").glob("launch-*")).write_text("{")
    again = begun(tmp_path, monkeypatch, Attempt(1, ["a"]))
    assert (again.run_dir, again.restarts) == (first.run_dir, 1)


@pytest.mark.parametrize(
    ("ranks", "omp", "bound", "before", "after"),
    [
        (2, False, 8, 8, 4),
        (3, False, 8, 8, 2),
        (16, False, 8, 8, 1),
        (1, False, 8, 8, 8),
        (0, False, 8, 8, 8),  # unknown
        (2, True, 8, 8, 8),  # of the user
        (2, False, 4, 4, 4),  # the launcher has bound the rank to separate cores
        (2, False, 8, 3, 3),  # the script has set it
    ],
)
def test_ranks_divide_the_cores_unless_something_else_has_limited_their_threads(
    ranks: int, omp: bool, bound: int, before: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = [before]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(bound)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if omp:
        monkeypatch.setenv("OMP_NUM_THREADS", "8")
    cluster_run.share_cores(ranks)
    assert threads[-1] == after
