"""Detects torchrun and SLURM, and reads a process's rank and world size from them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final

from fabricx.distributed.world import World

LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


def detect(environ: Mapping[str, str] | None = None) -> World | None:
    """Return this process's place, without a store; None if nobody but a person has started it.

    >>> found = detect({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"})
    >>> found.rank, found.size, found.local_size
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
    # An interactive shell of SLURM has these too, with a step of its own for the shell: only srun's steps are ranks.
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
    """Return torchrun's name for this launch, which is the same when it starts all again; None without torchrun.

    >>> launch({"TORCHELASTIC_RUN_ID": "a1b2"})
    'a1b2'
    """
    return (os.environ if environ is None else environ).get("TORCHELASTIC_RUN_ID")


def starts_again(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether torchrun would start all processes again, should one die.

    >>> starts_again({"TORCHELASTIC_MAX_RESTARTS": "0"})
    False
    """
    return int((os.environ if environ is None else environ).get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def address(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return host and port of the store: torchrun names both; under SLURM they follow from the job.

    >>> address({"SLURM_JOB_NODELIST": "gpu[07-09,12]", "SLURM_JOB_ID": "123456"})
    ('gpu07', 18456)
    """
    if "MASTER_ADDR" in environ:
        return environ["MASTER_ADDR"], int(environ.get("MASTER_PORT", "29500"))
    nodes = environ.get("SLURM_JOB_NODELIST", environ.get("SLURM_NODELIST", "127.0.0.1"))
    first = re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes.split(",")[0] + ("]" if "[" in nodes.split(",")[0] else ""))
    # All ranks have to come to the same port without talking to each other: the job's number decides.
    return first.rstrip("]"), 15000 + int(environ.get("SLURM_JOB_ID", "0")[-4:])


def on_one_machine(env: Mapping[str, str]) -> bool:
    """Return whether the launcher has started all processes on this machine; False if it doesn't say so.

    >>> on_one_machine({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu07"})
    True
    >>> on_one_machine({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "gpu07"})
    False
    """
    if "RANK" in env and "MASTER_ADDR" in env:
        return env.get("LOCAL_WORLD_SIZE", "") == env["WORLD_SIZE"] or env["MASTER_ADDR"] in LOOPBACK
    return env.get("SLURM_NNODES", env.get("SLURM_JOB_NUM_NODES", "1")) == "1"
