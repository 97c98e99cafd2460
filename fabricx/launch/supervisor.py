"""Starts workers, hosts their store, observes their ends. Never trains, never joins a process group."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from fabricx.distributed import authentication
from fabricx.distributed.generations import SAVING, gone
from fabricx.distributed.heartbeat import Diagnosis
from fabricx.distributed.stop_consensus import EVERYBODY
from fabricx.distributed.store_server import StoreServer
from fabricx.errors import WorkerFailed, lost_a_link
from fabricx.fault_tolerance import memory_checkpoint
from fabricx.fault_tolerance.controller import ElasticController, ElasticPolicy
from fabricx.fault_tolerance.hang_report import explain, from_dump
from fabricx.fault_tolerance.liveness import HeartbeatMonitor
from fabricx.launch.pickling import check_picklable
from fabricx.launch.resize import Requests
from fabricx.launch.signals import notices, stop_now
from fabricx.launch.worker import ASKED, Failure, Place
from fabricx.launch.worker import main as worker_main
from fabricx.parameter_server.wire.channel import nameless
from fabricx.scratch import (
    give_multiprocessing_a_folder,
    multiprocessing_folder_of,
    private_folder,
    unlink_semaphores_of,
)

Note = Callable[[str, str], None]
PRELOAD = [
    "torch", "torch.distributed", "torch._dynamo", "torch.optim", "fabricx.trainer.trainer", "fabricx.strategies",
    "fabricx.launch.fork_server",
]  # fmt: skip
FROZEN_S = 60.0  # without a sign of life
RESTARTS = 3  # of each server
GATHER_S = 1.0  # after the first failure, how long other ranks may still report theirs
DUMP_S = 0.1  # until one that can't has shown its stacks
ANSWER_S = 0.5  # until a worker has said what it is at
FORK_S = 5.0  # until the system says that a fork server has ended which was killed
TERMINATE_S = 3.0  # how long a process may take to end when asked to


def run_workers(
    function: Callable[..., Any], arguments: tuple[Any, ...], *, size: int, named: Mapping[str, object] | None = None,
    servers: int = 0, serve: Callable[..., Any] | None = None, elastic: ElasticPolicy | None = None,
    frozen_after: float = FROZEN_S, stuck_after: float | Literal["learned"] | None = None,
    failures: list[str] | None = None, run_dir: Path | None = None, note: Note | None = None,
    stops_at_step: bool = True,
) -> list[Any]:  # fmt: skip
    """Run `function(world, *arguments)` in `size` processes, and return what each of them returned, by rank.

    Args:
        function: importable, or defined in the script that is running.
        arguments: pickled once, and unpickled by each worker.
        size: how many processes.
        named: what to call the objects in the arguments when one of them can't be pickled.
        servers: processes beside those, which end when all of those have.
        serve: what each of them runs: `serve(world, number, folder)`.
        elastic: how the others go on when a worker dies, and who comes in its place; None if they can't. A server is
            started again.
        frozen_after: seconds after which a process is ended that gives no sign of life: it was stopped, or something in
            it holds the interpreter's lock.
        stuck_after: seconds after which one is ended that has come no batch further; "learned" for many times the
            longest pause of this run; None for never.
        failures: where each death is noted that the others have survived.
        run_dir: where somebody may ask for more or fewer workers, if the run is elastic.
        note: is told what has happened, by a name and in words.
        stops_at_step: whether Ctrl-C and SIGTERM stop the workers at the next step that they agree on; otherwise they
            end all at once.

    Returns:
        what the workers returned that were there at the end, by rank.

    Raises:
        NotPicklable: an argument can't be sent; the message names the attribute.
        WorkerFailed: a worker raised, or was killed; all others have been ended.
        KeyboardInterrupt: Ctrl-C came a second time, or once where nothing stops at a step.
        SystemExit: with 143, after SIGTERM where nothing stops at a step.
    """
    give_multiprocessing_a_folder()
    with private_folder() as folder:
        _write_job(Path(folder), function, arguments, named or {})
        watch = HeartbeatMonitor(frozen_after, stuck_after)
        failures = [] if failures is None else failures
        workers = _Workers(folder, size, servers, serve, watch, elastic, failures, run_dir, note)
        with workers.signals() if stops_at_step else _stopped_at_once():
            return workers.supervise()


def _write_job(folder: Path, function: Any, arguments: tuple[Any, ...], named: Mapping[str, object]) -> None:
    try:
        job = pickle.dumps((function, arguments))
    except Exception as error:
        check_picklable({"function": function, **(named or {"arguments": arguments})}, error)
        raise
    authentication.write_private(folder / "job", job)


class _Workers:
    """The processes of one run, and what is known of them."""

    def __init__(
        self, folder: str, size: int, servers: int, serve: Callable[..., Any] | None, watch: HeartbeatMonitor,
        elastic: ElasticPolicy | None, failures: list[str], run_dir: Path | None, note: Note | None,
    ) -> None:  # fmt: skip
        self._watch = watch
        self._requests = None if run_dir is None else Requests(run_dir)
        self._note: Note = note or (lambda name, text: None)
        self._asked = False  # to stop
        self._ended: dict[int, str] = {}  # those that the supervisor has ended, and why
        key = authentication.new_key()
        self._store = StoreServer(folder, key)
        self._size = size
        self._changes = None if elastic is None else ElasticController(elastic, size, failures)
        self._results: dict[int, str] = {}
        self._failures: list[Failure] = []
        self._told: dict[int, Diagnosis] = {}  # what workers are at that were asked
        self._deaths: dict[int, Failure] = {}  # those that others could go on after
        self._controls: dict[int, Connection] = {}
        self._processes: dict[int, BaseProcess] = {}
        self._memory: dict[int, list[int]] = {}  # files of each process's copies, which outlive it
        self._dead: set[int] = set()  # workers
        path = tuple(entry or os.path.abspath(entry) for entry in sys.path)
        self._places = [
            Place(
                rank, size, self._store.path, key, folder, path, os.getcwd(),
                changes=elastic is not None and rank < size, serve=serve if rank >= size else None,
            )
            for rank in range(size + servers)
        ]  # fmt: skip

    def supervise(self) -> list[Any]:
        """Start all workers, and wait for their ends."""
        try:
            for place in self._places:
                self._start(place)
            while not self._complete():
                self._look(timeout=1.0 if self._changes is None else self._changes.due())
                self._end_the_silent()
                self._change_members()
                if self._failures:
                    if not any(failure.kind == "killed" for failure in self._failures):
                        self._gather()
                    raise self._primary()
            return [pickle.loads(Path(self._results[rank]).read_bytes()) for rank in self._members()]
        finally:
            self._end()

    def _complete(self) -> bool:
        """Return whether all workers have left their results; a server has none to give."""
        members = self._members()
        return len(members) > 0 and all(rank in self._results for rank in members)

    def _members(self) -> Sequence[int]:
        """Return the workers that train together, by rank."""
        return range(self._size) if self._changes is None else self._changes.workers

    def _start(self, place: Place) -> None:
        context = _context()
        if (place.changes or place.serve is not None) and place.rank not in self._memory:
            self._open_memory(place)
        ours, theirs = context.Pipe()
        # Not a daemon: a worker may have children of its own, such as those of a DataLoader.
        process = context.Process(target=worker_main, args=(place, theirs), name=f"fabricx-rank-{place.rank}")
        multiprocessing_folder_of(process, place.folder, place.rank)
        _start(process)
        self._watch.started(place.rank)
        theirs.close()
        self._controls[place.rank], self._processes[place.rank] = ours, process

    def _open_memory(self, place: Place) -> None:
        """Make room for a worker's copies of what it holds, and give it a name that others find when it is gone."""
        self._memory[place.rank] = files = [nameless(0) for _ in range(memory_checkpoint.NEWEST)]
        for number, file in enumerate(files):
            memory_checkpoint.path_of(place.folder, place.rank, number).symlink_to(f"/proc/{os.getpid()}/fd/{file}")

    def _close_memory(self, workers: Iterable[int]) -> None:
        for worker in workers:
            for number, file in enumerate(self._memory.pop(worker)):
                memory_checkpoint.path_of(self._places[worker].folder, worker, number).unlink(missing_ok=True)
                os.close(file)

    def _look(self, timeout: float) -> None:
        """Wait for messages and deaths, and take note of them."""
        sentinels = {process.sentinel: rank for rank, process in self._processes.items()}
        ready = wait([*self._controls.values(), *sentinels], timeout)
        for rank, control in list(self._controls.items()):
            if control in ready:
                self._receive(rank, control)
        for sentinel, rank in sentinels.items():
            if sentinel in ready:
                self._receive(rank, self._controls.get(rank))  # its last words, said just before
                self._receive_from_others(rank)
                process = self._processes.pop(rank)
                process.join()
                _end_children(process)
                self._watch.over(rank)
                if rank in self._results or any(failure.rank == rank for failure in self._failures):
                    continue
                serves = self._places[rank].serve is not None
                if not serves:
                    self._store.set(gone(rank), b"")
                    self._tell_servers(rank)
                death = _death(rank, process.exitcode, self._ended.get(rank))
                if serves and process.exitcode == 0:  # it ends when its workers have
                    continue
                if serves and self._changes is not None and self._places[rank].generation < RESTARTS:
                    self._start_again(rank)
                elif serves or self._changes is None or not self._changes.died(rank, death.traceback):
                    self._failures.append(death)
                else:
                    self._deaths[rank] = death
                    if process.exitcode:  # else it has left because it was asked to
                        self._note("death", f"{self._name(rank)}: {death.traceback}")

    def _tell_servers(self, worker: int) -> None:
        """Let servers give what a dead worker had to others, also one that has just been started and waits for it."""
        self._dead.add(worker)
        for rank, control in self._controls.items():
            if self._places[rank].serve is not None:
                with contextlib.suppress(OSError):
                    control.send(("died", worker))

    def _end_the_silent(self) -> None:
        """End processes that give no sign of life, or come no further: others would wait for them for ever."""
        silent, news = self._watch.silent(), self._watch.news(self._name)
        what = self._diagnose() if silent or news else ""
        for rank, why in silent.items():
            self._ended[rank] = f"{why}; {what}"
            self._watch.over(rank)
            if rank in self._processes:
                self._processes[rank].kill()  # works on one that was stopped, too
        if news is not None:
            print(f"{news}\n{what}", file=sys.stderr, flush=True)

    def _diagnose(self) -> str:
        """Ask all workers what they are at; returns who keeps whom waiting."""
        asked = [rank for rank in self._members() if rank in self._processes]
        self._told, able = {}, {rank for rank in asked if self._watch.answers(rank)}
        for rank in asked:
            with contextlib.suppress(OSError, KeyError):
                self._controls[rank].send((ASKED, None))
        deadline = time.monotonic() + ANSWER_S
        while not self._told.keys() >= able and time.monotonic() < deadline:
            self._look(timeout=0.02)
        self._ask_by_signal([rank for rank in asked if self._watch.frozen(rank)])
        seats = {worker: rank for rank, worker in enumerate(self._members())}
        sentence = explain({seats[worker]: self._told.get(worker) for worker in asked if worker in seats})
        stacks = [
            f"{self._name(worker)}:\n{told.stacks if (told := self._told.get(worker)) else '(no answer)'}"
            for worker in asked
        ]
        self._note("hang", "\n\n".join([sentence, *stacks]))
        return sentence

    def _ask_by_signal(self, frozen: Sequence[int]) -> None:
        """Let those show their stacks in which something holds the interpreter's lock; one that is stopped can't."""
        for rank in frozen:
            if rank in self._processes and (pid := self._processes[rank].pid) is not None:
                os.kill(pid, signal.SIGUSR2)
        if frozen:
            time.sleep(DUMP_S)
        for rank in frozen:
            with contextlib.suppress(OSError):
                found = from_dump((Path(self._places[rank].folder) / f"stacks-{rank}").read_text())
                if found is not None:
                    self._told[rank] = found

    def _change_members(self) -> None:
        """Start who is to come, and tell all workers who is gone and who goes on."""
        if self._changes is None or self._complete():
            return
        if self._requests is not None and (workers := self._requests.take()) is not None:
            print(self._changes.resize(workers), file=sys.stderr, flush=True)
        while (seat := self._changes.wanted()) is not None:
            place = replace(self._places[0], rank=len(self._places), seat=seat, newcomer=True)
            self._places.append(place)
            self._changes.started(place.rank)
            self._start(place)
        for ranks, kind, content in self._changes.news():
            for rank in ranks:
                with contextlib.suppress(OSError, KeyError):  # it has just died
                    self._controls[rank].send((kind, content))
        if self._changes.settled:  # nobody needs what the dead have left any more
            self._close_memory(self._memory.keys() - self._processes.keys())

    def _start_again(self, rank: int) -> None:
        """Start a server that was killed; it has left a snapshot of what it kept, or workers know that."""
        if self._complete():
            return
        text = f"server {rank - self._size} died, and starts again"
        self._note("death", text)
        print(text, file=sys.stderr)
        self._places[rank] = replace(self._places[rank], generation=self._places[rank].generation + 1)
        self._start(self._places[rank])
        for worker in self._dead:
            self._controls[rank].send(("died", worker))

    def _receive(self, rank: int, control: Connection | None, *, ends: bool = True) -> None:
        if control is None:
            return
        try:
            while control.poll():
                kind, content = control.recv()
                if kind == "beat":
                    self._watch.heard(rank, *content)
                elif kind == ASKED:
                    self._told[rank] = content
                elif kind == "result":
                    self._results[rank] = content
                    self._watch.over(rank)
                elif kind != "failure":
                    assert self._changes is not None
                    if kind == "outside" and ends:
                        self._receive_from_others(rank)
                    self._changes.told(rank, kind, content)
                elif self._changes is None or not self._changes.could_not_join(rank, content.traceback):
                    self._failures.append(content)
        except (EOFError, OSError):  # it may have been closed while others were read
            self._controls.pop(rank, control).close()

    def _receive_from_others(self, rank: int) -> None:
        """Read what other ranks sent before the end of a rank: it has ended because they have begun."""
        for other, control in list(self._controls.items()):
            if other != rank:
                self._receive(other, control, ends=False)

    def _gather(self) -> None:
        """Wait a moment for the reports of other ranks: the first to report need not be the first that failed."""
        deadline = time.monotonic() + GATHER_S
        while self._processes and (left := deadline - time.monotonic()) > 0:
            self._look(timeout=left)

    def _primary(self) -> WorkerFailed:
        if self._changes is not None:  # what the others say may come of a death
            self._failures += [self._deaths[rank] for rank in self._changes.missing if rank in self._deaths]
        first = min(self._failures, key=lambda failure: (_is_echo(failure), failure.at))
        who = self._name(first.rank)
        others = sorted({self._name(failure.rank) for failure in self._failures} - {who})
        also = f"\n({', '.join(others)} failed after that)" if others else ""
        message = f"{who} failed:\n\n{first.traceback.rstrip()}{also}"
        failed = WorkerFailed(message, rank=self._rank(first.rank), traceback=first.traceback)
        failed.stopping = self._asked
        failed.saving = json.loads(self._store.get(SAVING) or b"null")
        failed.__cause__ = None if first.error is None else first.error.with_traceback(None)
        failed.__suppress_context__ = True
        return failed

    def _rank(self, worker: int) -> int:
        """Return the rank that a worker has or had last; of one that has not joined, the rank it was started for."""
        rank = None if self._changes is None else self._changes.rank_of(worker)
        place = self._places[worker]
        return rank if rank is not None else place.seat if place.newcomer else worker

    def _name(self, worker: int) -> str:
        """Return how messages name a process: newcomers' numbers go beyond the ranks of a run."""
        if self._places[worker].serve is not None:
            return f"server {worker - self._size}"
        return f"rank {self._rank(worker)}"

    def _end(self) -> None:
        """Leave no process behind."""
        for rank, process in self._processes.items():
            works = self._places[rank].serve is None
            if not self._complete() or (works and rank not in self._results):
                process.kill()  # SIGTERM would ask it to stop at the next step, which may never come
        deadline = time.monotonic() + TERMINATE_S
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
            _end_children(process)
            process.close()
        for control in self._controls.values():
            control.close()
        self._close_memory(list(self._memory))
        self._store.close()

    def signals(self) -> contextlib.AbstractContextManager[None]:
        """Ctrl-C and notices stop all ranks at the next step they agree on; a second one ends them at once."""

        def stop(number: int, frame: FrameType | None) -> None:
            if self._asked:
                for process in self._processes.values():
                    process.kill()
                raise KeyboardInterrupt
            self._asked = True
            print("\nstopping at the next step; once more stops at once", file=sys.stderr, flush=True)
            self._store.set(EVERYBODY, b"interrupted" if number == signal.SIGINT else b"terminated")

        return _handled(stop)


