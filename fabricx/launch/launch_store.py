"""Store and key of a launch by torchrun, MPI, SLURM or SageMaker.

The launcher's store admits any process that can reach its port. Therefore it is used only once: the first rank writes
the address of the launch's private store (`store_host.py`), which admits only processes with the launch's key. Later
changes of the launcher's store do not affect the run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from torch.distributed import DistStoreError, Store, TCPStore

from fabricx.distributed.membership.deaths import DEATHS
from fabricx.distributed.messages import authentication
from fabricx.distributed.messages.authentication import AuthenticationError, sign, tag, verify
from fabricx.distributed.store.client import PrivateStore
from fabricx.distributed.store.server import SOCKET
from fabricx.distributed.world import World
from fabricx.launch import store_host
from fabricx.launch.cluster import address, detect, environment, has_restarts, job, launch, on_one_machine
from fabricx.launch.store_host import COMPLETE, KEY
from fabricx.redaction import printable

ATTEMPT: Final = "attempt"  # key in the launch's store: restarts that the launcher has counted, and its agents
PLACE: Final = "fabricx/place"  # key in the launcher's store: address of the launch's store
LIMIT_S: Final = 300.0  # time limit for all ranks to join
LOOK_S: Final = 0.05  # seconds between two reads of a store
JOIN_S: Final = 0.5  # seconds after which the first rank checks the launcher's store while it waits for other ranks
MIN_KEY_LENGTH: Final = 32  # fewest characters of a user's key
_CONNECTED: Final[dict[tuple[str, ...], World]] = {}  # worlds of launches that this process joined, by identity


@dataclass(frozen=True)
class Launch:
    """Properties of a launch that each process reads from its environment.

    Attributes:
        rank: number of this process among all processes, including servers.
        size: number of processes, including servers.
        alone: all processes are on this machine.
        user_key: the user's key; b"" without a key.
        names: values that identify this launch in all its attempts; included in every signature.
        host: name of the first rank's machine.
        restarts: restarts of this process as counted by torchrun.
        restarted: torchrun starts all processes again after the loss of a process.
    """

    rank: int
    size: int
    alone: bool
    user_key: bytes
    names: tuple[str, ...]
    host: str
    restarts: int = 0
    restarted: bool = False


def connect(world: World, environ: Mapping[str, str] | None = None) -> World:
    """Join the launch. Collective: every process of the launch calls it.

    Args:
        world: the world of this process, without a store.
        environ: environment variables; None: those of the launch.

    Returns:
        the world with the shared store and the key of the run.

    Raises:
        ValueError: the user's key is invalid.
        AuthenticationError: processes of the launch have different keys, or a foreign program wrote to the launcher's
            store.
        RuntimeError: not all processes joined within five minutes.
    """
    env = environment() if environ is None else environ
    detected, alone = detect(env), on_one_machine(env)
    assert detected is not None
    if alone:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # other machines do not need to reach this process
    agent_hosts_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = address(env)
    names = (host, str(port), launch(env) or "", job(env))
    key, restarts = user_key(env), int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
    info = Launch(detected.rank, detected.size, alone, key or b"", names, host, restarts, has_restarts(env))
    identity = (*names, str(detected.size), str(detected.rank), str(restarts))
    if identity not in _CONNECTED:
        if not (info.user_key or alone) and detected.rank == 0:
            print(
                "no FABRICX_KEY_FILE is set: any program that reaches the ports of this run can impersonate its "
                "processes and change its numbers. Processes therefore exchange plain data only; see docs/security.md",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        launcher_store = _open_launcher_store(env, host=detected.rank == 0 and not agent_hosts_store, alone=alone)
        store, secret = meet(launcher_store, info)
        _CONNECTED[identity] = replace(world, store=store, secret=secret)
    joined = _CONNECTED[identity]
    return replace(world, store=joined.store, secret=joined.secret)


def agreed(world: World, name: str, value: str) -> str:
    """Return the first rank's value; all ranks of a launch call it together, before they are a process group.

    Args:
        world: the world, as returned by `connect`.
        name: of the value, different in each call.
        value: of this rank.
    """
    assert world.store is not None
    if world.main_rank:
        world.store.set(name, value)
    return world.store.get(name).decode()


@dataclass(frozen=True)
class Attempt:
    """A start of all processes of a launch.

    Attributes:
        restarts: restarts before it, as torchrun has counted them. A machine counts neither those that the loss of a
            different machine causes, nor those before it joined.
        agents: the processes that have started the ranks, which are the same in a later attempt: host, process id,
            start time and folder of logs, by rank.
    """

    restarts: int
    agents: list[str]


def attempt(world: World) -> Attempt:
    """Return the present attempt.

    Args:
        world: the world, as returned by `connect`.
    """
    assert world.store is not None
    return Attempt(*json.loads(world.store.get(ATTEMPT)))


def _open_launcher_store(env: Mapping[str, str], *, host: bool, alone: bool) -> TCPStore:
    """Return a connection to torchrun's store; without torchrun, the first rank (`host`) creates the store.

    If all processes are on this machine, the socket is bound to the loopback interface, so that only they can connect.
    """
    name, port = address(env)
    agent_hosts_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    options: dict[str, Any] = {"wait_for_workers": False, "timeout": timedelta(seconds=LIMIT_S)}
    if not alone or agent_hosts_store:
        return TCPStore(name, port, is_master=host, **options)
    if not host:
        return TCPStore("127.0.0.1", port, is_master=False, **options)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        return TCPStore("127.0.0.1", port, is_master=True, master_listen_fd=os.dup(listener.fileno()), **options)


# -- joining ------------------------------------------------------------------------------------------------------


def meet(launcher_store: Store, info: Launch) -> tuple[PrivateStore, bytes]:
    """Wait for all ranks, and return the store of this launch and the key of this attempt.

    The key is derived from the user's key (on a single machine: from a key that the first rank writes to a private
    file) and from random bytes of this attempt, so that messages recorded from an earlier attempt or run are useless.

    Args:
        launcher_store: the launcher's store.
        info: the launch.

    Returns:
        the store, and the key; b"" if the processes are on several machines without a user's key.

    Raises:
        AuthenticationError: a rank has a different key, or a foreign program wrote to the launcher's store.
        RuntimeError: not all ranks joined within five minutes.
    """
    return _lead(launcher_store, info) if info.rank == 0 else _follow(launcher_store, info)


def _derived(info: Launch, key: bytes, token: bytes) -> tuple[bytes, bytes]:
    """Return the key for connections to the store, and the key of the run."""
    names = info.names
    return tag(key, ["store", *names], token), tag(key, ["run", *names], token) if key else b""


def _lead(launcher_store: Store, info: Launch) -> tuple[PrivateStore, bytes]:
    """Start the launch's store and wait for all ranks; called by the first rank."""
    token, key = secrets.token_bytes(), authentication.new_key() if info.alone else info.user_key
    admits, secret = _derived(info, key, token)
    folder, port = store_host.start(admits, key if info.alone else None)
    store = PrivateStore(os.path.join(folder, SOCKET) if info.alone else ("localhost", port), admits)
    location = json.dumps([token.hex(), folder, info.host, port])
    value = sign(info.user_key, [PLACE, *info.names], location.encode()).hex()
    launcher_store.set(PLACE, value)
    _register(store, info)
    _await_all(store, launcher_store, info, value)
    if info.alone:
        os.unlink(Path(folder, KEY))  # all ranks have read it
    store.set(ATTEMPT, json.dumps(_attempt(store, info)))
    store.set(COMPLETE, "")
    return store, secret


