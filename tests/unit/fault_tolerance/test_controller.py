"""The membership of generations after deaths, joins and planned departures of workers, without processes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabricx.distributed.membership.generations import Generation, WorkerMessage
from fabricx.fault_tolerance.controller import ElasticController, ElasticPolicy
from tests.soak import rounds

SCHEDULES = rounds(short=120, full=800)  # per kind


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Workers:
    """Simulated processes: they start, join, train, die, and end when not in the generation."""

    def __init__(self, elastic: ElasticPolicy, size: int) -> None:
        self.outlived = elastic.outlived
        self.clock = Clock()
        self.failures: list[str] = []
        self.changes = ElasticController(elastic, size, self.failures, self.clock)
        self.starting: set[int] = set()
        self.alive = set(range(size))
        self.holding = set(range(size))
        self.joined = dict.fromkeys(range(size), 0)  # generation in which each worker trains
        self.told: dict[int, Generation] = {}
        self.generations: list[Generation] = []
        self.number = size
        self.failed = False
        first = (0, tuple(range(size)))
        self.copies = {worker: [first, first] for worker in range(size)}  # generations and their members
        for worker in range(size):
            self.changes.receive(worker, WorkerMessage.CAN_RECOVER, None)

    def supervise(self) -> None:
        while (seat := self.changes.wanted()) is not None:
            assert seat >= 0
            self.changes.started(self.number)
            self.starting.add(self.number)
            self.alive.add(self.number)
            self.number += 1
        for workers, kind, content in self.changes.messages():
            if kind == "generation":
                self.generations.append(content)
            for worker in set(workers) & self.alive:
                if kind == "leave":
                    self.end(worker)
                elif kind == "generation":
                    self.told[worker] = content
        if self.changes.settled:
            self.copies = {worker: copies for worker, copies in self.copies.items() if worker in self.alive}

    def end(self, worker: int) -> None:
        self.alive.discard(worker)
        self.starting.discard(worker)
        self.holding.discard(worker)
        self.told.pop(worker, None)
        if not self.changes.died(worker, "killed"):
            self.failed = True

    def act(self, worker: int) -> None:
        """Perform the next action of a worker."""
        if worker in self.starting:
            self.starting.discard(worker)
            self.changes.receive(worker, WorkerMessage.READY, None)
        elif (generation := self.told.pop(worker, None)) is not None:
            if worker not in generation.workers:
                self.end(worker)
            elif self.outlived or any(other in self.holding for other in generation.workers):
                self.joined[worker] = generation.number
                self.holding.add(worker)
                self.copy(worker, generation)
                self.changes.receive(worker, WorkerMessage.STEP, (generation.number, generation.number))

    def copy(self, worker: int, generation: Generation) -> None:
        """Roll a worker back to the newest complete copies, and make its next copy."""
        present = self.copies.get(worker, [])
        whole = {
            copy for copies in self.copies.values() for copy in copies
            if all(copy in self.copies.get(member, []) for member in copy[1])
        }  # fmt: skip
        assert whole or not self.outlived
        kept = [copy for copy in present if copy == max(whole, default=None)] or present[-1:]
        self.copies[worker] = [*kept[-1:], (generation.number, generation.workers)]


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["act"] * 6 + ["die", "die", "cut", "resize"]), st.integers(0, 7), st.integers(0, 1000)
    ), max_size=50
)  # fmt: skip


def happens(run: Workers, event: str, number: int) -> None:
    alive = sorted(run.alive)
    if event == "die":
        if len(run.holding) > 1 or (run.outlived and alive):
            run.end(alive[number % len(alive)])
    elif event == "cut":
        run.changes.receive(0, WorkerMessage.LINKS_CUT, (len(run.generations), "reset"))
    elif event == "resize":
        run.changes.resize(1 + number % 4)
    elif alive:
        run.act(alive[number % len(alive)])


@pytest.mark.soak
@given(events=EVENTS, size=st.integers(1, 4))
@settings(max_examples=SCHEDULES, deadline=None, derandomize=True)
@pytest.mark.parametrize("waits", [0.0, 1.0, 1e9])
@pytest.mark.parametrize("outlived", [False, True])
def test_survivors_form_a_generation_under_any_schedule_of_events(
    waits: float, outlived: bool, events: list[tuple[str, int, int]], size: int
) -> None:
    run = Workers(ElasticPolicy(waits, tries=10**6, outlived=outlived), size)
    for event, number, milliseconds in events:
        run.clock.now += milliseconds / 1000
        happens(run, event, number)
        run.supervise()
        if run.failed:  # only because all workers with the state of the run had died
            assert not run.holding & set(run.changes.workers)
            return
    for _ in range(200):
        run.clock.now += 1.0
        for worker in sorted(run.alive):
            run.act(worker)
        run.supervise()
    assert run.alive == set(run.changes.workers)
    assert len(run.alive) == run.changes._size
    newest = len(run.generations)
    assert all(run.joined[worker] == newest for worker in run.alive), run.joined
    assert [generation.number for generation in run.generations] == list(range(1, newest + 1))


def test_a_worker_that_joins_after_training_is_dismissed() -> None:
    run = Workers(ElasticPolicy(), 2)
    run.end(1)
    run.supervise()
    run.act(0)
    run.act(2)  # ready
    run.supervise()
    assert run.told[2].workers == (0, 2)
    run.changes.receive(0, WorkerMessage.CANNOT_RECOVER, None)
    run.supervise()
    assert run.changes.workers == (0,)
    assert run.alive == {0}
    assert run.changes.wanted() is None


def test_a_worker_that_is_ready_after_training_is_dismissed() -> None:
    changes = ElasticController(ElasticPolicy(), 2, [])
    for worker in (0, 1):
        changes.receive(worker, WorkerMessage.CAN_RECOVER, None)
    changes.resize(3)
    changes.started(2)
    changes.receive(0, WorkerMessage.CANNOT_RECOVER, None)
    changes.receive(2, WorkerMessage.READY, None)
    assert list(changes.messages()) == [((2,), "leave", None)]
    assert changes.died(2, "left")


def test_workers_that_wait_in_a_generation_are_informed_when_a_worker_leaves_it_for_a_join() -> None:
    changes = ElasticController(ElasticPolicy(), 2, [])
    for worker in (0, 1):
        changes.receive(worker, WorkerMessage.CAN_RECOVER, None)
    changes.resize(3)
    ready(changes, 2)
    assert [kind for _, kind, _ in changes.messages()] == ["generation"]  # no worker has to leave within a step
    changes.receive(1, WorkerMessage.LEFT, 0)
    assert list(changes.messages()) == [((0, 1, 2), "broken", 0)]
    changes.receive(0, WorkerMessage.LEFT, 0)
    assert not list(changes.messages())


def test_a_resize_request_is_met_after_a_starting_worker_trains() -> None:
    changes = ElasticController(ElasticPolicy(), 2, [])
    changes.receive(0, WorkerMessage.CAN_RECOVER, None)  # and trains already, if workers train asynchronously
    assert changes.resize(3) == "3 workers from now on"
    assert changes.wanted() == 2
    ready(changes, 2)
    assert not list(changes.messages())
    changes.receive(1, WorkerMessage.CAN_RECOVER, None)
    assert [(workers, kind) for workers, kind, _ in changes.messages()] == [((0, 1, 2), "generation")]


def test_workers_with_a_fixed_group_neither_recover_in_place_nor_accept_requested_workers() -> None:
    changes = ElasticController(ElasticPolicy(), 2, [])
    assert changes.resize(3) == "3 workers from now on"
    ready(changes, 2)
    for worker in (0, 1):
        changes.receive(worker, WorkerMessage.SIZE_FIXED, ("a stream", False))
    assert list(changes.messages()) == [((2,), "leave", None)]
    assert changes.resize(3).startswith("a stream: the number of workers can't change")
    assert changes.wanted() is None
    changes.receive(0, WorkerMessage.CANNOT_RECOVER, None)
    assert changes.workers == (0, 1)
    assert not list(changes.messages())  # worker 1 has not ended yet
    assert not changes.died(1, "killed")


def test_workers_with_own_data_wait_for_a_replacement_without_a_limit() -> None:
    clock = Clock()
    changes = ElasticController(ElasticPolicy(waits=1.0, tries=2), 2, [], clock)
    for worker in (0, 1):
        changes.receive(worker, WorkerMessage.SIZE_FIXED, ("a stream", True))
        changes.receive(worker, WorkerMessage.CAN_RECOVER, None)
    assert changes.resize(3).startswith("a stream: the number of workers can't change")
    assert changes.died(1, "killed")
    assert changes.wanted() == 1
    changes.started(2)
    clock.now = 100.0
    assert [kind for _, kind, _ in changes.messages()] == ["broken"]  # no generation without a replacement
    changes.receive(2, WorkerMessage.READY, None)
    [(workers, kind, generation)] = list(changes.messages())
    assert (workers, kind, generation.workers) == ((0, 2), "generation", (0, 2))
    assert changes.died(2, "killed")
    for worker in (3, 4):
        assert changes.wanted() == 1
        changes.started(worker)
        assert changes.died(worker, "killed") is (worker == 3)
    assert changes.wanted() is None  # no further replacement will start: all workers restart
    assert not changes.exhausted


def test_a_superfluous_worker_is_informed() -> None:
    changes = ElasticController(ElasticPolicy(), 3, [])
    for worker in range(3):
        changes.receive(worker, WorkerMessage.CAN_RECOVER, None)
    changes.resize(2)
    assert [(set(workers), kind) for workers, kind, _ in changes.messages()] == [({0, 1, 2}, "generation")]
    changes.receive(0, WorkerMessage.LEFT, 0)
    assert list(changes.messages()) == [((0, 1, 2), "broken", 0)]


@pytest.mark.parametrize(
    ("reached", "recoveries"),
    [((7, 7, 7, 7), 2), ((7, 8, 8, 8), 3)],  # the step between is not reported if a failure follows its update at once
)
def test_links_that_break_repeatedly_at_the_same_step_are_an_error(reached: tuple[int, ...], recoveries: int) -> None:
    run = Workers(ElasticPolicy(tries=2), 2)
    for number, step in enumerate(reached):
        run.changes.receive(1, WorkerMessage.LINKS_CUT, (number, "reset"))
        run.clock.now += 1.0
        run.supervise()
        for worker in (0, 1):
            if (generation := run.told.pop(worker, None)) is not None:
                assert generation.workers == (0, 1)
                run.changes.receive(worker, WorkerMessage.STEP, (generation.number, step))
    assert len(run.generations) == len(run.failures) == recoveries
    assert run.changes.exhausted


def test_a_further_step_between_two_failures_allows_further_recoveries() -> None:
    """The first report of a worker is the step that it repeats; another report follows after a further step."""
    run = Workers(ElasticPolicy(tries=1), 2)
    for number in range(5):
        run.changes.receive(1, WorkerMessage.LINKS_CUT, (number, "reset"))
        run.clock.now += 1.0
        run.supervise()
        assert len(run.generations) == number + 1
        for worker in (0, 1):
            run.changes.receive(worker, WorkerMessage.STEP, (number + 1, 7))
            run.changes.receive(worker, WorkerMessage.STEP, (number + 1, 8 + number))


def test_workers_that_die_at_once_are_a_single_failure_of_a_step() -> None:
    run = Workers(ElasticPolicy(tries=1), 3)
    for worker in range(3):
        run.end(worker)
    assert run.failed
    assert not run.changes.exhausted  # all restart from a snapshot


@pytest.mark.parametrize("late", [False, True])
def test_links_cut_by_a_dying_worker_are_not_a_separate_failure(late: bool) -> None:
    run = Workers(ElasticPolicy(tries=1), 2)
    run.changes.receive(0, WorkerMessage.LINKS_CUT, (0, "reset"))
    if late:  # all other workers already wait for it in the next generation
        run.clock.now += 1.0
        run.supervise()
        run.act(0)
        run.changes.receive(0, WorkerMessage.LINKS_CUT, (1, "reset"))
    run.end(1)
    assert not run.failed  # a single attempt
    assert run.failures == ["rank 1 failed: killed"]


def test_a_dying_workers_last_step_may_arrive_after_the_notice_that_its_links_were_cut() -> None:
    """Regression: the step, of a generation in which all workers had trained, made the cut a failure of its own."""
    run = Workers(ElasticPolicy(tries=1), 2)
    run.changes.receive(0, WorkerMessage.LINKS_CUT, (0, "reset"))
    run.changes.receive(1, WorkerMessage.STEP, (0, 3))
    run.end(1)
    assert not run.failed
    assert run.failures == ["rank 1 failed: killed"]


def test_links_restored_before_a_worker_dies_are_a_separate_failure() -> None:
    run = Workers(ElasticPolicy(), 2)
    run.changes.receive(0, WorkerMessage.LINKS_CUT, (0, "reset"))
    run.clock.now += 1.0
    run.supervise()
    run.act(0)
    run.act(1)
    run.end(1)
    assert run.failures == ["rank 0 lost its links: reset", "rank 1 failed: killed"]


def ready(changes: ElasticController, worker: int) -> None:
    """Start a worker that the controller requests, and report it as ready."""
    assert changes.wanted() is not None
    changes.started(worker)
    changes.receive(worker, WorkerMessage.READY, None)


def named(changes: ElasticController) -> Generation:
    """Return the announced generation."""
    [generation] = [content for _, kind, content in changes.messages() if kind == "generation"]
    return generation


def test_a_replacement_that_dies_early_passes_on_the_state_of_its_predecessor() -> None:
    changes = ElasticController(ElasticPolicy(waits=10.0), 3, [])
    for worker in range(3):
        changes.receive(worker, WorkerMessage.CAN_RECOVER, None)
    assert changes.died(0, "killed")
    ready(changes, 3)
    assert named(changes).replacements == {3: (0,)}
    assert changes.died(3, "killed")  # before it has reported that it trains
    ready(changes, 4)
    assert named(changes).replacements == {4: (3, 0)}
    assert changes.died(1, "killed")
    ready(changes, 5)
    assert named(changes).replacements == {4: (3, 0), 5: (1,)}  # the fourth worker still has no state
    for worker in (2, 4, 5):
        changes.receive(worker, WorkerMessage.STEP, (3, 7))
    assert changes.died(4, "killed")
    ready(changes, 6)
    assert named(changes).replacements == {6: (4,)}


def test_a_generation_lists_workers_without_a_replacement_by_their_successor() -> None:
    clock = Clock()
    changes = ElasticController(ElasticPolicy(waits=1.0), 3, [], clock)
    for worker in range(3):
        changes.receive(worker, WorkerMessage.CAN_RECOVER, None)
    assert changes.died(0, "killed")
    ready(changes, 3)
    assert named(changes).replacements == {3: (0,)}
    assert changes.died(3, "killed")
    clock.now += 2.0
    generation = named(changes)
    assert (generation.workers, generation.replacements, generation.departed) == ((1, 2), {}, ((2, (3, 0)),))


def test_departed_workers_are_listed_until_a_worker_reports_a_step() -> None:
    clock = Clock()
    changes = ElasticController(ElasticPolicy(), 4, [], clock)
    for worker in range(4):
        changes.receive(worker, WorkerMessage.CAN_RECOVER, None)
    assert changes.died(0, "killed")
    assert named(changes).departed == ((1, (0,)),)
    assert changes.died(1, "killed")  # while the other workers load worker 0's state
    generation = named(changes)
    assert (generation.departed, generation.settled) == (((1, (0,)), (2, (1,))), 0)
    changes.receive(2, WorkerMessage.STEP, (2, 7))
    assert changes.died(3, "killed")
    generation = named(changes)
    assert (generation.departed, generation.settled) == (((3, (3,)),), 2)


def test_a_joined_worker_is_named_by_its_current_or_last_rank() -> None:
    changes = ElasticController(ElasticPolicy(waits=60.0), 2, [])
    for worker in (0, 1):
        changes.receive(worker, WorkerMessage.CAN_RECOVER, None)
    assert [changes.rank_of(worker) for worker in (0, 1, 2)] == [0, 1, None]
    for dying, coming in ((1, 2), (2, 3), (3, 4)):  # always rank 1, as workers 2, 3, 4
        assert changes.died(dying, "killed")
        assert changes.wanted() == 1
        changes.started(coming)
        changes.receive(coming, WorkerMessage.READY, None)
        assert list(changes.messages())
        assert changes.workers == (0, coming)
        assert [changes.rank_of(worker) for worker in (0, dying, coming)] == [0, 1, 1]
        for worker in (0, coming):
            changes.receive(worker, WorkerMessage.CAN_RECOVER, None)
            changes.receive(worker, WorkerMessage.STEP, (coming - 1, coming))


def test_a_replacement_that_does_not_start_is_not_awaited() -> None:
    workers = Workers(ElasticPolicy(waits=10.0, tries=1), 2)
    workers.changes.died(1, "killed")
    workers.supervise()
    assert not workers.generations  # a replacement is starting
    workers.changes.could_not_join(2, "an error of its own")
    workers.clock.now += 0.1
    workers.supervise()
    assert [generation.workers for generation in workers.generations] == [(0,)]


def test_a_fixed_number_of_workers_waits_for_replacements_and_is_not_resized() -> None:
    run = Workers(ElasticPolicy(tries=2, outlived=True, fixed=True), 2)
    assert "their number can't change" in run.changes.resize(3)
    run.end(1)
    run.clock.now = 100.0
    run.supervise()
    assert run.generations == []  # no generation of a single worker
    assert run.changes.could_not_join(2, "an error")  # the first replacement
    run.supervise()
    assert not run.changes.could_not_join(3, "an error")  # the last: the run ends with an error, in place of a hang


@pytest.mark.parametrize(("least", "dying"), [(1, (0, 1)), (2, (1,))])
def test_a_run_ends_if_too_few_workers_are_left_and_no_replacement_starts(least: int, dying: tuple[int, ...]) -> None:
    run = Workers(ElasticPolicy(waits=1.0, least=least, tries=1, outlived=True), 2)
    for worker in dying:
        run.end(worker)
    run.supervise()
    started = sorted(run.starting)
    assert [run.changes.died(worker, "killed") for worker in started][-1:] == [False]
    assert not run.generations


def test_workers_that_do_not_start_while_others_train_end_no_run() -> None:
    run = Workers(ElasticPolicy(tries=2), 3)
    run.end(2)
    run.supervise()
    for worker in (0, 1):
        run.act(worker)
    for worker in (3, 4):
        assert run.starting == {worker}
        assert run.changes.could_not_join(worker, "an error")
        run.starting.clear()
        run.supervise()
    assert run.changes.wanted() is None
    assert not run.changes.exhausted
    assert run.changes.died(1, "killed")  # and a replacement starts again
    assert run.changes.wanted() is not None


def test_the_number_of_workers_can_change_without_restarts() -> None:
    run = Workers(ElasticPolicy(tries=0), 2)
    run.changes.resize(3)
    run.supervise()
    run.act(2)
    run.supervise()
    assert [generation.workers for generation in run.generations] == [(0, 1, 2)]
    assert not run.changes.died(1, "killed")


def test_a_new_worker_has_a_device_that_no_other_worker_uses() -> None:
    changes = ElasticController(ElasticPolicy(), 3, [])
    for worker in range(3):
        changes.receive(worker, WorkerMessage.CAN_RECOVER, None)
    assert changes.died(1, "killed")
    assert (changes.wanted(), changes.started(3)) == (1, 1)
    assert named(changes).workers == (0, 2)
    changes.receive(3, WorkerMessage.READY, None)
    for worker in (0, 2):
        changes.receive(worker, WorkerMessage.STEP, (1, 7))
    assert named(changes).workers == (0, 2, 3)
    assert changes.died(2, "killed")
    assert (changes.wanted(), changes.started(4)) == (1, 2)  # rank 1 was on device 2, and rank 2 is on device 1
