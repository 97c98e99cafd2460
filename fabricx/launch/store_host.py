"""Process that hosts the store of a launch; started by the first rank.

It does not import torch, so that it starts in a fraction of a second. It ends when no process of the launch is
connected any more, because ranks, including the first, may end at different times.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from fabricx.distributed.messages.authentication import write_private
from fabricx.distributed.store.server import StoreServer
from fabricx.scratch import private_folder

COMPLETE: Final = "complete"  # key of the store, set when all ranks have joined
KEY: Final = "key"  # file with the local key, in the folder of the store
LOOK_S: Final = 0.1  # seconds between two checks of the connected processes
_STARTED: Final[list[subprocess.Popen[bytes]]] = []  # references that prevent a ResourceWarning about running processes


def start(key: bytes, local_key: bytes | None) -> tuple[str, int]:
    """Start the process, as a child of this one.

    Args:
        key: key that processes need to connect.
        local_key: key from which the processes of this machine derive `key`, offered in a private file; None to listen
            on the network instead of a socket in a private folder.

    Returns:
        the private folder of the store and 0, or "" and the port of the store.

    Raises:
        RuntimeError: the process could not start.
    """
    package = Path(__file__).parents[2]
    code = "import sys; sys.path.insert(0, sys.argv[1]); from fabricx.launch.store_host import host; host()"
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", code, str(package)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/",
    )  # fmt: skip
    _STARTED.append(process)
    assert process.stdin is not None
    assert process.stdout is not None
    request = {"key": key.hex(), "own": None if local_key is None else local_key.hex(), "parent": os.getpid()}
    with process.stdin as stdin, process.stdout as stdout, contextlib.suppress(BrokenPipeError):
        stdin.write(json.dumps(request).encode() + b"\n")
        stdin.flush()
        answer = stdout.readline()
    if not answer:
        raise RuntimeError(
            f"the process that hosts the store of this launch ended with exit code {process.wait()}; check free memory "
            "and the space in TMPDIR"
        )
    folder, port = json.loads(answer)
    return folder, port


def host() -> None:
    """Host the store until the launch ends; main function of the process."""
    # Launchers send these to all processes of a rank; SLURM sends SIGUSR1 or SIGUSR2 before the end of a job's time.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    _allow_many_files()
    request: dict[str, Any] = json.loads(sys.stdin.readline())
    with contextlib.ExitStack() as stack:
        folder = None
        if request["own"] is not None:
            folder = stack.enter_context(private_folder())
            write_private(Path(folder) / KEY, bytes.fromhex(request["own"]))
        server = StoreServer(folder, bytes.fromhex(request["key"]))
        stack.callback(server.close)
        sys.stdout.write(json.dumps([folder or "", server.port]) + "\n")
        sys.stdout.close()
        while os.getppid() == request["parent"] or (server.has(COMPLETE) and server.used):
            time.sleep(LOOK_S)


def _allow_many_files() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