def _await_all(store: PrivateStore, launcher_store: Store, info: Launch, value: str) -> None:
    deadline, ranks = time.monotonic() + LIMIT_S, [f"here/{rank}" for rank in range(info.size)]
    while not _all_here(store, ranks):
        if launcher_store.compare_set(PLACE, "", value) != value.encode():  # restored if it was deleted
            raise AuthenticationError(
                f"another program has written to {PLACE!r} in the launcher's store, which has the address of this "
                "launch's store, or a second launch has the same address and port; start each launch with its own port"
            )
        if time.monotonic() > deadline:
            missing = [rank for rank, key in enumerate(ranks) if not store.check([key])]
            raise RuntimeError(
                f"ranks {missing} of this launch did not join within {LIMIT_S:.0f} s; check that their processes run "
                "and reach the first rank's machine"
            )


def _all_here(store: PrivateStore, ranks: list[str]) -> bool:
    """Return whether all ranks have joined, after a short wait for them."""
    with contextlib.suppress(DistStoreError):
        store.wait(ranks, timedelta(seconds=JOIN_S))
        return True
    return False


def _follow(launcher_store: Store, info: Launch) -> tuple[PrivateStore, bytes]:
    """Find and join the launch's store; addresses of earlier attempts are skipped."""
    deadline, last, error = time.monotonic() + LIMIT_S, "", "nothing was written there"
    launcher_store.wait([PLACE], timedelta(seconds=LIMIT_S))
    while time.monotonic() < deadline:
        if (value := launcher_store.get(PLACE).decode("latin-1")) == last:
            time.sleep(LOOK_S)
            continue
        token, folder, host, port = _parse_place(value, info)
        try:
            store, secret = _connect_store(info, bytes.fromhex(token), folder, (host, port))
            if _register(store, info):
                store.wait([COMPLETE], timedelta(seconds=LIMIT_S))
                return store, secret
            last, error = value, "a different process has joined that store with this rank"
        except (OSError, RuntimeError, AuthenticationError) as reason:  # the store of an earlier attempt
            error = printable(f"{type(reason).__name__}: {reason}")  # may contain text of a foreign program
            time.sleep(LOOK_S)
    raise RuntimeError(
        f"rank {info.rank} could not join the store of this launch within {LIMIT_S:.0f} s: the first rank was not "
        f"restarted, or another program has written to {PLACE!r} in the launcher's store ({error})"
    )


