"""SLURM jobs, with fake commands of SLURM."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fabricx.launch import signals
from fabricx.launch.launcher import Ended, Program
from fabricx.launchers import slurm
from fabricx.launchers.slurm import Slurm

PROGRAM = Program(b"the job", nodes=2, processes=3, gpus=True, gpus_unused=False, stops_at_step=True)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of commands; `sbatch` stores the submitted script."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for name, value in {"LOOK_S": 0.01, "QUEUE_S": 0.0, "LATE_S": 0.0, "CANCEL_S": 3.0}.items():
        monkeypatch.setattr(slurm, name, value)
    write(folder, "sbatch", f'cat "$1" > {tmp_path}/submitted; echo Submitted batch job 7')
    write(folder, "scancel", f'echo "$@" >> {tmp_path}/cancelled')
    write(folder, "srun", "exit 1")  # submitit uses SLURM if this command exists
    write(folder, "squeue", "exit 0")
    return folder


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o700)


def test_a_job_has_a_task_for_each_rank_and_is_lost_when_it_leaves_the_queue_without_results(
    commands: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = Slurm("gpu", account="lab", cpus_per_rank=4, notice_s=90, options={"constraint": "a100"},
                     folder=str(tmp_path / "jobs"))  # fmt: skip
    ended = launcher.run(PROGRAM)
    assert [failure.traceback for failure in ended.failures] == ["its task of job 7 was lost"] * 6
    assert not ended.stopping
    submitted = (tmp_path / "submitted").read_text().splitlines()
    wanted = ("partition=gpu", "account=lab", "nodes=2", "ntasks-per-node=3", "gpus-per-node=3", "cpus-per-task=4",
              "time=60", "signal=USR1@90", "no-requeue", "constraint=a100")  # fmt: skip
    assert {f"#SBATCH --{option}" for option in wanted} <= set(submitted)
    (folder,) = (tmp_path / "jobs").iterdir()
    assert "job 7 of slurm is submitted" in capsys.readouterr().out
    assert folder.stat().st_mode & 0o077 == 0
    assert not list(folder.glob("*.pkl"))  # they contain the job
    assert (tmp_path / "cancelled").read_text() == "7\n"


def test_a_job_that_a_user_has_cancelled_is_not_submitted_again(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for state, stopping in (("CANCELLED", True), ("PREEMPTED", False)):
        write(commands, "squeue", f"echo {state}")
        monkeypatch.setattr(slurm, "_end_of", terminated)
        assert Slurm(folder=str(tmp_path / "jobs")).run(PROGRAM).stopping is stopping


def test_ctrl_c_cancels_a_job_that_has_not_begun(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def pressed(handler: Callable[[int, Any], None]) -> Iterator[None]:
        handler(signal.SIGINT, None)
        yield

    monkeypatch.setattr(signals, "handled", pressed)
    write(commands, "squeue", "echo PENDING")
    with pytest.raises(KeyboardInterrupt):
        Slurm(folder=str(tmp_path / "jobs")).run(PROGRAM)
    assert (tmp_path / "cancelled").read_text() == "7\n"


def terminated(rank: int, task: Any, *, lost: bool) -> Ended:
    return Ended(failures=(slurm._lost(rank, "SIGTERM"),), stopping=True)


def test_the_number_of_cpus_of_gpu_machines_must_be_set(commands: Path, tmp_path: Path) -> None:
    program = dataclasses.replace(PROGRAM, gpus=False, gpus_unused=True)
    write(commands, "sinfo", f'echo "$@" > {tmp_path}/asked; echo gpu:a100:8')
    with pytest.raises(ValueError, match="set accelerator to 'gpu', or to 'cpu'"):
        Slurm("fast", folder=str(tmp_path / "jobs")).run(program)
    assert "--partition=fast" in (tmp_path / "asked").read_text()
    assert not (tmp_path / "submitted").exists()
    write(commands, "sinfo", "echo '(null)'")
    Slurm("slow", folder=str(tmp_path / "jobs")).run(program)
    assert (tmp_path / "submitted").exists()


def test_an_invalid_job_names_the_remedy(commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="cluster='local' has one machine, and num_nodes=2"):
        Slurm(cluster="local", folder=str(tmp_path)).run(PROGRAM)
    write(commands, "sbatch", "echo invalid partition >&2; exit 1")
    with pytest.raises(ValueError, match=r"the job was not submitted: [\s\S]*invalid partition"):
        Slurm(folder=str(tmp_path)).run(PROGRAM)
    assert not list(tmp_path.rglob("*.pkl"))
    (commands / "srun").unlink()
    monkeypatch.setenv("PATH", str(commands))
    with pytest.raises(ValueError, match=r"the job was not submitted: [\s\S]*srun"):
        Slurm(folder=str(tmp_path)).run(PROGRAM)
    for wrong in ({"cluster": "pbs"}, {"time_min": 0}, {"cpus_per_rank": 0}, {"notice_s": 0}, {"time_min": 2}):
        with pytest.raises(ValueError, match="set "):
            Slurm(**wrong)  # type: ignore[arg-type]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'fabricx\[slurm\]'"):
        Slurm()
