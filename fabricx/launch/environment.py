"""What torchrun and SLURM tell a process about its place in the world."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Final

from torch.distributed import Store, TCPStore

from fabricx.comm.world import World

RESTARTS: Final = "restarts"  # how often torchrun has started all processes again, by rank, in the store


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


def attempt_of(store: Store, rank: int, size: int) -> int:
    """Return a number, from 1, that all processes have which torchrun has started together, and none from before.

    torchrun's own count differs between machines: one that starts its processes again because those of another have
    died doesn't count that. So the first rank takes the next number, and the others tell it that they are there; the
    number is theirs once it has named them, since what they find may be of processes that are gone.

    Raises:
        RuntimeError: not all came within five minutes.
    """
    current = "fabricx/attempt"
    if rank == 0:
        attempt = store.add("fabricx/attempts", 1)
        store.set(current, str(attempt))
        others = [f"{current}{attempt}/here/{other}" for other in range(1, size)]
        if others:
            store.wait(others)
        store.set(f"{current}{attempt}/members", " ".join(store.get(key).decode() for key in others))
        return attempt
    name, seen, deadline = secrets.token_hex(8), 0, time.monotonic() + 300.0
    store.wait([current])
    while time.monotonic() < deadline:
        attempt = int(store.get(current))
        if attempt != seen:
            store.set(f"{current}{attempt}/here/{rank}", name)
            seen = attempt
        members = f"{current}{attempt}/members"
        if store.check([members]) and name in store.get(members).decode().split():
            return attempt
        time.sleep(0.02)
    raise RuntimeError(f"rank {rank}: the first rank was not started again within 5 minutes")


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


def restarts(world: World) -> int:
    """Return how often torchrun has started all processes again; a machine that has come later doesn't know it."""
    assert world.store is not None
    return max(int(world.store.get(f"{RESTARTS}/{rank}")) for rank in range(world.size))


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
    attempt = attempt_of(store, int(env["RANK"]), int(env["WORLD_SIZE"])) if agent_has_it else 1
    prefix = f"fabricx/attempt{attempt}"
    restarts = max(attempt - 1, int(env.get("TORCHELASTIC_RESTART_COUNT", "0")))
    store.set(f"{prefix}/{RESTARTS}/{world.rank}", str(restarts))
    return replace(world, store=PrefixStore(prefix, store), second=PrefixStore(prefix, store.clone()))  # type: ignore[attr-defined]
