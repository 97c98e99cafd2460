"""Cost of coordination as the number of ranks increases: requests of a rank to the store of a launch, and CPU time.

Each rank is two threads of this process (the rank, and a wait for stop requests), with the real client, agreement and
departure; the server is a separate process, as in a launch. Requests are counted, and the CPU time of the server is
the kernel's. The number of messages of a rank does not depend on the number of ranks, so that sums of larger launches
can be extrapolated.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from fabricx.distributed.departure import await_departure
from fabricx.distributed.membership.deaths import DEATHS
from fabricx.distributed.stop_consensus import Agreement
from fabricx.distributed.store.client import PrivateStore
from fabricx.distributed.world import World

KEY = b"k" * 32
STEPS = 200
SERVER = """
import json, resource, sys, time
from fabricx.distributed.store.server import StoreServer
server = StoreServer(sys.argv[1] or None, b"k" * 32)
print(json.dumps([server.path, server.port]), flush=True)
for line in sys.stdin:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    pages = int(open("/proc/self/statm").read().split()[1])
    memory = pages * resource.getpagesize() / 2**20
    print(json.dumps([server.requests, usage.ru_utime + usage.ru_stime, memory]), flush=True)
"""


@dataclass
class Store:
    """The server's process."""

    process: subprocess.Popen[str]
    address: str | tuple[str, int]
    last: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    def since(self) -> tuple[float, float, float]:
        """Return requests and CPU seconds since the last call, and the server's memory in MiB."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        now = json.loads(self.process.stdout.readline())
        before, self.last = self.last, now
        return now[0] - before[0], now[1] - before[1], now[2]


def opened(folder: str) -> Store:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    path, port = json.loads(process.stdout.readline())
    return Store(process, path or ("127.0.0.1", port))


def of_all(ranks: int, work: Callable[[int], None]) -> None:
    """Call a function for each rank, in a thread each."""
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measured(ranks: int, folder: str) -> dict[str, tuple[float, float, float]]:
    """Return (requests per rank, microseconds of the server per request, seconds) by phase."""
    server = opened(folder)
    results: dict[str, tuple[float, float, float]] = {}
    stores: list[PrivateStore] = [None] * ranks  # type: ignore[list-item]
    agreements: list[Agreement] = [None] * ranks  # type: ignore[list-item]

    def phase(name: str, work: Callable[[int], None]) -> None:
        server.since()
        began = time.perf_counter()
        of_all(ranks, work)
        seconds = time.perf_counter() - began
        time.sleep(0.2)  # requests of the threads that wait
        requests, cpu_s, memory = server.since()
        results[name] = requests / ranks, 1e6 * cpu_s / max(1.0, requests), seconds
        results["memory"] = memory, 0.0, 0.0

    def join(rank: int) -> None:
        stores[rank] = store = PrivateStore(server.address, KEY)
        store.set(f"here/{rank}", "")
        store.push_at_end(DEATHS, str(rank))
        if rank == 0:
            store.wait([f"here/{other}" for other in range(ranks)], timedelta(minutes=5))
            store.set("complete", "")
        store.wait(["complete"], timedelta(minutes=5))
        agreements[rank] = Agreement(World(rank=rank, size=ranks, store=store), "signal")

    def train(rank: int) -> None:
        for index in range(STEPS):
            assert not agreements[rank].at_boundary(index)

    def stop(rank: int) -> None:
        if rank == 0:
            agreements[0].request("terminated")
        while agreements[rank].reason is None:
            time.sleep(0.01)
        index = STEPS
        while not agreements[rank].at_boundary(index):
            index += 1

    def leave(rank: int) -> None:
        await_departure(World(rank=rank, size=ranks, store=stores[rank]))

    try:
        for name, work in (("join", join), ("train", train), ("stop", stop), ("leave", leave)):
            phase(name, work)
        for agreement in agreements:
            agreement.close()
    finally:
        server.process.communicate()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16, 64, 256, 1024])
    parser.add_argument("--network", action="store_true", help="signed messages over TCP instead of a Unix socket")
    args = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    threading.stack_size(1 << 18)

    print(
        f"requests of a rank to the store, and CPU microseconds of its server for a request, on {os.cpu_count()} cores"
    )
    print(f"{'ranks':>6} {'join':>12} {f'{STEPS} steps':>12} {'stop':>12} {'leave':>12} {'server MiB':>12}")
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            results = measured(ranks, "" if args.network else folder)
        cells = [f"{results[name][0]:.1f} x {results[name][1]:.0f}" for name in ("join", "train", "stop", "leave")]
        print(f"{ranks:>6} {' '.join(f'{cell:>12}' for cell in cells)} {results['memory'][0]:>12.0f}", flush=True)


if __name__ == "__main__":
    main()
