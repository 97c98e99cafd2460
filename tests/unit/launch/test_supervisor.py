"""The order in which the supervisor handles messages and ends of processes."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from fabricx.distributed.membership.generations import SAVING, WorkerMessage
from fabricx.fault_tolerance.controller import ElasticController, ElasticPolicy
from fabricx.launch.supervisor import _Workers
from fabricx.launch.worker import Failure


def test_links_cut_by_a_failed_rank_are_not_a_separate_failure() -> None:
    failures: list[str] = []
    workers: Any = object.__new__(_Workers)
    workers._controller = ElasticController(ElasticPolicy(), 2, failures)
    workers._deaths, workers._stopping, workers._store = {}, False, {SAVING: b""}
    workers._specs = [SimpleNamespace(serve=None, newcomer=False) for _ in range(2)]
    workers._failures = [Failure(1, 0.0, "error", "ValueError: of the user's code", None)]
    workers._controller.receive(0, WorkerMessage.LINKS_CUT, (0, "reset"))
    assert failures == ["rank 0 lost its links: reset"]
    assert "rank 1 failed" in str(workers._first_failure())
    assert failures == []  # the Trainer records the error of rank 1


def test_the_error_that_prevents_recovery_in_place_is_named_besides_the_death() -> None:
    failures: list[str] = []
    workers: Any = object.__new__(_Workers)
    workers._controller = ElasticController(ElasticPolicy(), 2, failures)
    for worker in range(2):
        workers._controller.receive(worker, WorkerMessage.CAN_RECOVER, None)
    assert workers._controller.died(1, "killed")
    workers._deaths = {1: Failure(1, 0.0, "killed", "killed", None)}
    workers._stopping, workers._store = False, {SAVING: b""}
    workers._specs = [SimpleNamespace(serve=None, newcomer=False) for _ in range(2)]
    workers._failures = [
        Failure(0, 1.0, "PeerLost", "PeerLost: rank 1", None, secondary=True),
        Failure(0, 2.0, "ValueError", "Traceback\nValueError: of a hook", None),
    ]
    failed = workers._first_failure()
    assert str(failed).startswith("rank 1 failed:\n\nkilled")
    assert failed.not_in_place == "recovery in place failed on rank 0: ValueError: of a hook"
    assert "Traceback\nValueError: of a hook" in str(failed)
    assert failures == ["rank 1 failed: killed"]


@pytest.mark.parametrize(("running", "secondary", "waits"), [(2, False, False), (2, True, True), (1, False, True)])
def test_the_supervisor_does_not_wait_for_servers_after_an_own_error_of_a_worker(
    running: int, secondary: bool, waits: bool
) -> None:
    workers: Any = object.__new__(_Workers)
    workers._specs = [SimpleNamespace(serve=serve) for serve in (None, None, print)]
    workers._failures = [Failure(0, 0.0, "error", "ValueError: refused", None, secondary)]
    workers._processes, waited = {running: None}, []

    def process_events(timeout: float) -> None:
        waited.append(timeout)
        workers._processes.clear()

    workers._process_events = process_events
    workers._collect_failures()
    assert bool(waited) is waits


class Records:
    """Controller that records the messages it receives."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, str]] = []

    def receive(self, worker: int, kind: str, content: Any) -> None:
        self.messages.append((worker, kind))


@pytest.mark.parametrize("begun", [0, 1, 2])
@pytest.mark.parametrize("asked", [(0,), (1, 2), (0, 1, 2)])
def test_deaths_are_handled_after_earlier_messages_of_other_ranks(begun: int, asked: tuple[int, ...]) -> None:
    """Two ranks end; the third has begun before, and its message is read last or not at once."""
    workers: Any = object.__new__(_Workers)
    pipes = [Pipe() for _ in range(3)]
    workers._controller, workers._controls = Records(), {rank: end for rank, (end, _) in enumerate(pipes)}
    workers._ended = []
    ended = [rank for rank in range(3) if rank != begun]
    pipes[begun][1].send((WorkerMessage.CAN_RECOVER, None))
    for rank in ended:
        pipes[rank][1].send((WorkerMessage.CANNOT_RECOVER, None))
    for rank in asked:
        workers._receive(rank, workers._controls[rank])
    workers._forward_ended()
    taken = workers._controller.messages
    if set(asked) & set(ended):
        assert taken[0] == (begun, WorkerMessage.CAN_RECOVER)
        assert sorted(taken[1:]) == [(rank, WorkerMessage.CANNOT_RECOVER) for rank in ended]
    else:
        assert taken == [(begun, WorkerMessage.CAN_RECOVER)]
    for ends in pipes:
        for end in ends:
            end.close()


