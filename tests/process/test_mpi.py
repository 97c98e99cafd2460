"""The command, started on each rank by mpirun or srun."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fabricx import checkpoint
from fabricx.checkpoint.reader import weights_of
from tests import warm
from tests.soak import params

FIT = [sys.executable, "-m", "fabricx.cli.main", "fit", "trainer.max_epochs=1", "trainer.precision=64-true",
       "trainer.devices=2", "strategy=ddp"]  # fmt: skip
QUICK: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


def by_srun() -> str:
    """Return the output of two processes with the variables of a job step of srun."""
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "localhost",
           "SLURM_NTASKS": "2", "SLURM_NNODES": "1"}  # fmt: skip
    tasks = [
        warm.Popen(FIT, env={**os.environ, **job, "SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)}, **QUICK)
        for n in range(2)
    ]
    return "".join(task.communicate(timeout=100)[0] for task in tasks)


def by_mpirun() -> str:
    """Return the output of two ranks started by mpirun of MPICH, each through a shell."""
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if mpirun is None:
        pytest.skip("mpirun is not installed: pip install mpich")
    command = [mpirun, "-n", "2", "sh", "-c", '"$@"; exit $?', "sh", *FIT]
    return subprocess.run(command, timeout=100, check=False, **QUICK).stdout


# Interpreters started by mpirun import torch, which takes 6 seconds of CPU time.
@pytest.mark.parametrize("start", params([by_srun], [by_mpirun]))
def test_ranks_of_a_job_launcher_train_in_a_common_folder_as_local_workers_do(own_folder: Path, start: Any) -> None:
    weights = []
    for output in (start(), warm.run(FIT, timeout=100, check=True, **QUICK).stdout):
        folders = set(re.findall(r"^run folder: (\S+)", output, re.MULTILINE))
        assert len(folders) == 1, output
        state = checkpoint.load(Path(folders.pop()) / "checkpoints" / "last.ckpt")
        weights.append(weights_of(state, Path("last.ckpt")))
    assert len(list((own_folder / "runs").iterdir())) == 2
    launched, workers = weights
    assert launched.keys() == workers.keys()
    assert all(torch.equal(launched[name], workers[name]) for name in workers)
