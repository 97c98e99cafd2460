"""Launcher that starts ranks in a cluster of Ray."""

from __future__ import annotations

import importlib
import importlib.util
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

from fabricx.launch.launcher import Ended, Launcher, Program, torchrun_variables
from fabricx.launch.ranks import GATHER_S, Ranks
from fabricx.launch.signals import StopRequests
from fabricx.launch.worker import Failure

LOOK_S: Final = 0.5  # seconds between two looks for signals


@final
class Ray(Launcher):
    """Start the ranks of each machine in an actor of Ray (pip install 'fabricx[ray]').

    The actors are in a placement group, each on its own machine. After the loss of a process or a machine the Trainer
    starts all ranks again from the newest checkpoint, in a new placement group: Ray replaces a lost machine if another
    machine of the cluster is free, or its autoscaler starts one. The project and the run's folder have to be on a file
    system that all machines share.

    Args:
        address: address of the cluster, as of `ray.init`; None: the cluster of this machine or of RAY_ADDRESS, or a new
            one on this machine; "local": a new one.
        cpus_per_rank: cores that Ray reserves for each rank.
        runtime_env: environment of the actors, as of `ray.init`, such as {"env_vars": {"NCCL_SOCKET_IFNAME": "eth0"}}.
        timeout_s: seconds to wait until the cluster has the machines.
    """

    def __init__(
        self, address: str | None = None, cpus_per_rank: int = 1, runtime_env: Mapping[str, Any] | None = None,
        timeout_s: float = 300.0,
    ) -> None:  # fmt: skip
        if importlib.util.find_spec("ray") is None:
            raise ModuleNotFoundError("launcher=ray needs Ray: pip install 'fabricx[ray]', or pip install ray")
        if cpus_per_rank < 1:
            raise ValueError(f"cpus_per_rank={cpus_per_rank}: set 1 or more")
        self.address, self.cpus_per_rank, self.timeout_s = address, cpus_per_rank, timeout_s
        self.runtime_env = runtime_env

    def run(self, program: Program) -> Ended:
        ray = _ray()
        if not ray.is_initialized():
            ray.init(address=self.address, runtime_env=None if self.runtime_env is None else dict(self.runtime_env))
        if program.gpus_unused and (found := int(ray.cluster_resources().get("GPU", 0))):
            raise ValueError(
                f"this machine has no GPU, so the run would train on CPUs, and the cluster of Ray has {found} GPUs: "
                "set accelerator to 'gpu', or to 'cpu'"
            )
        group = self._placement_group(program)
        nodes: list[Any] = []
        try:
            nodes += self._actors(program, group)
            host, port = ray.get(nodes[0].address.remote())
            return self._run(program, nodes, host, port)
        finally:
            for node in nodes:
                ray.kill(node)
            ray.util.remove_placement_group(group)

    def _placement_group(self, program: Program) -> Any:
        """Reserve the machines.

        Raises:
            ValueError: the cluster does not have them within the time.
        """
        ray = _ray()
        bundle = {"CPU": self.cpus_per_rank * program.processes, **({"GPU": program.processes} if program.gpus else {})}
        group = ray.util.placement_group([bundle] * program.nodes, strategy="STRICT_SPREAD")
        try:
            ray.get(group.ready(), timeout=self.timeout_s)
        except ray.exceptions.GetTimeoutError:
            ray.util.remove_placement_group(group)
            wanted = " and ".join(f"{count} {kind}" for kind, count in bundle.items())
            machines = [
                ", ".join(f"{int(count)} {kind}" for kind, count in node["Resources"].items() if kind in ("CPU", "GPU"))
                for node in ray.nodes() if node["Alive"]
            ]  # fmt: skip
            raise ValueError(
                f"the cluster of Ray did not have {program.nodes} free machine(s) with {wanted} each within "
                f"{self.timeout_s:g} s; its machines have: {'; '.join(machines)}. Set fewer num_nodes, devices or "
                "cpus_per_rank, or add machines"
            ) from None
        return group

    def _actors(self, program: Program, group: Any) -> list[Any]:
        actor = _ray().remote(_Node)
        placed = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        return [
            actor.options(
                num_cpus=self.cpus_per_rank * program.processes, num_gpus=program.processes if program.gpus else 0,
                scheduling_strategy=placed(group, number), max_concurrency=2,
            ).remote()
            for number in range(program.nodes)
        ]  # fmt: skip

    def _run(self, program: Program, nodes: Sequence[Any], host: str, port: int) -> Ended:
        ray = _ray()
        requests = StopRequests(stops_at_step=program.stops_at_step)
        job, threads = ray.put(program.job), {"OMP_NUM_THREADS": str(self.cpus_per_rank)}
        with requests.received():
            waiting = {}
            for number, node in enumerate(nodes):
                variables = [{**threads, **own} for own in torchrun_variables(program, number, host, port)]
                waiting[node.run.remote(job, variables)] = number
            result, failures, deadline = None, list[Failure](), float("inf")
            while waiting and time.monotonic() < deadline:
                ready, _ = ray.wait(list(waiting), timeout=LOOK_S)
                for reference in ready:
                    number = waiting.pop(reference)
                    try:
                        ended: Ended = ray.get(reference)
                    except ray.exceptions.RayActorError as error:
                        ended = Ended(failures=(_lost(number * program.processes, number, error),))
                    result = result if ended.result is None else ended.result
                    failures += ended.failures
                    if failures and deadline == float("inf"):
                        deadline = time.monotonic() + GATHER_S
                if (requested := requests.arrived()) is not None:
                    for node in nodes:
                        node.signal.remote(requested)
        return Ended(None if failures else result, tuple(failures), stopping=bool(requests))


def _ray() -> Any:
    """Import Ray, which takes seconds; whether it has types depends on its being installed."""
    return importlib.import_module("ray")


def _lost(rank: int, number: int, error: Exception) -> Failure:
    first = str(error).strip().splitlines()[0]
    text = f"machine {number}, or its actor of Ray, was lost: {type(error).__name__}: {first}"
    return Failure(rank, time.time(), "death", text, None)


class _Node:
    """An actor that runs the ranks of a machine."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None

    def address(self) -> tuple[str, int]:
        """Return the address of this machine, and a free port."""
        with socket.socket() as free:
            free.bind(("", 0))
            return _ray().util.get_node_ip_address(), int(free.getsockname()[1])

    def run(self, job: bytes, variables: Sequence[Mapping[str, str]]) -> Ended:
        """Run the ranks.

        Args:
            job: their work.
            variables: environment variables of each rank.
        """
        self._ranks = Ranks(job, variables)
        return self._ranks.run()

    def signal(self, number: int) -> None:
        """Pass a signal on to the ranks.

        Args:
            number: number of the signal.
        """
        if self._ranks is not None:
            self._ranks.signal(signal.Signals(number))
