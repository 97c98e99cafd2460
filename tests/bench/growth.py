"""Cost of the number of ranks on the main rank and the store: `python -m tests.bench.growth`.

A process runs the functions of the main rank; messages of other ranks are synthetic. Seconds are CPU time.
"""

from __future__ import annotations

import json
import pickle
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from fabricx.checkpoint import sharded_tensors
from fabricx.core.module_state.rng import RandomState
from fabricx.distributed.departure import await_departure
from fabricx.distributed.membership.deaths import DEATHS
from fabricx.distributed.membership.generations import WorkerMessage
from fabricx.distributed.store.client import PrivateStore
from fabricx.distributed.store.server import StoreServer
from fabricx.distributed.world import World
from fabricx.fault_tolerance.controller import ElasticController, ElasticPolicy
from fabricx.telemetry.events import FOLDER, interval_s
from fabricx.telemetry.reader import Files
from fabricx.telemetry.run import Run

KEY: Final = b"k" * 32
RANKS: Final = (10, 100, 1_000, 10_000)
WORKERS: Final = (8, 64, 512)  # of a supervisor, which serves a machine
TENSORS: Final = 1_000  # weights and moments of a model


class Played(World):
    """The main rank of a world whose other ranks have tensors of the same layout."""

    def all_gather(self, tensor: Tensor, sync_grads: bool = False) -> Tensor:
        return tensor.expand(self.size, *tensor.shape)

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        return obj


@contextmanager
def seconds_of() -> Iterator[list[float]]:
    """Yield a list to which the CPU seconds of the block are appended; of all threads, so of a server as well."""
    times: list[float] = []
    began = time.process_time()
    yield times
    times.append(time.process_time() - began)


def planned(ranks: int) -> tuple[float, float]:
    """Return the seconds of the first plan of a checkpoint, and of a later plan."""
    tensors, world = {f"layer.{number}": torch.zeros(1) for number in range(TENSORS)}, Played(size=ranks)
    with seconds_of() as first:
        part = sharded_tensors.plan(tensors, world)
    with seconds_of() as later:
        sharded_tensors.plan(tensors, world, part)
    return first[0], later[0]


def reported(ranks: int, store: PrivateStore) -> tuple[float, float]:
    """Return the seconds in which the main rank reads the reports of a checkpoint, and their MiB."""
    report = json.dumps({"written": {"rank-00000.safetensors": {"bytes": 123456789, "crc32": 1234567890}}})
    keys = [f"checkpoint/{rank}" for rank in range(ranks)]
    for key in keys:
        store.set(key, report)
    with seconds_of() as taken:
        reports = [json.loads(value) for value in store.values(keys)]
        store.delete_key(*keys)
    assert len(reports) == ranks
    return taken[0], ranks * len(report) / 2**20


def watched(ranks: int, folder: Path) -> tuple[float, float]:
    """Return the part of a core that reads the records of all ranks, and their KiB in a second."""
    (folder / FOLDER).mkdir(parents=True)
    common = {"run": "a1", "at": 1.0, "mono": 1.0}
    spans = {name: [12345] * 4 for name in ("data", "forward", "backward", "wait", "optimizer", "other")}
    steps: dict[str, Any] = {
        "kind": "steps",
        "steps": [1, 2, 3, 4],
        "each": 1,
        "since": 1.0,
        "ends_us": [0] * 4,
        "samples": [32] * 4,
    }
    steps["us"] = spans
    now = {"kind": "now", "step": 4, "memory_mib": 1234.5, "cpu_cores": 1.02}
    paths = [folder / FOLDER / f"worker_{rank}.jsonl" for rank in range(ranks)]
    for rank, path in enumerate(paths):
        path.write_text(json.dumps({**common, "kind": "start", "rank": rank, "size": ranks}) + "\n")
    files, run = Files(folder), Run()
    run.feed(files.new())
    written = 0
    for rank, path in enumerate(paths):
        lines = "".join(json.dumps({**common, **record, "rank": rank}) + "\n" for record in (steps, now))
        written += len(lines)
        with path.open("a") as file:
            file.write(lines)
    with seconds_of() as taken:
        run.feed(files.new())
    assert run.steps == 4
    return taken[0] / interval_s(ranks), written / 2**10 / interval_s(ranks)


def departed(ranks: int, server: StoreServer) -> tuple[int, float]:
    """Return the requests of a rank at its end after three deaths, and their total seconds."""
    world = World(size=ranks, store=PrivateStore(server.path, KEY), job=ranks)
    server.set(world.key("departure/0/count"), str(ranks - 4).encode())
    for rank in range(4, ranks):
        server.set(world.key(f"departure/0/{rank}"), b"done")
    before = server.requests
    with seconds_of() as taken:
        await_departure(world, 60.0)
    return server.requests - before, taken[0] * ranks


def recovered(workers: int) -> tuple[float, float]:
    """Return the seconds in which a supervisor recovers from a death in place, and the KiB that it sends."""
    sent = 0

    def send() -> None:
        nonlocal sent
        for receivers, kind, content in controller.messages():
            for _ in receivers:
                sent += len(ForkingPickler.dumps((kind, content)))

    controller = ElasticController(ElasticPolicy(waits=60.0), workers, [])
    for worker in range(workers):
        controller.receive(worker, WorkerMessage.CAN_RECOVER, None)
        controller.receive(worker, WorkerMessage.STEP, (0, 1))
    with seconds_of() as taken:
        assert controller.died(1, "killed")
        assert controller.wanted() == 1
        controller.started(workers)
        send()
        controller.receive(workers, WorkerMessage.READY, None)
        send()
        for worker in controller.workers:
            controller.receive(worker, WorkerMessage.STEP, (1, 2))
    assert controller.settled
    return taken[0], sent / 2**10


def main() -> None:
    """Print a row for each number of ranks, and for each number of workers of a machine."""
    rng = len(pickle.dumps(RandomState().packed()))
    print("ranks   plan s  later s | reports s    MiB | states MiB | records, core  KiB/s | leaving requests  s in all")
    for ranks in RANKS:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "store").mkdir(mode=0o700)
            server = StoreServer(str(Path(folder) / "store"), KEY)
            for worker in range(1, 4):
                server.push(DEATHS, str(worker).encode())
            first, later = planned(ranks)
            report_s, report_mib = reported(ranks, PrivateStore(server.path, KEY))
            core, kib = watched(ranks, Path(folder) / "run")
            requests, leaving_s = departed(ranks, server)
            server.close()
        print(
            f"{ranks:5} {first:8.2f} {later:8.3f} | {report_s:9.3f} {report_mib:6.2f} | {rng * ranks / 2**20:10.2f} | "
            f"{core:13.3f} {kib:6.0f} | {requests:16} {leaving_s:9.1f}", flush=True,
        )  # fmt: skip

    print("workers | a recovery in place ms    KiB")
    for workers in WORKERS:
        recovery_s, kib = recovered(workers)
        print(f"{workers:7} | {1e3 * recovery_s:22.1f} {kib:6.0f}")


if __name__ == "__main__":
    main()
