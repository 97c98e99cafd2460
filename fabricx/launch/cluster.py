"""Detect torchrun, MPI, SLURM and SageMaker, and read rank and world size from their environment variables."""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from fabricx.distributed.world import World

LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
# Rank, number of ranks, and both on this machine: of Open MPI, and of MPICH and its relatives (Intel MPI, MVAPICH).
# The variables of PMI alone are not sufficient: srun sets them, too.
_MPI: Final = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_MPI_JOBS: Final = ("PMIX_NAMESPACE", "OMPI_MCA_orte_ess_jobid")  # of Open MPI 5 and 4; MPICH has none
_SAGEMAKER_PORT: Final = 7777  # as SageMaker's own launchers use it
_LAUNCHED: Final[list[Mapping[str, str]]] = []  # variables of the launch, within `shows_rank`


def environment() -> Mapping[str, str]:
    """Return the environment variables with which the launcher has started this process, also within `shows_rank`."""
    return _LAUNCHED[0] if _LAUNCHED else os.environ


@contextlib.contextmanager
def shows_rank(world: World) -> Iterator[None]:
    """Set torchrun's variables of ranks to those of a run, for data sets and libraries that divide data by them.

    SLURM and MPI do not set them, and torchrun counts parameter servers, too.

    Args:
        world: rank of this process, and number of ranks that train.
    """
    before = {name: os.environ.get(name) for name in world.variables}
    _LAUNCHED.append(dict(os.environ))
    os.environ.update(world.variables)
    try:
        yield
    finally:
        _LAUNCHED.pop()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def detect(environ: Mapping[str, str] | None = None) -> World | None:
    """Return the world of this process, without a store; None if no launcher has started it.

    Args:
        environ: environment variables; None: those of the launch.

    >>> world = detect({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"})
    >>> world.rank, world.size, world.local_size
    (1, 4, 2)
    """
    env = environment() if environ is None else environ
    if _has_torchruns(env):
        size = int(env["WORLD_SIZE"])
        return World(
            rank=int(env["RANK"]),
            size=size,
            local_rank=int(env.get("LOCAL_RANK", env["RANK"])),
            local_size=int(env.get("LOCAL_WORLD_SIZE", size)),
            node_rank=int(env.get("GROUP_RANK", 0)),
        )
    # Before SLURM: mpirun within a job passes on the variables of the job's first process.
    if (names := _mpi(env)) is not None:
        rank, size, local_rank, local_size = (int(env[name]) for name in names)
        return World(rank, size, local_rank, local_size, node_rank=(rank - local_rank) // local_size)
    # SLURM also sets these variables in an interactive shell, a separate job step: only steps of srun are ranks.
    if _is_srun(env):
        size = int(env["SLURM_NTASKS"])
        nodes = int(env.get("SLURM_NNODES", env.get("SLURM_JOB_NUM_NODES", "1")))
        return World(
            rank=int(env["SLURM_PROCID"]),
            size=size,
            local_rank=int(env["SLURM_LOCALID"]),
            local_size=max(1, size // nodes),
            node_rank=int(env.get("SLURM_NODEID", "0")),
        )
    if len(hosts := _sagemaker_hosts(env)) > 1:
        rank = hosts.index(env["SM_CURRENT_HOST"])
        return World(rank, len(hosts), local_rank=0, local_size=1, node_rank=rank)
    return None


def _has_torchruns(env: Mapping[str, str]) -> bool:
    return "RANK" in env and "WORLD_SIZE" in env and "MASTER_ADDR" in env


def _mpi(env: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the variables of the MPI that has started this process; None without."""
    return next((names for names in _MPI if all(name in env for name in names)), None)


def _is_srun(env: Mapping[str, str]) -> bool:
    return (
        "SLURM_PROCID" in env and int(env.get("SLURM_NTASKS", "1")) > 1 and env.get("SLURM_JOB_NAME") != "interactive"
    )


def _sagemaker_hosts(env: Mapping[str, str]) -> list[str]:
    """Return the names of the machines of a training job of SageMaker, of which the first is the main machine."""
    return list(json.loads(env["SM_HOSTS"])) if "SM_HOSTS" in env and "SM_CURRENT_HOST" in env else []


def unused_devices(environ: Mapping[str, str] | None = None) -> int:
    """Return the number of GPUs of this machine if SageMaker has started a single process on it; else 0.

    Args:
        environ: environment variables; None: those of the launch.
    """
    env = environment() if environ is None else environ
    single = not (_has_torchruns(env) or _mpi(env) or _is_srun(env)) and len(_sagemaker_hosts(env)) > 1
    gpus = int(env.get("SM_NUM_GPUS", "0")) if single else 0
    return gpus if gpus > 1 else 0


def job(environ: Mapping[str, str]) -> str:
    """Return the launcher's number of the job, equal on all ranks; "" if the launcher has none.

    MPICH has none; on a single machine the process that started all ranks identifies the job.

    Args:
        environ: environment variables.

    >>> job({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "77"})
    '77  '
    """
    if (names := _mpi(environ)) is not None:
        job_id = next((environ[name] for name in _MPI_JOBS if name in environ), "")
        return job_id or (_process_without(names[0]) if on_one_machine(environ) else "")
    if len(_sagemaker_hosts(environ)) > 1:
        return environ.get("TRAINING_JOB_NAME", "")
    return " ".join(environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEPID"))


def _process_without(variable: str) -> str:
    """Return the nearest ancestor of this process that has not a variable, with its start time: it started the ranks.

    The parent may be a shell, which a rank has for itself.
    """
    ancestor = os.getppid()
    with contextlib.suppress(OSError):
        while f"\0{variable}=".encode() in b"\0" + Path(f"/proc/{ancestor}/environ").read_bytes():
            ancestor = int(_stat(ancestor)[1])
        return f"{ancestor} {_stat(ancestor)[19]}"
    return str(os.getppid())


def _stat(process: int) -> list[str]:
    """Return the fields of a process in /proc after its name: state, parent, and others; its start time is the 20th."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def launch(environ: Mapping[str, str] | None = None) -> str | None:
    """Return torchrun's id of this launch, which stays the same after restarts; None without torchrun.

    Args:
        environ: environment variables; None: those of the launch.

    >>> launch({"TORCHELASTIC_RUN_ID": "a1b2"})
    'a1b2'
    """
    return (environment() if environ is None else environ).get("TORCHELASTIC_RUN_ID")


def has_restarts(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether torchrun restarts all processes after the death of a process.

    Args:
        environ: environment variables; None: those of the launch.

    >>> has_restarts({"TORCHELASTIC_MAX_RESTARTS": "0"})
    False
    """
    return int((environment() if environ is None else environ).get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def address(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return host and port of the launcher's store: set by torchrun, derived from the job without.

    Args:
        environ: environment variables.

    Raises:
        ValueError: MPI has started ranks on several machines, and no variable has the name of the first.

    >>> address({"SLURM_JOB_NODELIST": "gpu[07-09,12]", "SLURM_JOB_ID": "123456"})
    ('gpu07', 18456)
    """
    if "MASTER_ADDR" in environ:
        return environ["MASTER_ADDR"], int(environ.get("MASTER_PORT", "29500"))
    if _mpi(environ) is not None and on_one_machine(environ):
        # All ranks must derive the same port without communication: it depends on the id of the job.
        derived = 15000 + zlib.crc32(job(environ).encode()) % 10000
        return "127.0.0.1", int(environ.get("MASTER_PORT", derived))
    if hosts := _sagemaker_hosts(environ):
        return hosts[0], _SAGEMAKER_PORT
    if _mpi(environ) is not None:
        raise ValueError(
            "mpirun has started ranks on several machines, and its variables do not contain the name of the first: set "
            "MASTER_ADDR to the machine of rank 0, and MASTER_PORT to a free port on it, for all ranks: mpirun "
            "-x MASTER_ADDR=node0 -x MASTER_PORT=29500 ... with Open MPI, mpirun -genv MASTER_ADDR node0 -genv "
            "MASTER_PORT 29500 ... with MPICH"
        )
    nodes = environ.get("SLURM_JOB_NODELIST", environ.get("SLURM_NODELIST", "127.0.0.1"))
    first = re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes.split(",")[0] + ("]" if "[" in nodes.split(",")[0] else ""))
    return first.rstrip("]"), 15000 + int(environ.get("SLURM_JOB_ID", "0")[-4:])


def on_one_machine(env: Mapping[str, str]) -> bool:
    """Return whether the launcher started all processes on this machine; False if unknown.

    Args:
        env: environment variables.

    >>> on_one_machine({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu07"})
    True
    >>> on_one_machine({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "gpu07"})
    False
    """
    if "RANK" in env and "MASTER_ADDR" in env:
        return env.get("LOCAL_WORLD_SIZE", "") == env["WORLD_SIZE"] or env["MASTER_ADDR"] in LOOPBACK
    if (names := _mpi(env)) is not None:
        return env[names[1]] == env[names[3]]
    if not _is_srun(env) and len(_sagemaker_hosts(env)) > 1:
        return False
    return env.get("SLURM_NNODES", env.get("SLURM_JOB_NUM_NODES", "1")) == "1"
