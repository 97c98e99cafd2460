"""Detect torchrun and SLURM, and read rank and world size from their environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final

from fabricx.distributed.world import World

LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


def detect(environ: Mapping[str, str] | None = None) -> World | None:
    """Return the world of this process, without a store; None if neither torchrun nor SLURM started it.

    Args:
        environ: environment variables; None: `os.environ`.

    >>> world = detect({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"})
    >>> world.rank, world.size, world.local_size
    (1, 4, 2)
    """
    env = os.environ if environ is None else environ
    if "RANK" in env and "WORLD_SIZE" in env and "MASTER_ADDR" in env:
        size = int(env["WORLD_SIZE"])
        return World(
            rank=int(env["RANK"]),
            size=size,
            local_rank=int(env.get("LOCAL_RANK", env["RANK"])),
            local_size=int(env.get("LOCAL_WORLD_SIZE", size)),
            node_rank=int(env.get("GROUP_RANK", 0)),
        )
    # SLURM also sets these variables in an interactive shell, a separate job step: only steps of srun are ranks.
    if "SLURM_PROCID" in env and int(env.get("SLURM_NTASKS", "1")) > 1 and env.get("SLURM_JOB_NAME") != "interactive":
        size = int(env["SLURM_NTASKS"])
        nodes = int(env.get("SLURM_NNODES", env.get("SLURM_JOB_NUM_NODES", "1")))
        return World(
            rank=int(env["SLURM_PROCID"]),
            size=size,
            local_rank=int(env["SLURM_LOCALID"]),
            local_size=max(1, size // nodes),
            node_rank=int(env.get("SLURM_NODEID", "0")),
        )
    return None


def launch(environ: Mapping[str, str] | None = None) -> str | None:
    """Return torchrun's id of this launch, which stays the same after restarts; None without torchrun.

    Args:
        environ: environment variables; None: `os.environ`.

    >>> launch({"TORCHELASTIC_RUN_ID": "a1b2"})
    'a1b2'
    """
    return (os.environ if environ is None else environ).get("TORCHELASTIC_RUN_ID")


def has_restarts(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether torchrun restarts all processes after the death of a process.

    Args:
        environ: environment variables; None: `os.environ`.

    >>> has_restarts({"TORCHELASTIC_MAX_RESTARTS": "0"})
    False
    """
    return int((os.environ if environ is None else environ).get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def address(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return host and port of the launcher's store: set by torchrun, derived from the job under SLURM.

    Args:
        environ: environment variables.

    >>> address({"SLURM_JOB_NODELIST": "gpu[07-09,12]", "SLURM_JOB_ID": "123456"})
    ('gpu07', 18456)
    """
    if "MASTER_ADDR" in environ:
        return environ["MASTER_ADDR"], int(environ.get("MASTER_PORT", "29500"))
    nodes = environ.get("SLURM_JOB_NODELIST", environ.get("SLURM_NODELIST", "127.0.0.1"))
    first = re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes.split(",")[0] + ("]" if "[" in nodes.split(",")[0] else ""))
    # All ranks must derive the same port without communication: it depends on the id of the job.
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
    return env.get("SLURM_NNODES", env.get("SLURM_JOB_NUM_NODES", "1")) == "1"
