"""Workers start, return results, stop together, and leave no processes behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fabricx as fx
from fabricx.distributed.departure import await_departure
from fabricx.distributed.membership.generations import WorkerMessage, membership
from fabricx.distributed.stop_consensus import Agreement
from fabricx.distributed.world import World, current
from fabricx.errors import NotPicklable, WorkerFailed
from fabricx.fault_tolerance import liveness
from fabricx.fault_tolerance.controller import ElasticPolicy
from fabricx.launch.supervisor import run_workers
from fabricx.strategies import FSDP
from fabricx.testing import QUIET, TinyModule, run_ranks, tiny_loader
from tests import warm
from tests.soak import params


def call_collectives(number: int) -> dict[str, Any]:
    world = current()
    assert world is not None
    return {
        "rank": world.rank,
        "sum": float(world.all_reduce(torch.tensor(float(number + world.rank)))),
        "objects": world.gather_objects(world.rank),
        "first": world.broadcast_object(world.rank),
        "parts": world.all_gather(torch.tensor([world.rank])).tolist(),
        "of all dtypes": [
            (world.all_gather(tensor).float().tolist(), world.broadcast(tensor, 1).float().tolist())
            for dtype in (torch.int16, torch.uint32, torch.float8_e4m3fn, torch.bool)
            for tensor in [torch.tensor([[world.rank, 1], [0, 1]]).to(dtype).T]
        ],
    }


def test_collectives_return_the_values_of_all_ranks() -> None:
    parts = [[[0.0, 0.0], [1.0, 1.0]], [[1.0, 0.0], [1.0, 1.0]]]
    common = {"of all dtypes": [(parts, parts[1])] * 4, "sum": 21.0, "objects": [0, 1], "first": 0, "parts": [[0], [1]]}
    assert run_ranks(call_collectives, 2, 10) == [{"rank": 0, **common}, {"rank": 1, **common}]


def stop(asking: list[int], at: int) -> int:
    world = current()
    assert world is not None
    agreement = Agreement(world, "stop")
    try:
        for boundary in range(1, 10_000):
            world.all_reduce(torch.zeros(1))  # ranks run in lockstep, as in training
            if boundary == at and world.rank in asking:
                agreement.request("asked")
            if agreement.at_boundary(boundary):
                world.barrier()
                return boundary
    finally:
        agreement.close()
    return -1


def test_ranks_that_request_a_stop_at_the_same_boundary_stop_at_this_boundary() -> None:
    assert run_ranks(stop, 3, [0, 1, 2], 5) == [5, 5, 5]


@pytest.mark.parametrize("asking", params([2], [0]))
def test_a_stop_request_of_one_rank_stops_all_ranks_at_the_same_boundary(asking: int) -> None:
    stopped = run_ranks(stop, 3, [asking], 5)
    assert len(set(stopped)) == 1
    assert stopped[0] >= 5


def wait(world: World) -> None:
    time.sleep(60.0)


def fail_on(world: World, rank: int) -> None:
    world.join()
    if world.rank == rank:
        raise KeyError("only here")
    world.all_reduce(torch.zeros(1))  # waits for the failing rank


@pytest.mark.parametrize("rank", params([2], [0]))
def test_the_first_failure_ends_all_ranks_and_is_raised(rank: int) -> None:
    with pytest.raises(WorkerFailed, match=rf"^rank {rank} failed:(?s:.*)KeyError: 'only here'") as caught:
        run_workers(fail_on, (rank,), size=3)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.rank == rank


class StopsOnArrival:
    """A server function that stops the process that unpickles it."""

    def __reduce__(self) -> Any:
        return (signal.raise_signal, (signal.SIGSTOP,))


def test_a_process_that_is_stopped_before_its_first_heartbeat_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "START_S", 1.0)
    with pytest.raises(WorkerFailed, match=r"server 0 failed(?s:.*)no heartbeat"):
        run_workers(wait, (), size=1, servers=1, serve=StopsOnArrival(), frozen_after=1.0)


def die_at_the_end(world: World) -> bool:
    member = membership()
    member.send(WorkerMessage.CAN_RECOVER)
    assert world.store is not None
    world.store.set(world.key(f"inside/{world.rank}"), b"")
    world.store.wait([world.key("inside/0"), world.key("inside/1")])  # no rank ends before all ranks have begun
    member.send(WorkerMessage.CANNOT_RECOVER)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    await_departure(world, 3600.0)
    return world.store.check([world.key("departure/0/1")])


def test_the_death_of_a_worker_after_the_end_of_training_does_not_delay_the_others() -> None:
    assert run_workers(die_at_the_end, (), size=2, elastic=ElasticPolicy(waits=10.0)) == [False]


def fit_and_check_departures(folder: Path) -> bool:
    """Return whether all ranks had reached the end of the run when this rank left it."""
    trainer = fx.Trainer(strategy=FSDP(), max_epochs=1, default_root_dir=folder, **QUIET)
    trainer.fit(TinyModule(), tiny_loader(2, 1))  # some ranks have no data
    world = trainer.world
    assert world.store is not None
    return world.store.check([world.key(f"departure/0/{rank}") for rank in range(world.size)])


def test_no_rank_leaves_a_run_before_all_ranks_have_reached_its_end(tmp_path: Path) -> None:
    assert run_ranks(fit_and_check_departures, 3, tmp_path) == [True, True, True]


class Holder:
    def __init__(self) -> None:
        self.deep = {"list": [1, (number for number in range(2))]}


def test_the_error_names_the_smallest_part_that_cannot_be_pickled() -> None:
    with pytest.raises(NotPicklable, match=r"holder\.deep\['list'\]\[1\] can't be sent.*generator"):
        run_workers(fail_on, (Holder(),), size=2, named={"holder": Holder()})


ENDLESS_SCRIPT = """
import os, sys, time
from fabricx.launch.supervisor import run_workers
def endless(world, folder):
    open(f"{folder}/{os.getpid()}.pid", "w").close()
    time.sleep(1000)
