"""Report on the machine for bug reports: versions, cores, devices, backends, and a test of two ranks."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from fabricx.distributed.world import World
from fabricx.launch.cluster import detect
from fabricx.launch.supervisor import run_workers
from fabricx.trainer.provenance import versions


def _sum_of_ranks(world: World) -> float:
    world.join()
    return float(world.all_reduce(torch.tensor(float(world.rank + 1))))


def examine() -> int:
    """Print the report.

    Returns:
        exit status: 0 if two ranks could communicate, else 1.
    """
    for name, version in versions().items():
        print(f"{name:<20} {version or 'not installed'}")
    print(f"{'cores':<20} {len(os.sched_getaffinity(0))}, torch uses {torch.get_num_threads()} threads")
    print(f"{'accelerators':<20} {', '.join(_accelerators()) or 'none'}")
    backends = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    print(f"{'backends':<20} {', '.join(name for name, available in backends.items() if available()) or 'none'}")
    world = detect()
    print(f"{'started by':<20} {'a user' if world is None else f'a launcher, as rank {world.rank} of {world.size}'}")
    began = time.perf_counter()
    try:
        sums = run_workers(_sum_of_ranks, (), size=2)
    except Exception as error:
        print(f"{'two ranks':<20} FAILED: {error}")
        return 1
    works = sums == [3.0, 3.0]
    success = f"all-reduce works ({time.perf_counter() - began:.1f} s, with the start of both)"
    print(f"{'two ranks':<20} {success if works else f'WRONG: the sum of 1 and 2 is {sums}'}")
    return 0 if works else 1


def _accelerators() -> list[str]:
    devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return [*devices, *(["mps"] if torch.backends.mps.is_available() else [])]
