"""What holds for every test: it runs in a folder of its own, and leaves nothing behind in the process."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
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
    # A process that wakes interrupts no other, such as a thread of gloo with the lock that the waking one polls for.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
gc.disable()  # until all modules of tests are imported
if warm.CLONE is not None:
    warm.use_clone_as_fork_server()
GRACE_S = 20.0  # how long something that is ending already may take
OWN_FILES = Path("/proc/self/fd")
# Set once in a process by a library, at its import or first use; they belong to nobody.
LIBRARIES_SET = {
    "PYTEST_CURRENT_TEST",
    "CUBLAS_WORKSPACE_CONFIG",
    "KMP_INIT_AT_FORK",
    "KMP_DUPLICATE_LIB_OK",
    "TORCHINDUCTOR_CACHE_DIR",
    "PL_GLOBAL_SEED",  # by seed_everything, as Lightning does
    "PL_SEED_WORKERS",
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # by the import of lightning
}


def pytest_collection_finish() -> None:
    """Keep what is imported out of all garbage collections, which took a fifth of the unit tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*warm.COLLECTS)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models gain nothing from a second thread, and ranks in other processes want the cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def leaves_nothing_behind(tmp_path: Path) -> Iterator[None]:
    """Fail a test after which there are more threads, processes, groups, variables, ... than before."""
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
    """Run each test in an empty folder, so that runs' folders don't end up in the project's."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def warm_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let jobs run on ranks that stay from test to test; for tests of what ranks do, not of how they start and end."""
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
    """Undo what can be undone, so that a leak fails one test only."""
    for name in set(os.environ) - set(before["environment"]) - LIBRARIES_SET:
        del os.environ[name]
    os.environ.update(before["environment"])
    for name, handler in before["signal handlers"].items():
        signal.signal(signal.Signals[name], handler)
    switches = before["torch's switches"]
    if switches != _state()["torch's switches"]:  # setting one imports torch's compiler
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
    """Name processes that the test has started, and end them; those that stay warm are kept."""
    kept = {getattr(forkserver._forkserver, "_forkserver_pid", None), resource_tracker._resource_tracker._pid}
    kept |= warm.templates() | pool.processes()

    def found() -> list[psutil.Process]:
        children = [psutil.Process(pid) for pid in _descendants(os.getpid()) if pid not in kept]
        return [process for process in children if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

    left = _wait_for(lambda: _that_exist(found))
    for process in left:
        process.kill()
    return [f"process {process.pid}" for process in left]


def _descendants(pid: int) -> Iterator[int]:
    """Yield a process's children, and theirs, except those of warm ranks, which look after their own."""
    for child in pool.children(pid):
        yield child
        if child not in pool.processes():
            yield from _descendants(child)


def _that_exist(found: Callable[[], list[psutil.Process]]) -> list[psutil.Process]:
    try:
        return found()
    except psutil.NoSuchProcess:  # it ended while it was looked at
        return found()


def _threads(before: dict[str, Any]) -> list[str]:
    fresh = (thread for thread in threading.enumerate() if str(id(thread)) not in before)
    return [f"thread {thread.name}" for thread in fresh if thread.is_alive() and thread not in pool.threads()]


def _open_files(folder: Path) -> list[str]:
    if not OWN_FILES.exists():
        return [f"an open file, {it.path}" for it in psutil.Process().open_files() if folder in Path(it.path).parents]
    found = []
    for file in os.listdir(OWN_FILES):
        with contextlib.suppress(FileNotFoundError):  # of the listing itself
            path = os.readlink(OWN_FILES / file)
            if path.startswith(f"{folder}/"):
                found.append(f"an open file, {path}")
    return found


def _wait_for(look: Callable[[], list[Any]]) -> list[Any]:
    """Return what is left after a moment of grace."""
    deadline = time.monotonic() + GRACE_S
    while (left := look()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
