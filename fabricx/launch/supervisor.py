"""Supervisor process: starts workers, hosts their store and detects failures. It joins no process group."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol

from fabricx import by_value
from fabricx.distributed.activity.heartbeat import Diagnosis
from fabricx.distributed.membership.deaths import DEATHS
from fabricx.distributed.membership.generations import SAVING, WorkerMessage
from fabricx.distributed.messages import authentication
from fabricx.distributed.stop_consensus import STOP_KEY
from fabricx.distributed.store.server import StoreServer
from fabricx.errors import RanksDisagree, WorkerFailed
from fabricx.fault_tolerance.controller import ElasticController, ElasticPolicy
from fabricx.fault_tolerance.deadlock import DeadlockDetector, explanation
from fabricx.fault_tolerance.hang_report import explain, from_dump
from fabricx.fault_tolerance.liveness import HeartbeatMonitor
from fabricx.launch import preloaded, worker_process
from fabricx.launch.fork_server import keep_running, starting_without_script
from fabricx.launch.memory_files import MemoryFiles
from fabricx.launch.module_files import module_files
from fabricx.launch.pickling import check_picklable
from fabricx.launch.process_settings import ProcessSettings
from fabricx.launch.resize import Requests
from fabricx.launch.signals import announce_stop, handled, stop_now
from fabricx.launch.worker import ASKED, ENDS, Failure, WorkerSpec, failure_of
from fabricx.launch.worker import main as worker_main
from fabricx.scratch import (
    multiprocessing_folder_of,
    private_folder,
    set_multiprocessing_folder,
)


class Note(Protocol):
    """Records an event."""

    def __call__(self, name: str, text: str, **numbers: float) -> None: ...


FROZEN_S = 60.0  # default time without a heartbeat after which a process is terminated
RESTARTS = 3  # most restarts of each server
GATHER_S = 1.0  # time after the first failure in which other ranks may report failures
DUMP_S = 0.1  # time for a frozen process to write its stacks after a signal
ANSWER_S = 5.0  # longest time in which a worker answers a request for a diagnosis
TERMINATE_S = 3.0  # time for a process to end before it is killed


def run_workers(
    function: Callable[..., Any], arguments: tuple[Any, ...], *, size: int, named: Mapping[str, object] | None = None,
    servers: int = 0, serve: Callable[..., Any] | None = None, elastic: ElasticPolicy | None = None,
    frozen_after: float = FROZEN_S, stuck_after: float | Literal["learned"] | None = None,
    failures: list[str] | None = None, run_dir: Path | None = None, note: Note | None = None,
    stops_at_step: bool = True,
) -> list[Any]:  # fmt: skip
    """Run `function(world, *arguments)` in `size` worker processes, and return their results by rank.

    Args:
        function: any function.
        arguments: pickled once, and unpickled by each worker.
        size: number of workers.
        named: names of the objects in `arguments`, for the error if an object cannot be pickled.
        servers: number of parameter servers, which end after all workers.
        serve: function of the servers: `serve(world, number, folder)`.
        elastic: policy for continuing after the death of a worker; None if a death is an error. If set, servers that
            die are restarted.
        frozen_after: seconds without a heartbeat after which a process is terminated: the process was stopped, or code
            in it holds the interpreter's lock.
        stuck_after: seconds without a further batch after which a worker is terminated; "learned": a multiple of the
            longest pause of this run; None: never.
        failures: list to which each survived death is appended.
        run_dir: folder in which users may request more or fewer workers of an elastic run.
        note: called with name, text and numbers of each event.
        stops_at_step: Ctrl-C and SIGTERM stop all workers at the same next step; False terminates them immediately.

    Returns:
        results of the workers that exist at the end, by rank.

    Raises:
        NotPicklable: an argument cannot be pickled; the message names the attribute.
        WorkerFailed: a worker raised an error or was killed; all processes were terminated.
        KeyboardInterrupt: after a second Ctrl-C, or the first if `stops_at_step` is False.
        SystemExit: with status 143, after SIGTERM if `stops_at_step` is False.
    """
    set_multiprocessing_folder()
    with private_folder() as folder:
        _write_job(Path(folder), function, arguments, named or {})
        liveness = HeartbeatMonitor(frozen_after, stuck_after)
        failures = [] if failures is None else failures
        workers = _Workers(folder, size, servers, serve, liveness, elastic, failures, run_dir, note)
        with keep_running(), workers.signals() if stops_at_step else handled(lambda number, frame: stop_now(number)):
            return workers.supervise()


def _write_job(folder: Path, function: Any, arguments: tuple[Any, ...], named: Mapping[str, object]) -> None:
    try:
        job = by_value.dumps((function, arguments))
    except Exception as error:
        check_picklable({"function": function, **(named or {"arguments": arguments})}, error)
        raise
    authentication.write_private(folder / "job", job)


class _Workers:
    """The processes of a run and their state.

    `rank` is the number of a process (`WorkerSpec.rank`), which it keeps: workers first, then servers, then
    replacements and newcomers. The present rank of a worker in the process group is `_rank(worker)`.

    Messages of a process: "beat" (heartbeat), `ASKED` (diagnosis), `ENDS` (reason why it ends itself), "result" (path
    of the result), "failure" (`Failure`), and those of `ElasticController.receive`. Messages to a process: `ASKED`,
    "died" (to servers, with the number of a worker), and those of `ElasticController.messages`.
    """

    def __init__(
        self, folder: str, size: int, servers: int, serve: Callable[..., Any] | None, liveness: HeartbeatMonitor,
        elastic: ElasticPolicy | None, failures: list[str], run_dir: Path | None, note: Note | None,
    ) -> None:  # fmt: skip
        self._liveness = liveness
        self._requests = None if run_dir is None else Requests(run_dir)
        self._note: Note = note or (lambda name, text, **numbers: None)
        self._stopping = False  # a stop was requested
        self._termination_reasons: dict[int, str] = {}  # by process that was terminated, or ended itself
        key = authentication.new_key()
        self._store = StoreServer(folder, key)
        self._size = size
        self._controller = None if elastic is None else ElasticController(elastic, size, failures)
        self._results: dict[int, str] = {}  # path of each worker's result
        self._ended: list[int] = []  # workers whose CANNOT_RECOVER the controller has not received yet
        self._failures: list[Failure] = []
        self._diagnoses: dict[int, Diagnosis | None] = {}  # answers of workers to the last request
        self._deaths: dict[int, Failure] = {}  # deaths that the other workers survived
        self._controls: dict[int, Connection] = {}
        self._processes: dict[int, BaseProcess] = {}
        self._memory = MemoryFiles(folder)
        self._deadlock = DeadlockDetector()
        self._dead: set[int] = set()  # workers that died
        settings = ProcessSettings.of_this_process()
        path = tuple(entry or os.path.abspath(entry) for entry in sys.path)
        files = module_files()
        self._specs = [
            WorkerSpec(
                rank, size, self._store.path, key, folder, path, os.getcwd(), settings=settings, module_files=files,
                elastic=elastic is not None and rank < size, serve=serve if rank >= size else None,
            )
            for rank in range(size + servers)
        ]  # fmt: skip

    def supervise(self) -> list[Any]:
        """Start all processes, and wait for the results of the workers."""
        try:
            for spec in self._specs:
                self._start(spec)
            while not self._complete():
                self._process_events(timeout=1.0 if self._controller is None else self._controller.due())
                self._terminate_silent()
                self._end_deadlock()
                self._change_members()
                if self._failures:
                    if not any(failure.kind == "killed" for failure in self._failures):
                        self._collect_failures()
                    raise self._first_failure()
            return [pickle.loads(Path(self._results[rank]).read_bytes()) for rank in self._members()]
        finally:
            self._terminate_all()

    def _complete(self) -> bool:
        """Return whether all workers have returned a result; servers return none."""
        members = self._members()
        return len(members) > 0 and all(rank in self._results for rank in members)

    def _members(self) -> Sequence[int]:
        """Return the workers of the process group, by rank."""
        return range(self._size) if self._controller is None else self._controller.workers

    def _start(self, spec: WorkerSpec) -> None:
        context = preloaded.context()
        if spec.elastic or spec.serve is not None:
            self._memory.open(spec.rank)
        control, worker_end = context.Pipe()
        # Not a daemon, because a worker may have child processes, such as the workers of a DataLoader.
        process = context.Process(target=worker_main, args=(spec, worker_end), name=f"fabricx-rank-{spec.rank}")
        multiprocessing_folder_of(process, spec.folder, spec.rank)
        with starting_without_script():
            worker_process.start(process)
        self._liveness.started(spec.rank)
        worker_end.close()
        self._controls[spec.rank], self._processes[spec.rank] = control, process

    def _process_events(self, timeout: float) -> None:
        """Wait for messages and process ends for at most `timeout` seconds, and handle them."""
        sentinels = {process.sentinel: rank for rank, process in self._processes.items()}
        ready = wait([*self._controls.values(), *sentinels], timeout)
        for rank, control in list(self._controls.items()):
            if control in ready:
                self._receive(rank, control)
        self._forward_ended()
        for sentinel, rank in sentinels.items():
            if sentinel in ready:
                self._receive_from_all()  # messages sent before its end; those of other ranks may have caused its end
                self._forward_ended()
                self._handle_end(rank)

    def _handle_end(self, rank: int) -> None:
        """Release a process that has ended, and decide what its end means: a result, a survived death, or a failure."""
        process = self._processes.pop(rank)
        process.join()
        worker_process.end_children(process)
        self._liveness.over(rank)
        if rank in self._results or any(failure.rank == rank for failure in self._failures):
            return
        crash = ""
        with contextlib.suppress(OSError):  # it ended before it had opened the file
            crash = (Path(self._specs[rank].folder) / f"crash-{rank}").read_text()
        death = worker_process.failure_of_end(rank, process.exitcode, self._termination_reasons.get(rank), crash)
        if self._specs[rank].serve is not None:
            if process.exitcode == 0:  # a server ends after its workers
                return
            if self._controller is not None and self._specs[rank].generation < RESTARTS:
                self._restart_server(rank)
            else:
                self._failures.append(death)
            return
        self._store.push(DEATHS, str(rank).encode())
        self._notify_servers(rank)
        if self._controller is None or not self._controller.died(rank, death.traceback):
            self._failures.append(death)
            return
        self._deaths[rank] = death
        if process.exitcode:  # 0: it left on request
            self._note("death", f"{self._name(rank)}: {death.traceback}")

    def _notify_servers(self, worker: int) -> None:
        """Notify all servers, including servers started later, of a worker's death: they reassign its batches."""
        self._dead.add(worker)
        for rank, control in self._controls.items():
            if self._specs[rank].serve is not None:
                with contextlib.suppress(OSError):
                    control.send(("died", worker))

    def _terminate_silent(self) -> None:
        """Terminate processes without heartbeats or progress, for which other processes would wait without end."""
        silent, news = self._liveness.silent(), self._liveness.news(self._name)
        silent_s = max((loss.silent_s for loss in silent.values()), default=0.0)
        diagnosis = self._diagnose(silent_s) if silent or news else ""
        for rank, loss in silent.items():
            self._termination_reasons[rank] = f"{loss.reason}; {diagnosis}"
            self._liveness.over(rank)
            if rank in self._processes:
                self._processes[rank].kill()  # SIGKILL also ends a stopped process
        if news is not None:
            print(f"{news}\n{diagnosis}", file=sys.stderr, flush=True)

    def _diagnose(self, silent_s: float) -> str:
        """Request a diagnosis from all workers; return a sentence about which rank blocks which ranks.

        Args:
            silent_s: seconds for which the other ranks waited for processes that are lost; 0 if none is.
        """
        asked = [rank for rank in self._members() if rank in self._processes]
        self._ask(asked)
        self._dump_stacks([rank for rank in asked if self._liveness.frozen(rank)])
        sentence = explain(self._answers(asked))
        self._note_hang(sentence, asked, silent_s)
        return sentence

    def _ask(self, workers: Sequence[int]) -> None:
        """Request a diagnosis from workers, and wait for the answers of those that are able to answer."""
        self._diagnoses, able = {}, {worker for worker in workers if self._liveness.answers(worker)}
        for worker in workers:
            with contextlib.suppress(OSError, KeyError):
                self._controls[worker].send((ASKED, None))
        deadline = time.monotonic() + ANSWER_S
        while not self._diagnoses.keys() >= able and time.monotonic() < deadline:
            self._process_events(timeout=0.02)

    def _answers(self, workers: Sequence[int]) -> dict[int, Diagnosis | None]:
        """Return the diagnoses of workers by their present ranks; None without an answer."""
        seats = {worker: rank for rank, worker in enumerate(self._members())}
        return {seats[worker]: self._diagnoses.get(worker) for worker in workers if worker in seats}

    def _note_hang(self, sentence: str, workers: Sequence[int], silent_s: float) -> None:
        stacks = [
            f"{self._name(worker)}:\n{answer.stacks if (answer := self._diagnoses.get(worker)) else '(no answer)'}"
            for worker in workers
        ]
        self._note("hang", "\n\n".join([sentence, *stacks]), silent_s=silent_s)

    def _end_deadlock(self) -> None:
        """End the run if its ranks wait for each other for ever, since they are in different collectives."""
        members = list(self._members())
        waited_s = self._liveness.waited_s(members)
        intact = self._controller is None or self._controller.intact
        if not self._deadlock.due(waited_s) or self._failures or not intact:
            return
        self._ask(members)
        answers = self._answers(members)
        if not self._failures and len(answers) == len(members) and self._deadlock.found(answers):
            text = explanation(answers)
            self._note_hang(text, members, waited_s)
            self._failures.append(failure_of(members[0], RanksDisagree(text), time.monotonic()))

    def _dump_stacks(self, frozen: Sequence[int]) -> None:
        """Obtain stacks by a signal from processes with a held interpreter's lock; stopped processes cannot answer."""
        for rank in frozen:
            if rank in self._processes and (pid := self._processes[rank].pid) is not None:
                os.kill(pid, signal.SIGUSR2)
        if frozen:
            time.sleep(DUMP_S)
        for rank in frozen:
            with contextlib.suppress(OSError):
                diagnosis = from_dump((Path(self._specs[rank].folder) / f"stacks-{rank}").read_text())
                if diagnosis is not None:
                    self._diagnoses[rank] = diagnosis

    def _change_members(self) -> None:
        """Start replacements and newcomers, and send the controller's messages about the group to the workers."""
        if self._controller is None:
            return
        if (stuck := self._controller.stuck) and not self._failures:
            lost = min(self._controller.missing or self._controller.workers)
            self._failures.append(Failure(lost, time.monotonic(), "death", stuck, None))
        if self._complete():
            return
        if self._requests is not None and (workers := self._requests.take()) is not None:
            print(self._controller.resize(workers), file=sys.stderr, flush=True)
        while (seat := self._controller.wanted()) is not None:
            number = len(self._specs)
            device = self._controller.started(number)
            spec = replace(self._specs[0], rank=number, seat=seat, device_number=device, newcomer=True)
            self._specs.append(spec)
            self._start(spec)
        for ranks, kind, content in self._controller.messages():
            for rank in ranks:
                with contextlib.suppress(OSError, KeyError):  # the worker just died
                    self._controls[rank].send((kind, content))
        if self._controller.settled:  # the in-memory checkpoints of dead workers are not needed any more
            self._memory.close_except(self._processes)

    def _restart_server(self, rank: int) -> None:
        """Restart a server that was killed; it restores a snapshot, or workers send it their weights."""
        if self._complete():
            return
        text = f"server {rank - self._size} died and is restarted"
        self._note("death", text)
        print(text, file=sys.stderr)
        self._specs[rank] = replace(self._specs[rank], generation=self._specs[rank].generation + 1)
        self._start(self._specs[rank])
        with contextlib.suppress(OSError):  # it has died again, which its exit code will report
            for worker in self._dead:
                self._controls[rank].send(("died", worker))

    def _receive(self, rank: int, control: Connection) -> None:
        try:
            while control.poll():
                kind, content = control.recv()
                if kind == "beat":
                    self._liveness.heard(rank, *content)
                elif kind == ASKED:
                    self._diagnoses[rank] = content
                elif kind == ENDS:
                    self._termination_reasons[rank] = content
                elif kind == "result":
                    self._results[rank] = content
                    self._liveness.over(rank)
                elif kind == WorkerMessage.CANNOT_RECOVER:
                    self._ended.append(rank)
                elif kind != "failure":
                    assert self._controller is not None
                    self._controller.receive(rank, kind, content)
                elif self._controller is None or not self._controller.could_not_join(rank, content.traceback):
                    self._failures.append(content)
        except (EOFError, OSError):  # also if it was closed while other pipes were read
            self._controls.pop(rank, control).close()

    def _receive_from_all(self) -> None:
        for rank, control in list(self._controls.items()):
            self._receive(rank, control)

    def _forward_ended(self) -> None:
        """Pass the messages CANNOT_RECOVER to the controller, after all messages that other workers sent before them.

        A worker ends its training only after the others have begun theirs. The controller dismisses a replacement that
        has not reported its first step when another worker ends, so that report must not be read too late.
        """
        seen = -1
        while len(self._ended) > seen:  # a pipe may have been read before a message that another worker waited for
            seen = len(self._ended)
            if seen:
                self._receive_from_all()
        for rank in self._ended:
            assert self._controller is not None
            self._controller.receive(rank, WorkerMessage.CANNOT_RECOVER, None)
        self._ended.clear()

    def _collect_failures(self) -> None:
        """Wait for reports of other ranks, because the first report need not be of the first failure.

        Servers do not end after a failure of workers. They are waited for only if workers have merely lost a peer.
        """
        deadline = time.monotonic() + GATHER_S
        while self._expects_reports() and (remaining := deadline - time.monotonic()) > 0:
            self._process_events(timeout=remaining)

    def _expects_reports(self) -> bool:
        if all(failure.secondary for failure in self._failures):
            return bool(self._processes)
        return any(self._specs[rank].serve is None for rank in self._processes)

    def _first_failure(self) -> WorkerFailed:
        """Return the error to raise: the earliest failure that is not a consequence of another failure."""
        reported, survived = list(self._failures), []
        if self._controller is not None:  # the reported failures may be consequences of a death
            survived = [self._deaths[rank] for rank in self._controller.missing if rank in self._deaths]
            self._failures += survived
            self._controller.explain_cuts()
        first = min(self._failures, key=_order)
        name = self._name(first.rank)
        others = sorted({self._name(failure.rank) for failure in self._failures} - {name})
        also = f"\n({', '.join(others)} failed after that)" if others else ""
        not_in_place = ""
        if first in survived and reported:
            second = min(reported, key=_order)
            where = f"recovery in place failed on {self._name(second.rank)}"
            also += f"\n\n{where}:\n\n{second.traceback.rstrip()}"
            not_in_place = f"{where}: {second.summary}"
        message = f"{name} failed:\n\n{first.traceback.rstrip()}{also}"
        failed = WorkerFailed(message, rank=self._rank(first.rank), traceback=first.traceback, summary=first.summary)
        failed.not_in_place = not_in_place
        failed.exhausted = self._controller is not None and self._controller.exhausted
        failed.stopping = self._stopping
        failed.saving = json.loads(self._store.get(SAVING) or b"null")
        failed.__cause__ = None if first.error is None else pickle.loads(first.error)
        failed.__suppress_context__ = True
        return failed

    def _rank(self, worker: int) -> int:
        """Return the present or last rank of a worker; for a worker that has not joined, its planned rank."""
        rank = None if self._controller is None else self._controller.rank_of(worker)
        spec = self._specs[worker]
        return rank if rank is not None else spec.seat if spec.newcomer else worker

    def _name(self, worker: int) -> str:
        """Return the name of a process in messages, by rank: numbers of newcomers are beyond the ranks of a run."""
        if self._specs[worker].serve is not None:
            return f"server {worker - self._size}"
        return f"rank {self._rank(worker)}"

    def _terminate_all(self) -> None:
        """Terminate all processes and release all resources."""
        for rank, process in self._processes.items():
            works = self._specs[rank].serve is None
            if not self._complete() or (works and rank not in self._results):
                process.kill()  # SIGTERM requests a stop at the next step, which a worker may never reach
        deadline = time.monotonic() + TERMINATE_S
        for rank in list(self._processes):
            process = self._processes.pop(rank)  # a further signal kills the remaining processes
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
            worker_process.end_children(process)
            process.close()
        for control in self._controls.values():
            control.close()
        self._memory.close_except(())
        self._store.close()

    def signals(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which Ctrl-C and SIGTERM stop all ranks at the same step; a second signal kills them."""

        def stop(number: int, frame: FrameType | None) -> None:
            if self._stopping:
                for process in self._processes.values():
                    process.kill()
                raise KeyboardInterrupt
            self._stopping = True
            self._store.set(STOP_KEY, b"interrupted" if number == signal.SIGINT else b"terminated")
            announce_stop()

        return handled(stop)


def _order(failure: Failure) -> tuple[bool, float]:
    """Return the key by which failures are sorted: those that only report another lost process are last."""
    return failure.secondary, failure.at
