"""What torchrun and SLURM tell a process about its place in the world."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

from torch.distributed import Store, TCPStore

from fabricx.comm.world import World


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


def launch(environ: Mapping[str, str] | None = None) -> tuple[str, int] | None:
    """Return torchrun's name for this launch, and how often it has started all processes again; None without torchrun.

    >>> launch({"TORCHELASTIC_RUN_ID": "a1b2", "TORCHELASTIC_RESTART_COUNT": "2"})
    ('a1b2', 2)
    """
    env = os.environ if environ is None else environ
    if "TORCHELASTIC_RUN_ID" not in env:
        return None
    return env["TORCHELASTIC_RUN_ID"], int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))


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


def connect(world: World, environ: Mapping[str, str] | None = None) -> World:
    """Return the world with the store that its ranks share."""
    env = os.environ if environ is None else environ
    host, port = address(env)
    agent_has_it = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store: Store = TCPStore(
        host, port, is_master=world.rank == 0 and not agent_has_it, wait_for_workers=False, timeout=timedelta(minutes=5)
    )
    from torch.distributed import PrefixStore

    # torchrun shares its store between attempts: keys of a dead one must not be read.
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"fabricx/attempt{attempt}"
    return replace(world, store=PrefixStore(prefix, store), second=PrefixStore(prefix, store.clone()))  # type: ignore[attr-defined]
