"""Launcher that starts ranks in a cluster of Ray."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pickle
import secrets
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, final

from fabricx.launch.launcher import Ended, Launcher, Program, torchrun_variables
from fabricx.launch.machine import Machine
from fabricx.launch.ranks import GATHER_S
from fabricx.launch.signals import StopRequests
from fabricx.launch.worker import Failure
from fabricx.launchers import ray_standby

LOOK_S: Final = 0.5  # seconds between two looks for signals
DEATH_S: Final = 1.0  # time after a death in which other ranks may report failures
CALLS: Final = 16  # of a machine at a time: `run`, and `ended` of each process that takes the place of another
END_S: Final = 30.0  # time in which a machine has to end its ranks


@final
class Ray(Launcher):
    """Start the ranks of each machine in an actor of Ray (pip install 'fabricx[ray]').

    The actors are in a placement group, each on a different machine. After the loss of a process or machine the Trainer
    starts all ranks again, from in-memory checkpoints, which the machines keep and exchange, or from the newest
    checkpoint on disk. Ray replaces a lost machine if another machine of the cluster is free, or its autoscaler starts
    one. The project and the run's folder have to be on a file system that all machines share.

    A run with `FaultRecovery` also continues if the process that has called `fit` is killed: its actors are detached,
    and another actor (`ray_standby.py`) takes its place. At the end of the run it releases the machines.

    Args:
        address: address of the cluster, as of `ray.init`; None: the cluster of this machine or of RAY_ADDRESS, or a new
            one on this machine; "local": a new cluster.
        cpus_per_rank: cores that Ray reserves for each rank.
        runtime_env: environment of the actors, as of `ray.init`, such as {"env_vars": {"NCCL_SOCKET_IFNAME": "eth0"}}.
        timeout_s: seconds to wait until the cluster has the machines.
    """

    starts_servers = True

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
        self._group: Any = None  # placement group of a run
        self._nodes: list[Any] = []  # an actor on each machine; None for a lost machine
        self._start = 0  # number of the newest start of the ranks
        self._run_name = ""  # namespace of detached actors; "" for actors that end with this process
        self._pulse: Any = None
        self._adopted = False  # this process takes the place of another: requests to stop remain for the next start
        self._whole = False  # all machines have started the newest start
        self._requests = StopRequests(stops_at_step=True)

    def __getstate__(self) -> dict[str, Any]:
        """Return the options: ranks have a copy of the launcher, and no actors."""
        return {**self.__dict__, "_group": None, "_nodes": [], "_requests": None, "_pulse": None}

    @contextlib.contextmanager
    def starts(self) -> Iterator[None]:
        """Return a context of all starts of a run: between them, the actors remain on their machines."""
        try:
            yield
        finally:
            ray = _ray()
            for node in self._nodes:
                with contextlib.suppress(Exception):  # it has ended, or the cluster: the other actors have to end, too
                    ray.kill(node)
            if self._group is not None:
                ray.util.remove_placement_group(self._group)
            if self._run_name:  # at last: until then, the standby does this if this process is killed
                for name in (ray_standby.STANDBY, ray_standby.PULSE):
                    with contextlib.suppress(Exception):
                        ray.kill(ray.get_actor(name, namespace=self._run_name))
            self._nodes, self._group, self._start, self._run_name, self._pulse = [], None, 0, "", None

    def run(self, program: Program) -> Ended:
        ray = _ray()
        if not ray.is_initialized():
            ray.init(address=self.address, runtime_env=None if self.runtime_env is None else dict(self.runtime_env))
        if program.gpus_unused and (gpus := int(ray.cluster_resources().get("GPU", 0))):
            raise ValueError(
                f"this machine has no GPU, so the run would train on CPUs, and the cluster of Ray has {gpus} GPUs: "
                "set accelerator to 'gpu', or to 'cpu'"
            )
        if self._group is None:
            if program.run_dir:
                self._stand_by(program.run_dir)
            self._group = self._placement_group(program)
            self._nodes = [None] * program.nodes
        try:
            self._fill(program)
        except ValueError as error:
            if not self._start:
                raise
            return Ended(failures=(Failure(0, time.time(), "death", str(error), None),))
        self._start += 1
        if not self._adopted:
            self._requests = StopRequests(stops_at_step=program.stops_at_step)
        with self._requests.received():
            waiting = self._begin(program)
            return waiting if isinstance(waiting, Ended) else self._wait(program, waiting)

    def adopt(self, run: str) -> Program | None:
        """Take over the machines of a process that has died.

        Args:
            run: namespace of the actors.

        Returns:
            the program of the newest start; None if no machine has started ranks.
        """
        ray = _ray()
        self._run_name, self._group = run, ray.util.get_placement_group(run)
        self._adopted, self._requests = True, StopRequests(stops_at_step=True)
        actors = {int(name.split("-")[1]): actor for name, actor in ray_standby.machines(run).items()}
        starts = self._answers({number: actor.newest.remote() for number, actor in actors.items()})
        for number in actors.keys() - starts.keys():
            with contextlib.suppress(Exception):  # it is lost
                ray.kill(actors[number])
        self._start = max(starts.values(), default=-1)
        newest = [number for number in starts if starts[number] == self._start]
        programs = self._answers({number: actors[number].program.remote() for number in newest})
        program: Program | None = next(iter(programs.values()), None)
        if program is not None:
            self._nodes = [actors[number] if number in starts else None for number in range(program.nodes)]
            self._whole = len(newest) == program.nodes
        return program

    def rejoin(self, program: Program) -> Ended:
        """Wait for the end of the ranks that another process has started.

        Args:
            program: returned by `adopt`.
        """
        if not self._whole:  # some machines did not start: the next start ends the ranks of the others
            text = "a machine, or the process that was starting the ranks, was lost"
            return Ended(failures=(Failure(0, time.time(), "death", text, None),))
        return self._wait(program, {node.ended.remote(self._start): n for n, node in enumerate(self._nodes)})

    def request_stop(self) -> None:
        """Stop the ranks as SIGTERM to this process does."""
        self._requests.add(signal.SIGTERM)

    def _answers(self, asked: Mapping[int, Any]) -> dict[int, Any]:
        """Return the answers of machines by number, without lost machines and machines that do not answer."""
        ray, answers = _ray(), dict[int, Any]()
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=END_S) if asked else None
        for number, reference in asked.items():
            with contextlib.suppress(ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                answers[number] = ray.get(reference, timeout=0)
        return answers

    def _stand_by(self, run_dir: str) -> None:
        """Start the actors that continue the run after the death of this process."""
        ray, self._run_name = _ray(), f"fabricx-{secrets.token_hex(8)}"
        options: dict[str, Any] = {"namespace": self._run_name, "num_cpus": 0, "max_restarts": -1}
        pulse = ray.remote(ray_standby.Pulse).options(name=ray_standby.PULSE, max_task_retries=-1, **options)
        self._pulse = pulse.remote()  # ends when this process has no reference
        # This machine has the project, the environment and the run's folder; after its loss, any other machine.
        near = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        here = near(ray.get_runtime_context().get_node_id(), soft=True)
        standby = ray.remote(ray_standby.Standby).options(
            name=ray_standby.STANDBY, lifetime="detached", scheduling_strategy=here, **options
        )
        standby.remote(pickle.dumps(self), self._run_name, run_dir, os.getpid())

    def _placement_group(self, program: Program) -> Any:
        """Reserve the machines.

        Raises:
            ValueError: the cluster does not have them within the time.
        """
        ray = _ray()
        bundles = [self._bundle(program, number) for number in range(program.nodes)]
        options = {"name": self._run_name, "lifetime": "detached"} if self._run_name else {}
        group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD", **options)
        try:
            ray.get(group.ready(), timeout=self.timeout_s)
        except ray.exceptions.GetTimeoutError:
            ray.util.remove_placement_group(group)
            raise self._too_few(program) from None
        return group

    def _too_few(self, program: Program) -> ValueError:
        wanted = " and ".join(f"{count} {kind}" for kind, count in self._bundle(program, program.nodes - 1).items())
        machines = [
            ", ".join(f"{int(count)} {kind}" for kind, count in node["Resources"].items() if kind in ("CPU", "GPU"))
            for node in _ray().nodes() if node["Alive"]
        ]  # fmt: skip
        return ValueError(
            f"the cluster of Ray did not have {program.nodes} free machine(s) with {wanted} each within "
            f"{self.timeout_s:g} s; its machines have: {'; '.join(machines)}. Set fewer num_nodes, devices or "
            "cpus_per_rank, or add machines"
        )

    def _bundle(self, program: Program, number: int) -> dict[str, int]:
        """Return the resources of a machine; the last machine has those of the servers, too."""
        cores = {"CPU": self.cpus_per_rank * program.processes_on(number)}
        return {**cores, "GPU": program.processes} if program.gpus else cores

    def _fill(self, program: Program) -> None:
        """Start an actor on each machine that has none.

        Raises:
            ValueError: the cluster has no machine for an actor within the time.
        """
        ray = _ray()
        new = [number for number, node in enumerate(self._nodes) if node is None]
        for number in new:
            self._nodes[number] = self._actor(program, number)
        begun = [self._nodes[number].begun.remote() for number in new]
        waiting = ray.wait(begun, num_returns=len(begun), timeout=self.timeout_s)[1] if new else []
        if waiting:
            for number in (number for number, reference in zip(new, begun, strict=True) if reference in waiting):
                self._give_up(number)
            raise self._too_few(program)

    def _actor(self, program: Program, number: int) -> Any:
        placed = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        options = {} if not self._run_name else {
            "name": f"{ray_standby.MACHINE}-{number}-{time.time_ns()}", "namespace": self._run_name,
            "lifetime": "detached",
        }  # fmt: skip
        return _ray().remote(Machine).options(
            num_cpus=self.cpus_per_rank * program.processes_on(number),
            num_gpus=program.processes if program.gpus else 0,
            scheduling_strategy=placed(self._group, number), max_concurrency=CALLS, **options,
        ).remote()  # fmt: skip

    def _begin(self, program: Program) -> dict[Any, int] | Ended:
        """Start the ranks on all machines, and return the numbers of the machines by the reference to their end."""
        ray = _ray()
        try:
            address = ray.get(self._nodes[0].address.remote(ray.util.get_node_ip_address))
        except ray.exceptions.RayActorError as error:
            return self._lost(0, program, error)
        work, threads = ray.put(program), {"OMP_NUM_THREADS": str(self.cpus_per_rank)}
        waiting = {}
        for number, node in enumerate(self._nodes):
            variables = [{**threads, **rank} for rank in torchrun_variables(program, number, *address)]
            waiting[node.run.remote(self._start, work, variables)] = number
        return waiting

    def _wait(self, program: Program, waiting: dict[Any, int]) -> Ended:
        """Wait for the end of the ranks on all machines."""
        ray, ends, deadline = _ray(), list[Ended](), float("inf")
        while waiting:
            ready, _ = ray.wait(list(waiting), timeout=LOOK_S)
            for reference in ready:
                ends.append(self._end_of(reference, waiting.pop(reference), program))
                if ends[-1].failures and deadline == float("inf"):
                    died = all(failure.kind in ("killed", "death") for failure in ends[-1].failures)
                    deadline = time.monotonic() + DEATH_S + (0.0 if died else GATHER_S)
            if time.monotonic() > deadline:  # once: machines that do not answer are ignored
                for number in waiting.values():
                    self._nodes[number].end.remote(self._start)
                ready, lost = ray.wait(list(waiting), num_returns=len(waiting), timeout=END_S)
                ends += [self._end_of(reference, waiting[reference], program) for reference in ready]
                for reference in lost:
                    self._give_up(waiting[reference])
                break
            if (requested := self._requests.arrived()) is not None:
                for number in waiting.values():
                    self._nodes[number].signal.remote(self._start, requested)
        failures = tuple(failure for ended in ends for failure in ended.failures)
        result = next((ended.result for ended in ends if ended.result is not None), None)
        reached = max(ended.reached for ended in ends)
        stopping = bool(self._requests) or (not failures and any(ended.stopping for ended in ends))
        return Ended(None if failures else result, failures, stopping=stopping, reached=reached)

    def _end_of(self, reference: Any, number: int, program: Program) -> Ended:
        """Return the end of the ranks of a machine; a lost machine is replaced at the next start."""
        ray = _ray()
        try:
            ended: Ended = ray.get(reference)
        except ray.exceptions.RayActorError as error:
            return self._lost(number, program, error)
        return ended

    def _lost(self, number: int, program: Program, error: Exception) -> Ended:
        self._nodes[number] = None
        first = str(error).strip().splitlines()[0]
        text = f"machine {number}, or its actor of Ray, was lost: {type(error).__name__}: {first}"
        return Ended(failures=(Failure(number * program.processes, time.time(), "death", text, None),))

    def _give_up(self, number: int) -> None:
        _ray().kill(self._nodes[number])
        self._nodes[number] = None


def _ray() -> Any:
    """Import Ray, which takes seconds; whether it has types depends on its being installed."""
    return importlib.import_module("ray")
