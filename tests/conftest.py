"""Fixtures of all tests: each test runs in its own folder, and fails if it leaks threads, processes or settings."""

from __future__ import annotations

import contextlib
import gc
import getpass
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from fabricx import testing
from fabricx.launch import supervisor
from tests import pool, warm

if sys.platform == "linux":
    # A waking process interrupts no other process, such as a gloo thread that holds a lock on which the waker polls.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
gc.disable()  # until all test modules are imported
if warm.CLONE is not None:
    warm.use_clone_as_fork_server()
GRACE_S = 20.0  # grace period for resources that are being released
OWN_FILES = Path("/proc/self/fd")
# Set once per process by a library, at its import or first use.
LIBRARIES_SET = {
    "PYTEST_CURRENT_TEST",
    "CUBLAS_WORKSPACE_CONFIG",
    "KMP_INIT_AT_FORK",
    "KMP_DUPLICATE_LIB_OK",
    "TORCHINDUCTOR_CACHE_DIR",
    "_MLFLOW_TELEMETRY_SESSION_ID",
    "PL_GLOBAL_SEED",  # by seed_everything, as in Lightning
    "PL_SEED_WORKERS",
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # by the import of lightning
}


def pytest_configure(config: pytest.Config) -> None:
    """Give all processes of this run a temporary folder, which is removed with the files that libraries leave there.

    torchrun and wandb leave folders. Folders of failed tests, and torch's cache of compiled code, remain where they are
    without this folder.
    """
    if hasattr(config, "workerinput"):  # a process of pytest-xdist has the folder of the process that started it
        return
    common = tempfile.gettempdir()
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", common)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(common, f"torchinductor_{getpass.getuser()}"))
    folder = tempfile.mkdtemp(prefix="fx-")
    os.chmod(folder, 0o1777)  # as /tmp: private folders in it have to protect themselves
    os.environ["TMPDIR"], tempfile.tempdir = folder, None
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collections, which took a fifth of the unit tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*warm.COLLECTS)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def single_thread() -> None:
    """Use a single thread: tiny models have no benefit from a second thread, and ranks need the cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def leaves_nothing_behind(tmp_path: Path) -> Iterator[None]:
    """Fail a test that leaves more threads, processes, groups, variables, ... than before."""
    before = _state()
    yield
    groups = _end_process_groups()
    leaks = [*groups, *_processes(), *_wait_for(lambda: _threads(before["threads"])), *_open_files(tmp_path)]
    after = _state()
    for kind in ("environment", "signal handlers", "torch's switches"):
        if before[kind] != after[kind]:
            for name in sorted(before[kind].keys() | after[kind].keys()):
                was, now = before[kind].get(name), after[kind].get(name)
                if was != now:
                    leaks.append(f"{kind}: {name} was {was!r} and is {now!r}")
            _restore(before)
    if leaks:
        pytest.fail("the test left behind:\n  " + "\n  ".join(leaks), pytrace=False)


@pytest.fixture(autouse=True)
def own_folder(leaves_nothing_behind: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run each test in an empty folder, so that folders of runs are not created in the project."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def warm_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run jobs on ranks that persist between tests; for tests of training, not of the start and end of ranks."""
    monkeypatch.setattr(supervisor, "run_workers", pool.run_workers)
    monkeypatch.setattr(testing, "run_workers", pool.run_workers)


def _state() -> dict[str, dict[str, Any]]:
    return {
        "threads": {str(id(thread)): thread for thread in threading.enumerate()},
        "environment": {name: value for name, value in os.environ.items() if name not in LIBRARIES_SET},
        "signal handlers": {number.name: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)},
        "torch's switches": {
            "grad mode": torch.is_grad_enabled(),
            "default dtype": torch.get_default_dtype(),
            "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            "anomaly detection": torch.is_anomaly_enabled(),
        },
    }


def _restore(before: dict[str, dict[str, Any]]) -> None:
    """Undo leaks where possible, so that a leak fails a single test only."""
    for name in set(os.environ) - set(before["environment"]) - LIBRARIES_SET:
        del os.environ[name]
    os.environ.update(before["environment"])
    for name, handler in before["signal handlers"].items():
        signal.signal(signal.Signals[name], handler)
    switches = before["torch's switches"]
    if switches != _state()["torch's switches"]:  # setting a switch imports torch's compiler
        torch.set_grad_enabled(switches["grad mode"])
        torch.set_default_dtype(switches["default dtype"])
        torch.use_deterministic_algorithms(switches["deterministic algorithms"])
        torch.autograd.set_detect_anomaly(switches["anomaly detection"])


def _end_process_groups() -> list[str]:
    left = []
    if dist.is_initialized():
        dist.destroy_process_group()
        left.append("a process group of torch.distributed")
    world = sys.modules.get("fabricx.distributed.world")
    if world is not None and world.current() is not None:
        world.leave()
        left.append("a world that was joined and not left")
    return left


def _processes() -> list[str]:
    """Name the processes that the test has started, and end them; persistent processes are kept."""
    kept = {getattr(forkserver._forkserver, "_forkserver_pid", None), resource_tracker._resource_tracker._pid}
    kept |= warm.templates() | pool.processes()

    def running_children() -> list[psutil.Process]:
        children = [psutil.Process(pid) for pid in _descendants(os.getpid()) if pid not in kept]
        return [process for process in children if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

    left = _wait_for(lambda: _existing(running_children))
    for process in left:
        process.kill()
    return [f"process {process.pid}" for process in left]


def _descendants(pid: int) -> Iterator[int]:
    """Yield all descendants of a process except those of warm ranks, which check their own."""
    for child in pool.children(pid):
        yield child
        if child not in pool.processes():
            yield from _descendants(child)


def _existing(query: Callable[[], list[psutil.Process]]) -> list[psutil.Process]:
    try:
        return query()
    except psutil.NoSuchProcess:  # it ended during the query
        return query()


def _threads(before: dict[str, Any]) -> list[str]:
    fresh = (thread for thread in threading.enumerate() if str(id(thread)) not in before)
    return [f"thread {thread.name}" for thread in fresh if thread.is_alive() and thread not in pool.threads()]


def _open_files(folder: Path) -> list[str]:
    if not OWN_FILES.exists():
        return [f"an open file, {it.path}" for it in psutil.Process().open_files() if folder in Path(it.path).parents]
    leaks = []
    for file in os.listdir(OWN_FILES):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing
            path = os.readlink(OWN_FILES / file)
            if path.startswith(f"{folder}/"):
                leaks.append(f"an open file, {path}")
    return leaks


def _wait_for(look: Callable[[], list[Any]]) -> list[Any]:
    """Return the remaining resources after a grace period."""
    deadline = time.monotonic() + GRACE_S
    while (left := look()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