def elastic_workers(size: int, policy: ElasticPolicy, dying: tuple[int, ...]) -> Any:
    """Return the supervisor of workers of which some have died."""
    workers: Any = object.__new__(_Workers)
    workers._controller = ElasticController(policy, size, [])
    for worker in range(size):
        workers._controller.receive(worker, WorkerMessage.CAN_RECOVER, None)
    for worker in dying:
        assert workers._controller.died(worker, "killed")
    workers._specs, workers._failures, workers._requests, workers._controls = [], [], None, {}
    workers._results = {}
    return workers


def test_a_run_of_which_rank_0_dies_when_the_training_has_ended_has_failed() -> None:
    workers = elastic_workers(2, ElasticPolicy(), (0,))
    workers._controller.receive(1, WorkerMessage.CANNOT_RECOVER, None)  # sent before its notice of the death
    workers._results[1] = "path"
    workers._change_members()
    assert [failure.rank for failure in workers._failures] == [0]


def test_a_further_signal_while_processes_end_is_a_keyboard_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ends:
        exitcode, closed = 0, False

        def kill(self) -> None:
            if self.closed:
                raise ValueError("process object is closed")

        def join(self, timeout: float | None = None) -> None:
            if self is processes[1]:
                signal.raise_signal(signal.SIGINT)

        def close(self) -> None:
            self.closed = True

    processes = [Ends(), Ends()]
    workers = elastic_workers(2, ElasticPolicy(), ())
    workers._processes, workers._stopping = dict(enumerate(processes)), True
    workers._specs = [SimpleNamespace(serve=None)] * 2
    monkeypatch.setattr("fabricx.launch.worker_process.end_children", lambda process: None)
    with workers.signals(), pytest.raises(KeyboardInterrupt):
        workers._terminate_all()


def test_a_rank_does_not_wait_for_ranks_that_have_ended_the_training() -> None:
    """A last barrier may end on some ranks, and fail on others because a rank has died."""
    workers = elastic_workers(3, ElasticPolicy(), (2,))
    workers._controller.receive(1, WorkerMessage.CANNOT_RECOVER, None)
    workers._results[1] = "path"
    workers._change_members()
    assert not workers._failures
    workers._controller.receive(0, WorkerMessage.LEFT, 0)
    workers._change_members()
    assert [(failure.rank, failure.summary) for failure in workers._failures] == [
        (2, "other ranks have ended the training")
    ]


def test_a_replacement_does_not_wait_for_another_that_can_not_start() -> None:
    workers = elastic_workers(3, ElasticPolicy(tries=1, outlived=True, fixed=True), (1, 2))
    for worker in (3, 4):
        workers._controller.started(worker)
    assert workers._controller.could_not_join(3, "an error")
    workers._change_members()
    assert not workers._failures
    workers._controller.receive(4, WorkerMessage.READY, None)
    workers._change_members()
    assert [(failure.rank, failure.summary) for failure in workers._failures] == [
        (1, "too few workers are left, and no replacement can start")
    ]


def test_a_server_that_dies_repeatedly_is_not_an_error_of_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Spec:
        generation: int = 0

    workers: Any = object.__new__(_Workers)
    here, there = Pipe()
    workers._size, workers._specs, workers._dead, workers._controls = 2, {2: Spec()}, {0}, {2: here}
    workers._complete, workers._note = lambda: False, lambda kind, text: None
    monkeypatch.setattr(_Workers, "_start", lambda self, spec: there.close())
    workers._restart_server(2)
    assert workers._specs[2].generation == 1
    here.close()