if __name__ == "__main__":
    run_workers(endless, (sys.argv[1],), size=2)
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("way", ["killed", "interrupted twice"])
def test_workers_end_after_the_end_of_their_supervisor(own_folder: Path, way: str) -> None:
    (own_folder / "endless.py").write_text(ENDLESS_SCRIPT)
    process = warm.Popen([sys.executable, "endless.py", str(own_folder)], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while len(list(own_folder.glob("*.pid"))) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    workers = [int(path.stem) for path in own_folder.glob("*.pid")]
    if way == "killed":
        process.kill()
    else:
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        # Two simultaneous signals would be merged into one.
        while b"press Ctrl-C again" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while any(is_alive(pid) for pid in workers):
        assert time.monotonic() < deadline, "a worker has outlived its supervisor"
        time.sleep(0.05)


SCRIPT = """
import sys
import torch
import fabricx as fx
from fabricx.testing import QUIET, TinyModule, tiny_loader
if __name__ == "__main__":
    module = TinyModule()
    trainer = fx.Trainer(strategy=sys.argv[1], max_epochs=1, **QUIET)
    trainer.fit(module, tiny_loader(32, 4), tiny_loader(8, 4))
    trainer.fit(module, tiny_loader(32, 4))
    trainer.test(module, tiny_loader(5, 1), verbose=False)  # the second rank has a batch less
    print(f"rank {trainer.global_rank} of {trainer.world_size}: {trainer.global_step} steps,"
          f" {type(trainer.strategy).__name__}, {float(trainer.callback_metrics['test_loss']):.6f}\\n", end="")
"""


@pytest.mark.parametrize(("strategy", "name"), params([("auto", "DDP")], [("fsdp", "FSDP")]))
def test_a_script_under_torchrun_trains_as_a_worker(own_folder: Path, strategy: str, name: str) -> None:
    (own_folder / "script.py").write_text(SCRIPT)
    done = warm.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py",
         strategy],
        capture_output=True, text=True, timeout=100, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert len(lines) == 2, done.stdout + done.stderr
    assert lines[0].startswith(f"rank 0 of 2: 4 steps, {name}")
    assert lines[0].split(":", 1)[1] == lines[1].split(":", 1)[1]


