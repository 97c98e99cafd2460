"""The fork server, which imports torch; this module does not, so that it starts the server before torch is imported."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from multiprocessing import forkserver
from typing import Any, Final

from fabricx import plugins

PRELOAD: Final = [
    "fabricx.launch.preloaded", "torch", "torch.distributed", "torch._dynamo", "torch.optim", "fabricx.trainer.trainer",
    *plugins.modules("strategies"), "fabricx.launch.fork_server",
]  # fmt: skip


def context() -> Any:
    """Return a fork server context with torch preloaded, so that workers start in milliseconds; else spawn."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(PRELOAD)
    return forks


def start() -> None:
    """Start this process's fork server, and do not wait until it has imported torch."""
    if context().get_start_method() == "forkserver":
        forkserver.ensure_running()


def serves() -> bool:
    """Return whether this process is a fork server, or a fork of one."""
    return "multiprocessing.forkserver" in " ".join(sys.orig_argv)


if serves():  # it imports PRELOAD
    # A terminal sends Ctrl-C to it, too; multiprocessing ignores the signal only after the imports, which take seconds.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
