"""Contract of launchers: engines that start the ranks of a run on the machines of a cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from fabricx.launch.worker import Failure


@dataclass(frozen=True)
class Program:
    """What a launcher starts: ranks, each of them a process of `Ranks`.

    Attributes:
        job: the work of the ranks, for `Ranks`. The content is trusted and may be secret: machines unpickle it.
        nodes: number of machines.
        processes: number of ranks on each machine.
        gpus: each rank needs a GPU.
        gpus_unused: the ranks compute on CPUs, and the caller has not requested it.
        stops_at_step: the first signal is passed to the ranks, which stop at their next step; else it ends them.
        servers: number of parameter servers: processes on the last machine, in addition to its ranks.
        run_dir: folder of a run that continues after the loss of a process. An engine may continue it after the loss of
            the process that has called the Trainer, too; then `fabricx.trainer.launcher_run.continued` decides about
            restarts. "" for other runs.
    """

    job: bytes = field(repr=False)
    nodes: int
    processes: int
    gpus: bool
    gpus_unused: bool
    stops_at_step: bool
    servers: int = 0
    run_dir: str = ""

    def processes_on(self, node: int) -> int:
        """Return the number of ranks and servers on a machine.

        Args:
            node: number of the machine.
        """
        return self.processes + (self.servers if node == self.nodes - 1 else 0)


@dataclass(frozen=True)
class Ended:
    """The end of ranks.

    Attributes:
        result: the main rank's result; None from other machines, or after a failure.
        failures: reports of ranks that failed.
        stopping: a signal had requested a stop before.
        reached: newest step of the ranks of this machine that keep in-memory checkpoints; -1 without.
    """

    result: bytes | None = field(default=None, repr=False)
    failures: tuple[Failure, ...] = ()
    stopping: bool = False
    reached: int = -1


class Launcher(ABC):
    """Starts the ranks of a run by an engine, such as Ray.

    On each machine the engine runs `Ranks(program.job, variables)`, with the variables of `torchrun_variables`. After a
    failure all other ranks have to end. The Trainer then starts all ranks again, from the newest checkpoint.
    A launcher whose process on a machine outlives its ranks, and runs those of the next start, passes `copies` to
    `Ranks`: the ranks then continue from in-memory checkpoints.

    Attributes:
        starts_servers: the launcher starts a process for each item of `torchrun_variables`, also for servers.
    """

    starts_servers: bool = False

    def starts(self) -> AbstractContextManager[object]:
        """Return a context of all starts of a run, in which `run` may use the same machines again."""
        return nullcontext()

    @abstractmethod
    def run(self, program: Program) -> Ended:
        """Run a program on all ranks, and wait for its end.

        Args:
            program: the program.

        Returns:
            the result of the main rank, or the failures of ranks and machines.

        Raises:
            ModuleNotFoundError: the engine is not installed; the message has the command that installs it.
            ValueError: the cluster does not have the requested machines.
        """


def torchrun_variables(program: Program, node: int, host: str, port: int) -> list[dict[str, str]]:
    """Return the environment variables of each rank of a machine, and of its servers, with the names of torchrun.

    Args:
        program: the program.
        node: number of the machine.
        host: address of the machine with number 0.
        port: a free port on it.
    """
    processes = program.processes_on(node)
    world = {"WORLD_SIZE": program.nodes * program.processes + program.servers, "LOCAL_WORLD_SIZE": processes,
             "GROUP_RANK": node, "MASTER_ADDR": host, "MASTER_PORT": port}  # fmt: skip
    ranks = [{**world, "RANK": node * program.processes + number, "LOCAL_RANK": number} for number in range(processes)]
    return [{name: str(value) for name, value in rank.items()} for rank in ranks]