SERVED = """
import os
import sys
import fabricx as fx
from fabricx.strategies import AsyncSGD, ParameterServer
from fabricx.testing import QUIET, TinyModule, tiny_data
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        data = tiny_data(32)
        yield from (data[i] for i in range(int(os.environ["RANK"]), 32, int(os.environ["WORLD_SIZE"])))


if __name__ == "__main__":
    launched = {name: value for name, value in os.environ.items() if "RANK" in name or "SIZE" in name}
    strategy = {"sync": lambda: ParameterServer(servers=2), "async": AsyncSGD}[sys.argv[1]]()
    for _ in range(2):  # the same processes serve
        trainer = fx.Trainer(strategy=strategy, max_epochs=1, **QUIET)
        trainer.fit(TinyModule(), DataLoader(Stream(), 4))
        assert launched.items() <= os.environ.items()
    print(f"rank {trainer.global_rank}: {trainer.global_step or 'serves'}\\n", end="")
"""


@pytest.mark.parametrize(("mode", "lines"), params(
    [("sync", ["rank 0: 4", "rank 1: 4", "rank 2: serves", "rank 3: serves"])],
    [("async", ["rank 0: 8", "rank 1: 8", "rank 2: serves"])],
))  # fmt: skip
def test_the_last_ranks_of_torchrun_are_servers(own_folder: Path, mode: str, lines: list[str]) -> None:
    (own_folder / "script.py").write_text(SERVED)
    done = warm.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(len(lines)),
         "script.py", mode],
        capture_output=True, text=True, timeout=100, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert sorted(line for line in done.stdout.splitlines() if line) == lines, done.stdout + done.stderr[-3000:]


def test_without_a_fork_server_workers_are_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert run_ranks(_sum_of_ranks, 2) == [3.0, 3.0]


def _sum_of_ranks() -> float:
    world = current()
    assert world is not None
    return float(world.all_reduce(torch.tensor(world.rank + 1.0)))


class DescribesProcess(torch.utils.data.Dataset[Any]):
    """Each sample describes the process that loads it: PID, process group, arguments, environment and cores."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return os.getpid(), os.getpgrp(), [*sys.orig_argv], os.environ["OF_RANK"], os.sched_getaffinity(0)


def describe_loader_processes(_: int) -> list[int]:
    """Load data in two processes, twice; the second time after the kill of their fork server."""
    loaders = []
    os.environ["OF_RANK"] = str(os.getpid())
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for _ in range(2):
        loader = torch.utils.data.DataLoader(DescribesProcess(), batch_size=None, num_workers=2)
        for process, group, arguments, variable, cores in loader:
            assert variable == str(os.getpid())
            assert cores == os.sched_getaffinity(0)
            assert group == os.getpgrp() == os.getpid()  # killed together with this process's group
            assert arguments == sys.orig_argv  # a fork of the same fork server, not a new interpreter
            loaders.append(process)
        [server] = multiprocessing.active_children()
        os.kill(server.pid or 0, signal.SIGKILL)
        server.join()
    return loaders


def test_loader_processes_are_forks_in_the_process_group_of_their_rank() -> None:
    loaders = [process for of_rank in run_ranks(describe_loader_processes, 2, 30) for process in of_rank]
    assert len(set(loaders)) == 8


class Divided(torch.utils.data.IterableDataset[Any]):
    """A stream that divides its samples by rank, based on `by`."""

    def __init__(self, by: str) -> None:
        self.by = by

    def __iter__(self) -> Any:
        if self.by == "variables":
            rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        else:
            grouped = torch.distributed.is_initialized()
            rank, ranks = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if grouped else (0, 1)
        if self.by == "collective":
            torch.distributed.all_reduce(torch.ones(1))
        yield from (torch.tensor([float(number)]) for number in range(rank, 8, ranks))


class RecordsBatches(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.full((8,), -1.0))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen[4 * batch_idx : 4 * batch_idx + 4] = self.all_gather(batch).flatten()
        return self.layer(batch.expand(-1, 4)).sum()


@pytest.mark.parametrize(
    ("by", "processes"),
    params([("variables", 1), ("group", 1), ("collective", 0), ("collective", 1)], [("variables", 0), ("group", 0)]),
)
def test_streams_read_the_rank_in_loader_processes(by: str, processes: int) -> None:
    module, trainer = RecordsBatches(), fx.Trainer(max_epochs=1, devices=2, strategy="ddp", **QUIET)
    loader = torch.utils.data.DataLoader(Divided(by), batch_size=2, num_workers=processes)
    if by == "collective" and processes:
        with pytest.raises(WorkerFailed, match="No backend type associated"):
            trainer.fit(module, loader)
        return
    trainer.fit(module, loader)
    assert module.seen.tolist() == [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]
    assert "RANK" not in os.environ