def _parse_place(value: str, info: Launch) -> tuple[str, str, str, int]:
    """Return token, folder, host and port that the first rank wrote."""
    try:
        token, folder, host, port = json.loads(verify(info.user_key, [PLACE, *info.names], bytes.fromhex(value)))
        return token, folder, host, port
    except (ValueError, TypeError) as error:
        raise AuthenticationError(
            f"{PLACE!r} in the launcher's store is invalid: another program has written to that store "
            f"({printable(str(error))})"
        ) from None


def _connect_store(info: Launch, token: bytes, folder: str, host: tuple[str, int]) -> tuple[PrivateStore, bytes]:
    key = info.user_key
    if info.alone:
        authentication.check_private(folder)
        key = authentication.read_private(Path(folder) / KEY)
    admits, secret = _derived(info, key, token)
    return PrivateStore(os.path.join(folder, SOCKET) if info.alone else host, admits), secret


def _register(store: PrivateStore, info: Launch) -> bool:
    """Register this rank in the store; return whether the rank was not registered before."""
    name = secrets.token_hex(8).encode()
    store.set(f"member/{info.rank}/{name.decode()}", json.dumps([info.restarts, agent()]))
    if store.compare_set(f"here/{info.rank}", b"", name) != name:
        return False
    store.push_at_end(DEATHS, str(info.rank), soon=info.restarted)
    return True


def _attempt(store: PrivateStore, info: Launch) -> tuple[int, list[str]]:
    """Return the fields of `Attempt`."""
    names = store.values([f"here/{rank}" for rank in range(info.size)])
    values = store.values([f"member/{rank}/{name.decode()}" for rank, name in enumerate(names)])
    members: list[tuple[int, str]] = [json.loads(value) for value in values]
    return max(times for times, _ in members), [agent for _, agent in members]


def agent() -> str:
    """Return a unique identification of the launching process: host, process id and start time of the parent.

    A process may launch several times: torchrun's folder of logs is different then.
    """
    logs = ""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:  # in the folder of a rank, in the folder of an attempt
        logs = str(Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[2])
    with contextlib.suppress(OSError, IndexError):
        since = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
        return f"{socket.gethostname()} {os.getppid()} {since} {logs}"
    return f"{socket.gethostname()} {os.getppid()} {logs}"


# -- the user's key -----------------------------------------------------------------------------------------------


def user_key(env: Mapping[str, str]) -> bytes | None:
    """Return the user's key for all processes of a launch; None without a key.

    `FABRICX_KEY` is the text of the key, `FABRICX_KEY_FILE` the path of a file with the text, readable only by its
    owner.

    Args:
        env: environment variables.

    Returns:
        SHA-256 hash of the text, 32 bytes.

    Raises:
        ValueError: the key has fewer than 32 characters, or its file cannot be read or is accessible to other users.
    """
    text, path = env.get("FABRICX_KEY", ""), env.get("FABRICX_KEY_FILE", "")
    if path and not text:
        try:
            status = os.stat(path)
            text = Path(path).read_text()
        except OSError as error:
            raise ValueError(f"FABRICX_KEY_FILE={path} can't be read: {error}") from None
        if status.st_mode & 0o077 or status.st_uid not in (0, os.geteuid()):
            raise ValueError(f"FABRICX_KEY_FILE={path} is accessible to other users; run: chmod 600 {path}")
    if not (text or path):
        return None
    if len(text.strip()) < MIN_KEY_LENGTH:
        raise ValueError(
            f"the key of FABRICX_KEY or FABRICX_KEY_FILE needs at least {MIN_KEY_LENGTH} characters; create one with: "
            "openssl rand -hex 32"
        )
    return hashlib.sha256(text.strip().encode()).digest()
