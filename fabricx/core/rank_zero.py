"""The rank of this process for `rank_zero_only` of lightning-utilities, which libraries and projects decorate with."""

from __future__ import annotations

import os
from typing import Any, Final

from lightning_utilities.core import rank_zero

_VARIABLES: Final = ("RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")  # of launchers
_FUNCTION: Final[Any] = rank_zero.rank_zero_only


def set_rank(rank: int) -> None:
    """Set the rank of this process: functions decorated with `rank_zero_only` run on rank 0.

    Args:
        rank: number among all processes of the run.
    """
    _FUNCTION.rank = rank


def set_launched_rank() -> None:
    """Set the rank that a launcher gave this process; 0 without a launcher. A rank that is set already is kept."""
    if getattr(_FUNCTION, "rank", None) is None:
        rank = next((os.environ[name] for name in _VARIABLES if os.environ.get(name, "").isdigit()), "0")
        set_rank(int(rank))
