"""Launcher that submits ranks as a job of SLURM."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, final

from fabricx.launch.cluster import address
from fabricx.launch.launcher import Ended, Launcher, Program, torchrun_variables
from fabricx.launch.ranks import GATHER_S, run_rank
from fabricx.launch.signals import StopRequests
from fabricx.launch.worker import Failure
from fabricx.launchers.output import MainOutput

LOOK_S: Final = 0.5  # seconds between two looks at the job
QUEUE_S: Final = 5.0  # seconds between two requests to SLURM
CANCEL_S: Final = 60.0  # seconds for a job to end after its ranks have ended
COMMAND_S: Final = 60.0  # limit for a command of SLURM
LATE_S: Final = 10.0  # seconds that a result may need to arrive after the end of the job
NOTICE: Final = "USR1"  # signal of SLURM before pre-emption or the end of the job's time
_ENDS: Final = (signal.SIGTERM, signal.SIGUSR1)


@final
class Slurm(Launcher):
    """Submit the ranks as a job of SLURM, by submitit (pip install 'fabricx[slurm]').

    This process, on a login node, waits for the job, and prints the output of the main rank. Ctrl-C requests the ranks
    to stop at their next step. The job has one task for each rank. Before pre-emption and the end of the job's time the
    ranks save a checkpoint. With the callback FaultRecovery the run is then submitted again and continues from the
    checkpoint, also after the loss of a process or machine. The project and the folders have to be on a file system
    that all machines share.

    Args:
        partition, account, qos: as of sbatch.
        time_min: time limit of a job in minutes.
        cpus_per_rank: cores for each rank.
        notice_s: seconds before the end of the job's time at which the ranks save a checkpoint.
        options: further options of sbatch, such as {"constraint": "a100", "mem-per-cpu": "4G"}.
        folder: the logs of each job are in a folder below it, which only this user may read.
        cluster: "slurm"; "local" runs the tasks on this machine without SLURM, to try a program.
    """

    def __init__(
        self, partition: str | None = None, account: str | None = None, qos: str | None = None, time_min: int = 60,
        cpus_per_rank: int = 1, notice_s: int = 120, options: Mapping[str, Any] | None = None,
        folder: str = "slurm_jobs", cluster: str = "slurm",
    ) -> None:  # fmt: skip
        if importlib.util.find_spec("submitit") is None:
            raise ModuleNotFoundError(
                "launcher=slurm needs submitit: pip install 'fabricx[slurm]', or pip install submitit"
            )
        if cluster not in ("slurm", "local"):
            raise ValueError(f"cluster={cluster!r}: set 'slurm' or 'local'")
        for name, value in (("time_min", time_min), ("cpus_per_rank", cpus_per_rank), ("notice_s", notice_s)):
            if value < 1:
                raise ValueError(f"{name}={value}: set 1 or more")
        if notice_s >= 60 * time_min:
            raise ValueError(
                f"notice_s={notice_s} is not below the job's time of {time_min} min: set a smaller notice_s"
            )
        self.cluster, self.folder, self.cpus_per_rank, self.notice_s = cluster, folder, cpus_per_rank, notice_s
        self.time_min = time_min
        arguments = {"partition": partition, "account": account, "qos": qos}
        self.options = {**{name: value for name, value in arguments.items() if value is not None}, **(options or {})}

    def run(self, program: Program) -> Ended:
        self._check_gpus(program)
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=time.strftime("%Y-%m-%d_%H-%M-%S_"), dir=self.folder)).absolute()
        try:
            job = self._submit(program, folder)
            print(f"job {job.job_id} of {self.cluster} is submitted; output of all ranks: {folder}", flush=True)
            try:
                return self._wait(program, job)
            finally:
                with contextlib.suppress(OSError, subprocess.SubprocessError):
                    job.cancel(check=False)  # ranks that have not ended by themselves
        finally:
            for file in (*folder.glob("*.pkl"), *folder.glob("*.pid")):  # they contain the job and its key
                file.unlink(missing_ok=True)

    def _check_gpus(self, program: Program) -> None:
        """Refuse to train on the CPUs of machines with GPUs only because this machine has none.

        Raises:
            ValueError: the partition has GPUs, and the user has not chosen.
        """
        if not program.gpus_unused or self.cluster != "slurm" or shutil.which("sinfo") is None:
            return
        partition = self.options.get("partition")
        chosen = () if partition is None else (f"--partition={partition}",)
        if "gpu" in _command("sinfo", "--noheader", "--format=%G", *chosen).stdout:
            raise ValueError(
                "this machine has no GPU, so the run would train on CPUs, and the machines of SLURM have GPUs: set "
                "accelerator to 'gpu', or to 'cpu'"
            )

    def _submit(self, program: Program, folder: Path) -> Any:
        """Submit the job.

        Raises:
            ValueError: SLURM is not installed here, refuses the job, or several machines are requested without it.
        """
        if self.cluster == "local" and program.nodes > 1:
            raise ValueError(f"cluster='local' has one machine, and num_nodes={program.nodes}: set cluster='slurm'")
        try:
            executor = _submitit().AutoExecutor(
                folder, cluster=self.cluster, slurm_max_pickle_size_gb=math.inf, local_max_pickle_size_gb=math.inf
            )
            executor.update_parameters(
                name="fabricx", nodes=program.nodes, tasks_per_node=program.processes, timeout_min=self.time_min,
                cpus_per_task=self.cpus_per_rank, gpus_per_node=program.processes if program.gpus else None,
                stderr_to_stdout=True,
                # A job that SLURM itself starts again would begin without the checkpoint.
                slurm_additional_parameters={
                    "signal": f"{NOTICE}@{self.notice_s}", "no-requeue": True, **self.options
                },
            )  # fmt: skip
            # Ctrl-C in a terminal reaches all its processes: without SLURM, the tasks are among them.
            with _blocked(signal.SIGINT) if self.cluster == "local" else contextlib.nullcontext():
                return executor.submit(_Rank(program, self.cpus_per_rank))
        except (_submitit().core.utils.FailedJobError, OSError, RuntimeError) as error:
            raise ValueError(f"the job was not submitted: {error}") from error

    def _wait(self, program: Program, job: Any) -> Ended:
        requests = StopRequests(stops_at_step=program.stops_at_step)
        over = _Queue(job).over if self.cluster == "slurm" else job.done
        waiting = list(range(program.nodes * program.processes))
        result, failures, deadline, ended_early = None, list[Failure](), float("inf"), False
        output = MainOutput(Path(job.paths.stdout), without="submitit ")
        with requests.received():
            while waiting and time.monotonic() < deadline:
                time.sleep(LOOK_S)
                output.copy()
                lost = over()  # before the look for results: a rank writes its result before the job ends
                for rank in tuple(waiting):
                    task = job.task(rank)
                    if (ended := _end_of(rank, task, lost=lost)) is not None:
                        waiting.remove(rank)
                        result = result if ended.result is None else ended.result
                        failures += ended.failures
                        ended_early = ended_early or lost or bool(ended.failures and ended.stopping)
                if failures and deadline == float("inf"):
                    deadline = time.monotonic() + GATHER_S
                # A job in which no rank has begun is cancelled.
                if requests.arrived(begun=lambda: not self._is_pending(job)) is not None:
                    self._signal(job)
        output.copy(ended=True)
        stopping = bool(requests) or (ended_early and self.cluster == "slurm" and _is_cancelled(job))
        return Ended(None if failures else result, tuple(failures), stopping=stopping)

    def _is_pending(self, job: Any) -> bool:
        return self.cluster == "slurm" and _state(job) in ("PENDING", "CONFIGURING")

    def _signal(self, job: Any) -> None:
        """Request all ranks to stop at their next step, as Ctrl-C does."""
        if self.cluster == "slurm":
            _command("scancel", "--signal=INT", str(job.job_id))
            return
        for rank in range(job.num_tasks):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((job.paths.folder / f"{job.job_id}_{rank}.pid").read_text()), signal.SIGINT)


@final
class _Rank:
    """A rank, as a task of the job.

    Args:
        program: what the rank runs.
        threads: threads of the rank's computations.
    """

    def __init__(self, program: Program, threads: int) -> None:
        self._program, self._threads = program, threads

    def __call__(self) -> Ended:
        """Run the rank, and return its result or its failure."""
        environment = _submitit().JobEnvironment()
        rank = environment.global_rank
        # Without the address that the login node has.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
        host, port = address(inherited) if "SLURM_JOB_ID" in inherited else ("127.0.0.1", _port_of(environment))
        variables = torchrun_variables(self._program, environment.node, host, port)[environment.local_rank]
        os.environ.update({"OMP_NUM_THREADS": str(self._threads), **variables, "RANK": str(rank)})
        (environment.paths.folder / f"{environment.job_id}_{rank}.pid").write_text(str(os.getpid()))
        notices = _Notices()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if "SLURM_JOB_ID" not in inherited:
            os.setpgrp()  # away from the terminal, see `_submit`
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
        ended = run_rank(self._program.job, rank)
        if not notices.received or not (ended.stopping or ended.failures):
            return ended
        name = signal.Signals(notices.received[0]).name
        text = f"the job has received {name} (pre-emption, scancel, or the end of its time)"
        return Ended(failures=(*ended.failures, _lost(rank, text)), stopping=name == "SIGTERM")


@final
class _Notices:
    """Receives the signals of SLURM, instead of submitit, which would end the process or ignore them.

    The run's handlers call it. A signal that arrives before these are set is repeated when they are.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        for number in _ENDS:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: object) -> None:
        self.received.append(number)
        threading.Thread(target=self._repeat, args=(number,), daemon=True).start()

    def _repeat(self, number: int) -> None:
        while signal.getsignal(number) == self._receive:  # for ever if the run has handled it
            time.sleep(LOOK_S)
        os.kill(os.getpid(), number)


