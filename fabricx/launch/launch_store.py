"""The store and the key of a launch by torchrun or SLURM.

The launcher's store admits everybody who reaches its port. So it is used once: the first rank writes there where the
store of this launch is (`store_host.py`), which admits processes with the launch's key only. Nothing that happens in
the launcher's store after that has any effect on the run.
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

from torch.distributed import Store, TCPStore

from fabricx.distributed import authentication
from fabricx.distributed.authentication import AuthenticationError, sign, tag, verify
from fabricx.distributed.store import PrivateStore
from fabricx.distributed.store_server import SOCKET
from fabricx.distributed.world import World
from fabricx.launch import store_host
from fabricx.launch.cluster import address, detect, launch, on_one_machine
from fabricx.launch.store_host import COMPLETE, KEY
from fabricx.redaction import printable

RESTARTS: Final = "restarts"  # how often torchrun has started all processes again, in the launch's store
PLACE: Final = "fabricx/place"  # where the launch's store is, in the launcher's
ATTEMPTS: Final = "fabricx/attempts"  # how often processes were started, and by which agents, in the launcher's
LIMIT_S: Final = 300.0  # how long ranks wait for each other
LOOK_S: Final = 0.05
SHORTEST: Final = 32  # characters of a user's key
_CONNECTED: Final[dict[tuple[str, ...], World]] = {}  # this process's launch, which it joins once


@dataclass(frozen=True)
class Launch:
    """What the processes of a launch know of it before they meet.

    Attributes:
        rank, size: among all processes, servers included.
        alone: all processes are on this machine.
        given: the user's key; b"" if there is none.
        names: what tells this launch from others; signed with each value.
        host: name of the first rank's machine.
        restarts: how often torchrun says that it has started this process again.
        counted: whether the launcher's store outlives the processes, so that it can count attempts.
    """

    rank: int
    size: int
    alone: bool
    given: bytes
    names: tuple[str, ...]
    host: str
    restarts: int = 0
    counted: bool = False


def connect(world: World, environ: Mapping[str, str] | None = None) -> World:
    """Return the world with the store that its ranks share, and with the run's key; all processes call it.

    Raises:
        ValueError: the user's key can't be used.
        AuthenticationError: processes of the launch have different keys, or another program has written to the
            launcher's store.
        RuntimeError: not all processes came within five minutes.
    """
    env = os.environ if environ is None else environ
    place, alone = detect(env), on_one_machine(env)
    assert place is not None
    if alone:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no other machine has to reach this process
    agent_has_it = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = address(env)
    variables = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEPID")
    names = (host, str(port), str(place.size), launch(env) or "", *(env.get(name, "") for name in variables))
    given, restarts = user_key(env), int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
    own = Launch(place.rank, place.size, alone, given or b"", names, host, restarts, agent_has_it)
    identity = (*names, str(place.rank), str(restarts))
    if identity not in _CONNECTED:
        if not (own.given or alone) and place.rank == 0:
            print(
                "no FABRICX_KEY_FILE is set: any program that reaches the ports of this run can pose as one of its "
                "processes and change its numbers. So processes exchange plain data only; see docs/security.md",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        launchers = _launchers_store(env, host=place.rank == 0 and not agent_has_it, alone=alone)
        store, secret = meet(launchers, own)
        _CONNECTED[identity] = replace(world, store=store, secret=secret)
    joined = _CONNECTED[identity]
    return replace(world, store=joined.store, secret=joined.secret)


def restarts(world: World) -> int:
    """Return how often torchrun has started all processes again."""
    assert world.store is not None
    return int(world.store.get(RESTARTS))


def _launchers_store(env: Mapping[str, str], *, host: bool, alone: bool) -> TCPStore:
    """Return a connection to torchrun's store; without torchrun the first rank hosts it, if `host`.

    Where all processes are on this machine, only they can connect: the socket is bound to the loopback interface.
    """
    name, port = address(env)
    agent_has_it = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    options: dict[str, Any] = {"wait_for_workers": False, "timeout": timedelta(seconds=LIMIT_S)}
    if not alone or agent_has_it:
        return TCPStore(name, port, is_master=host, **options)
    if not host:
        return TCPStore("127.0.0.1", port, is_master=False, **options)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        return TCPStore("127.0.0.1", port, is_master=True, master_listen_fd=os.dup(listener.fileno()), **options)


# -- meeting ------------------------------------------------------------------------------------------------------


def meet(launchers: Store, own: Launch) -> tuple[PrivateStore, bytes]:
    """Return the store of this launch and the key of this attempt, once all ranks have come.

    The key is derived from the user's key, or on one machine from a key that the first rank leaves in a private file,
    and from random bytes of this attempt: what was recorded of an earlier attempt or run is worth nothing.

    Args:
        launchers: the launcher's store.
        own: the launch.

    Returns:
        the store, and the key; b"" if the processes are on several machines and the user gave none.

    Raises:
        AuthenticationError: a rank has another key, or what the launcher's store has is another program's.
        RuntimeError: not all ranks came within five minutes.
    """
    return _lead(launchers, own) if own.rank == 0 else _follow(launchers, own)


def _derived(own: Launch, key: bytes, token: bytes) -> tuple[bytes, bytes]:
    """Return the key of the store's connections and that of the run."""
    names = own.names
    return tag(key, ["store", *names], token), tag(key, ["run", *names], token) if key else b""


