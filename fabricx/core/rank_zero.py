"""Sets the rank of this process in lightning-utilities, for functions with its decorator `rank_zero_only`."""

from __future__ import annotations

import json
import os
from typing import Any, Final

from lightning_utilities.core import rank_zero

# Variables of torchrun, Open MPI, MPICH, SLURM and LSF. MPI's precede SLURM's: all processes of an mpirun in a SLURM
# job inherit the SLURM_PROCID of its first process.
_VARIABLES: Final = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
_FUNCTION: Final[Any] = rank_zero.rank_zero_only


def set_rank(rank: int) -> None:
    """Set the rank of this process: functions decorated with `rank_zero_only` run on rank 0.

    Args:
        rank: number among all processes of the run.
    """
    _FUNCTION.rank = rank


def launched_rank() -> int | None:
    """Return the rank of this process in the launcher's variables; None without a launcher."""
    rank = next((os.environ[name] for name in _VARIABLES if os.environ.get(name, "").isdigit()), None)
    if rank is None and "SM_CURRENT_HOST" in os.environ:  # SageMaker starts a process on each machine
        return int(json.loads(os.environ.get("SM_HOSTS", "[]")).index(os.environ["SM_CURRENT_HOST"]))
    return None if rank is None else int(rank)


def set_launched_rank() -> None:
    """Set the rank to that of the launcher, or to 0 without a launcher, unless the rank is set already."""
    if getattr(_FUNCTION, "rank", None) is None:
        set_rank(launched_rank() or 0)