@contextlib.contextmanager
def _blocked(number: int) -> Iterator[None]:
    """Block a signal in this thread and in the processes that it starts meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (number,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _port_of(environment: Any) -> int:
    """Return a port that all tasks on this machine derive from the number of the job."""
    return 15000 + int(environment.job_id) % 10000


def _end_of(rank: int, task: Any, *, lost: bool) -> Ended | None:
    """Return the end of a rank; None while its task runs.

    Args:
        rank: number of the rank.
        task: its task.
        lost: the job is over, so that a task without a result was lost.
    """
    if task.paths.result_pickle.exists():
        try:
            return task.result()  # type: ignore[no-any-return]
        except RuntimeError as error:  # of the task
            return Ended(failures=(_lost(rank, str(error)),))
    return Ended(failures=(_lost(rank, f"its task of job {task.job_id} was lost"),)) if lost else None


def _lost(rank: int, text: str) -> Failure:
    return Failure(rank, time.time(), "death", text, None)


def _is_cancelled(job: Any) -> bool:
    """Return whether a user has cancelled a job whose ranks have ended early; else it was pre-empted, for example."""
    deadline = time.monotonic() + CANCEL_S
    while (state := _state(job)) in ("RUNNING", "COMPLETING") and time.monotonic() < deadline:
        time.sleep(1.0)
    return state.startswith("CANCELLED")


def _state(job: Any) -> str:
    """Return the state of a job, also after its end; "" if SLURM doesn't know it any more."""
    options = ("--noheader", "--states=all", "--jobs", str(job.job_id), "--format=%T")
    return _command("squeue", *options).stdout.strip()


@final
class _Queue:
    """The place of a job in the queue of SLURM. It needs no accounting, which many clusters don't have.

    Args:
        job: the job.
    """

    def __init__(self, job: Any) -> None:
        self._job, self._looked, self._over_at = str(job.job_id), 0.0, float("inf")

    def over(self) -> bool:
        """Return whether the job has left the queue some seconds ago: results arrive late on network file systems."""
        if (now := time.monotonic()) > self._looked + QUEUE_S and self._over_at == float("inf"):
            self._looked = now
            answer = _command("squeue", "--noheader", "--jobs", self._job)
            if "Invalid job id" in answer.stderr or not (answer.returncode or answer.stdout.strip()):
                self._over_at = now
        return now > self._over_at + LATE_S


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of SLURM; without an answer in time the result is that of a failed command."""
    try:
        return subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=COMMAND_S)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(arguments, 1, "", "")


def _submitit() -> Any:
    """Import submitit, which is installed where this launcher is used."""
    return importlib.import_module("submitit")