def _lead(launchers: Store, own: Launch) -> tuple[PrivateStore, bytes]:
    """Start the launch's store, and wait there for all ranks."""
    token, key = secrets.token_bytes(), authentication.new_key() if own.alone else own.given
    admits, secret = _derived(own, key, token)
    folder, port = store_host.start(admits, key if own.alone else None)
    store = PrivateStore(os.path.join(folder, SOCKET) if own.alone else ("localhost", port), admits)
    place = json.dumps([token.hex(), folder, own.host, port])
    value = sign(own.given, [PLACE, *own.names], place.encode()).hex()
    launchers.set(PLACE, value)
    _say_here(store, own)
    _await_all(store, launchers, own, value)
    if own.alone:
        os.unlink(Path(folder, KEY))  # everybody has read it
    store.set(RESTARTS, str(_count_restarts(store, launchers, own)))
    store.set(COMPLETE, "")
    return store, secret


def _await_all(store: PrivateStore, launchers: Store, own: Launch, value: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not store.check([f"here/{rank}" for rank in range(own.size)]):
        if launchers.compare_set(PLACE, "", value) != value.encode():  # written again if it was deleted
            raise AuthenticationError(
                f"another program has written to {PLACE!r} in the launcher's store, where the ranks of this launch "
                "find each other, or a second launch has the same address and port"
            )
        if time.monotonic() > deadline:
            missing = [rank for rank in range(own.size) if not store.check([f"here/{rank}"])]
            raise RuntimeError(f"ranks {missing} of this launch have not come within {LIMIT_S:.0f} s")
        time.sleep(LOOK_S)


def _follow(launchers: Store, own: Launch) -> tuple[PrivateStore, bytes]:
    """Find the launch's store: what the launcher's says of it may be of an attempt that is over."""
    deadline, last, error = time.monotonic() + LIMIT_S, "", "nothing was written there"
    launchers.wait([PLACE], timedelta(seconds=LIMIT_S))
    while time.monotonic() < deadline:
        if (value := launchers.get(PLACE).decode("latin-1")) == last:
            time.sleep(LOOK_S)
            continue
        token, folder, host, port = _place(value, own)
        try:
            store, secret = _entered(own, bytes.fromhex(token), folder, (host, port))
            if _say_here(store, own):
                store.wait([COMPLETE], timedelta(seconds=LIMIT_S))
                return store, secret
            last, error = value, "another process has this rank there"
        except (OSError, RuntimeError, AuthenticationError) as reason:  # of an attempt that is over
            error = printable(f"{type(reason).__name__}: {reason}")  # it may have words of another program
            time.sleep(LOOK_S)
    raise RuntimeError(
        f"rank {own.rank} could not enter the store of this launch within {LIMIT_S:.0f} s: the first rank was not "
        f"started again, or another program has written to {PLACE!r} in the launcher's store ({error})"
    )


def _place(value: str, own: Launch) -> tuple[str, str, str, int]:
    """Return random bytes, folder, host and port that the first rank has written."""
    try:
        found = json.loads(verify(own.given, [PLACE, *own.names], bytes.fromhex(value)))
        token, folder, host, port = found
        return token, folder, host, port
    except (ValueError, TypeError) as error:
        raise AuthenticationError(
            f"{PLACE!r} in the launcher's store is not what the first rank writes there: another program has written "
            f"to that store ({printable(str(error))})"
        ) from None


def _entered(own: Launch, token: bytes, folder: str, host: tuple[str, int]) -> tuple[PrivateStore, bytes]:
    key = own.given
    if own.alone:
        authentication.check_private(folder)
        key = authentication.read_private(Path(folder) / KEY)
    admits, secret = _derived(own, key, token)
    return PrivateStore(os.path.join(folder, SOCKET) if own.alone else host, admits), secret


def _say_here(store: PrivateStore, own: Launch) -> bool:
    """Take this rank's place in the store; returns whether it was free."""
    name = secrets.token_hex(8).encode()
    store.set(f"member/{own.rank}/{name.decode()}", json.dumps([own.restarts, _agent()]))
    return store.compare_set(f"here/{own.rank}", b"", name) == name


def _count_restarts(store: PrivateStore, launchers: Store, own: Launch) -> int:
    """Return how often torchrun has started all processes again.

    torchrun's own count differs between machines: one that starts its processes again because those of another have
    died doesn't count that, nor does a machine that came later. So it is counted in the launcher's store as well. That
    counts if an agent of the attempt before has started processes of this one: an earlier launch's record has none.
    Without a key of the user's, on one machine, torchrun's own count has to do.
    """
    names = [store.get(f"here/{rank}").decode() for rank in range(own.size)]
    members: list[tuple[int, str]] = [json.loads(store.get(f"member/{rank}/{name}")) for rank, name in enumerate(names)]
    count, agents = max(times for times, _ in members), [agent for _, agent in members]
    if not own.counted or (own.alone and not own.given):
        return count
    context = [ATTEMPTS, *own.names]
    with contextlib.suppress(ValueError, TypeError, AuthenticationError):  # of another program's: it doesn't count
        if launchers.check([ATTEMPTS]):
            attempts, before = json.loads(verify(own.given, context, bytes.fromhex(launchers.get(ATTEMPTS).decode())))
            count = max(count, int(attempts)) if set(before) & set(agents) else count
    launchers.set(ATTEMPTS, sign(own.given, context, json.dumps([count + 1, agents]).encode()).hex())
    return count


def _agent() -> str:
    """Return what tells the process that has started this one from all others, also of other machines."""
    with contextlib.suppress(OSError, IndexError):
        since = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
        return f"{socket.gethostname()} {os.getppid()} {since}"
    return f"{socket.gethostname()} {os.getppid()}"


# -- the user's key -----------------------------------------------------------------------------------------------


def user_key(env: Mapping[str, str]) -> bytes | None:
    """Return the key that the user has given to all processes of a launch; None if there is none.

    `FABRICX_KEY` is the key's text, `FABRICX_KEY_FILE` the path of a file with it, which only its owner may read.

    Raises:
        ValueError: it is shorter than 32 characters, or its file can't be read or is open to others.
    """
    text, path = env.get("FABRICX_KEY", ""), env.get("FABRICX_KEY_FILE", "")
    if path and not text:
        try:
            status = os.stat(path)
            text = Path(path).read_text()
        except OSError as error:
            raise ValueError(f"FABRICX_KEY_FILE={path} can't be read: {error}") from None
        if status.st_mode & 0o077 or status.st_uid not in (0, os.geteuid()):
            raise ValueError(f"FABRICX_KEY_FILE={path} is open to other users: chmod 600 {path}")
    if not (text or path):
        return None
    if len(text.strip()) < SHORTEST:
        raise ValueError(
            f"the key of FABRICX_KEY or FABRICX_KEY_FILE needs {SHORTEST} characters: openssl rand -hex 32"
        )
    return hashlib.sha256(text.strip().encode()).digest()