def _stopped_at_once() -> contextlib.AbstractContextManager[None]:
    return _handled(lambda number, frame: stop_now(number))


@contextlib.contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let a function handle Ctrl-C and notices, in the main thread; others never receive signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, *notices())}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _start(process: BaseProcess) -> None:
    """Start a process, also where the fork server has just been killed: once it is gone, another is started.

    Raises:
        EOFError, ConnectionError: no fork server answers for `FORK_S`.
    """
    failed = None  # when it first did: a fork server that is killed while it imports torch may have taken longer
    while True:
        try:
            process.start()
        except (EOFError, ConnectionError):  # its socket closes before the system says that it has ended
            failed = time.monotonic() if failed is None else failed
            if time.monotonic() > failed + FORK_S:
                raise
            time.sleep(0.01)
        else:
            return


def _end_children(process: BaseProcess) -> None:
    """End what a process that was killed has started, such as those that load data, and remove its semaphores."""
    if process.exitcode and process.pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # there is none
            os.killpg(process.pid, signal.SIGKILL)
    unlink_semaphores_of(process)


def _context() -> Any:
    """Return the fork server with torch loaded, where the system has one: a warm worker starts in milliseconds."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _is_echo(failure: Failure) -> bool:
    """Return whether a rank only tells that another process is gone."""
    return lost_a_link(failure.traceback) or "ServerLost" in failure.traceback


def _death(rank: int, code: int | None, why: str | None) -> Failure:
    if why is not None:
        return Failure(rank, time.monotonic(), "killed", why, None)
    kind = "killed" if code == -signal.SIGKILL else "death"  # from outside: whatever the others say comes of it
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = " (was the machine out of memory?)" if name == "SIGKILL" else ""
        text = f"its process was killed by {name}{hint}; it left no traceback"
    else:
        text = f"its process ended with exit code {code} and left no traceback (what it printed is above)"
    return Failure(rank, time.monotonic(), kind, text, None)
