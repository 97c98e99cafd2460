"""Sources that are read unchanged: all batches of an update have equal weight, on any rank."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fabricx.core.module_state.rng import RandomState
from fabricx.data.iterable import ListFeed
from fabricx.distributed.world import World
from fabricx.errors import PeerLost
from tests.unit.data.positioned import Sized


class ThreadGroup:
    """Sums tensors over ranks that are threads."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=20.0)
        self.given: dict[int, torch.Tensor] = {}


class Rank(World):
    """A rank of a world of threads."""

    def __init__(self, rank: int, size: int, others: ThreadGroup) -> None:
        super().__init__(rank=rank, size=size)
        object.__setattr__(self, "others", others)

    def all_reduce(self, tensor: Any, op: Any = "sum") -> Any:
        others: Any = vars(self)["others"]
        others.given[self.rank] = tensor
        others.barrier.wait()
        total = torch.stack(list(others.given.values())).sum(0)
        others.barrier.wait()
        return total

    def gather_objects(self, obj: Any) -> list[Any]:
        return [obj] * self.size


class Source:
    """A stream whose length is unknown until its end."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.batches))


def microbatches(lengths: list[int], accumulate: int, first: int = 0) -> list[list[Any]]:
    """Return the microbatches of each rank in an epoch."""
    others, batches = ThreadGroup(len(lengths)), [[] for _ in lengths]

    def read(rank: int) -> None:
        feed = ListFeed(Source(lengths[rank]), Rank(rank, len(lengths), others), float("inf"))
        batches[rank] += feed.epoch(0, accumulate=accumulate, first=first)

    threads = [threading.Thread(target=read, args=(rank,)) for rank in range(len(lengths))]
    gc.disable()  # torch.get_rng_state holds a lock: garbage collection within it would run waiting threads
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
    finally:
        gc.enable()
    return batches


def test_all_batches_of_an_update_have_equal_weight_wherever_streams_end() -> None:
    for lengths in ([5], [5, 5], [5, 2], [1, 4, 7], [0, 3], [0, 0]):
        for accumulate in (1, 2, 3):
            by_rank = microbatches(lengths, accumulate)
            assert [sum(not micro.empty for micro in stream) for stream in by_rank] == lengths
            assert {len(stream) for stream in by_rank} == {max(lengths)}
            window: list[Any] = []
            for row in zip(*by_rank, strict=True):
                assert {(m.opens, m.closes, m.last, m.idle) for m in row} == {
                    (row[0].opens, row[0].closes, row[0].last, tuple(n for n, m in enumerate(row) if m.empty))
                }
                window.append(row)
                if row[0].closes:
                    # as in `AccumulationWindow.close`
                    scale = row[0].planned / sum(stream[0].window_weight for stream in window)
                    counts = [scale * m.loss_factor for stream in window for m in stream if not m.empty]
                    assert all(abs(count - 1 / len(counts)) < 1e-12 for count in counts)
                    window = []
            assert not window


def test_a_stream_resumes_after_the_trained_batches() -> None:
    assert [[m.data for m in stream] for stream in microbatches([5, 3], 1, first=2)] == [[2, 3, 4], [2, None, None]]


class Continued(Source):
    """A stream with a state that was saved at its end."""

    def __init__(self, batches: int) -> None:
        super().__init__(batches)
        self.done = batches

    def __iter__(self) -> Iterator[int]:
        begin, self.done = self.done % self.batches, 0
        for number in range(begin, self.batches):
            self.done = number + 1
            yield number

    def state_dict(self) -> int:
        return self.done

    def load_state_dict(self, state: int) -> None:
        self.done = state


def test_a_rank_whose_stream_has_ended_computes_with_its_newest_batch_also_after_a_resume() -> None:
    class Ended(Rank):
        def gather_objects(self, obj: Any) -> list[Any]:
            return [3, 4]

    def along(source: Any, state: Any = None) -> list[Any]:
        feed = ListFeed(source, Ended(0, 2, ThreadGroup(2)), 3, example=True)
        feed.load_state_dict(state)
        [micro] = feed.epoch(0, first=3)
        assert micro.empty
        return [micro.data, source.state_dict() if state else None]

    assert along(Source(3)) == [2, None]  # read once more
    assert along(Continued(3), {"over": True, "source": 3}) == [0, 3]  # of the next epoch, which has not started


def test_no_batch_is_lost_if_the_declared_length_is_too_large() -> None:
    class Promising(Source):
        def __len__(self) -> int:
            return self.batches + 2

    batches = list(ListFeed(Promising(3), World(), float("inf")).epoch(0, accumulate=2))
    assert [(m.data, m.closes) for m in batches] == [(0, False), (1, True), (2, False), (None, True)]
    assert {m.planned for m in batches} == {2}
    assert sum(m.window_weight for m in batches[2:]) == 1.0


class Leases:
    """Dealer that grants a fixed number of leases, and no more until the next section."""

    leases_per_update = 1
    within_section = drops_late = False
    dropped = 0

    def not_used(self) -> int:
        return self.dropped

    def __init__(self, count: int) -> None:
        self.count, self.lease = count, None

    def open(self, section: Any) -> None:
        self.within_section = True

    def leave_section(self) -> None:
        self.within_section = False

    def ask(self, *, wait: bool) -> Any:
        self.count -= 1
        return SimpleNamespace(lease=None if self.count < 0 else object())


@pytest.mark.parametrize("trained", [0, 2])
def test_a_rank_at_its_own_pace_resumes_after_its_own_batches_even_after_none(trained: int) -> None:
    def section(done: int, limit: float) -> None:
        return None

    def values(feed: ListFeed, leases: int, epoch: int, first: int = 0) -> list[Any]:
        batches = []
        for part in feed.leased(cast(Any, Leases(leases)), cast(Any, section), epoch, first=first):
            if part.synchronises:
                break
            batches.append(part.data)
        return batches

    source = [torch.rand(1) for _ in range(4)]
    feed = ListFeed(source, Rank(0, 1, ThreadGroup(1)), float("inf"))
    assert values(feed, 9, epoch=0) == source
    assert values(feed, trained, epoch=1) == source[:trained]
    again = ListFeed(source, Rank(0, 1, ThreadGroup(1)), float("inf"))
    again.load_state_dict(feed.state_dict())
    assert values(again, 9, epoch=1, first=3) == source[trained:]  # the main rank has trained 3
    assert values(again, 9, epoch=2) == source


def test_a_meeting_without_a_lease_is_within_a_batch() -> None:
    feed = ListFeed([torch.rand(1) for _ in range(2)], Rank(0, 1, ThreadGroup(1)), float("inf"))
    dealer, section = Leases(0), lambda done, limit: None
    meetings = []
    for micro in feed.leased(cast(Any, dealer), cast(Any, section), 0):
        if micro.synchronises:
            meetings.append((micro.done, micro.incomplete))
            dealer.count = 1
    assert meetings == [(0, True), (1, False), (2, False)]


def test_a_dropped_gradient_of_a_stream_is_an_error_at_the_end_of_the_section() -> None:
    feed = ListFeed([torch.rand(1) for _ in range(2)], Rank(0, 1, ThreadGroup(1)), float("inf"))
    dealer, section = Leases(2), lambda done, limit: None
    leased = feed.leased(cast(Any, dealer), cast(Any, section), 0)
    next(leased)
    dealer.dropped = 1
    with pytest.raises(PeerLost, match="have dropped a gradient"):
        list(leased)


def data_of(feed: ListFeed, epoch: int, first: int = 0) -> list[Any]:
    return [micro.data for micro in feed.epoch(epoch, first=first)]


def position_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != "draws"}


@pytest.mark.parametrize("limit", [3, 0.6, 5, float("inf")])
@pytest.mark.parametrize("restarts", [True, False])
def test_after_a_limited_epoch_a_resumed_run_reads_the_samples_of_an_uninterrupted_run(
    restarts: bool, limit: float
) -> None:
    feed = ListFeed(Sized(0, 5, restarts=restarts), World(), limit)
    states = [feed.state_dict() for _ in feed.epoch(0)]
    ended, batches = feed.state_dict(), len(states)
    whole = data_of(feed, 1) + data_of(feed, 2)
    # The checkpoint is of the last batch, of the end of its epoch, or of the start of the next epoch.
    for state, position in ((states[-1], batches), (ended, batches), (ended, 0)):
        resumed = ListFeed(Sized(0, 5, restarts=restarts), World(), limit)
        resumed.load_state_dict(state)
        if position:
            assert data_of(resumed, 0, position) == []
            assert position_of(resumed.state_dict()) == position_of(ended)
        assert data_of(resumed, 1) + data_of(resumed, 2) == whole


@pytest.mark.parametrize("restarts", [True, False])
def test_a_shorter_stream_is_read_again_in_the_next_epoch_also_after_a_resume(restarts: bool) -> None:
    class Shorter(Rank):
        def gather_objects(self, obj: Any) -> list[Any]:
            return [2, 4]

    def made() -> ListFeed:
        return ListFeed(Sized(0, 2, restarts=restarts), Shorter(0, 2, ThreadGroup(2)), float("inf"))

    feed = made()
    assert data_of(feed, 0) == [1, 2, None, None]
    resumed = made()
    resumed.load_state_dict(feed.state_dict())
    assert data_of(feed, 1) == data_of(resumed, 1) == [1, 2, None, None]


class Noise:
    """Batches with random numbers of the global generators; batches with `state` have a position."""

    def __init__(self, *, sized: bool, stateful: bool) -> None:
        self.at = 0
        if sized:
            self.__class__ = SizedNoise
        if stateful:
            self.state_dict = lambda: {"at": self.at}
            self.load_state_dict = lambda state: vars(self).update(state)

    def __iter__(self) -> Iterator[Any]:
        if "state_dict" not in vars(self):
            self.at = 0
        while self.at < 6:
            self.at += 1
            yield self.at, float(torch.rand(())), random.random()
        self.at = 0


class SizedNoise(Noise):
    def __len__(self) -> int:
        return 6


@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize("stateful", [False, True])
def test_a_resumed_stream_draws_the_random_numbers_of_an_uninterrupted_run(sized: bool, stateful: bool) -> None:
    def read(feed: ListFeed, epoch: int, first: int = 0) -> Iterator[Any]:
        for microbatch in feed.epoch(epoch, first=first):
            yield microbatch.data
            _ = torch.rand(7), random.random()  # of the training

    torch.manual_seed(5)
    feed = ListFeed(Noise(sized=sized, stateful=stateful), World(), float("inf"))
    list(read(feed, 0))
    whole, saved = [], None
    for batch in read(feed, 1):
        whole.append(batch)
        if len(whole) == 2:
            saved = feed.state_dict(), RandomState()
    assert saved is not None
    whole += read(feed, 2)
    resumed = ListFeed(Noise(sized=sized, stateful=stateful), World(), float("inf"))
    resumed.load_state_dict(saved[0])
    saved[1].restore()
    _ = torch.rand(7), random.random()
    assert [*read(resumed, 1, 2), *read(resumed, 2)] == whole[2:]
    assert len({draw for _, draw, _ in whole}) == 12


def test_the_iterator_of_an_abandoned_epoch_is_closed() -> None:
    """The processes of a loader end with it."""
    ended = []

    class Processes(Source):
        def __iter__(self) -> Iterator[int]:
            try:
                yield from super().__iter__()
            finally:
                ended.append(self.batches)

    feed = ListFeed(Processes(4), World(), float("inf"))
    for _ in feed.epoch(0):
        break
    assert ended == [4]


class Divided(IterableDataset[int]):
    """Ten numbers, divided over the loader processes."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        process: Any = get_worker_info()
        return iter(range(process.id, 10, process.num_workers))


def test_batches_beyond_the_length_of_a_stream_in_several_processes_are_a_warning() -> None:
    feed = ListFeed(DataLoader(Divided(), 4, num_workers=2), World(), float("inf"))
    with pytest.warns(UserWarning, match="has more batches than its length of 3") as warned:
        read = [micro.data.tolist() for epoch in range(2) for micro in feed.epoch(epoch)]
    assert len(read) == 6
    assert len(warned) == 1


class Counts(IterableDataset[Any]):
    """A stream that continues at its position, and counts its epochs."""

    def __init__(self) -> None:
        self.at, self.epoch, self.level = 0, 0, 0
        self.order = [3, 1, 2, 0, 5, 4]

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        self.order.append(self.order.pop(0))
        while self.at < 6:
            self.at += 1
            yield torch.tensor([self.level, self.epoch, self.order[self.at - 1]])
        self.at = 0


@pytest.mark.parametrize("survives", [True, False])
@pytest.mark.parametrize("trained", [0, 2])
def test_a_repeated_stream_has_the_counters_of_that_epoch(survives: bool, trained: int) -> None:
    """Also on a rank that is ahead when all ranks roll back after a death."""

    def read(feed: ListFeed, data: Counts, epoch: int, first: int = 0) -> Iterator[Any]:
        data.level = epoch  # as a hook at the epoch's begin
        for microbatch in feed.epoch(epoch, first=first):
            yield microbatch.data.tolist()

    def feed_of(data: Counts) -> ListFeed:
        return ListFeed(DataLoader(data, batch_size=None), World(), float("inf"))

    data = Counts()
    feed = feed_of(data)
    before = list(read(feed, data, 0))
    saved = feed.state_dict()
    whole = []
    for batch in read(feed, data, 1):
        whole.append(batch)
        if len(whole) == trained:
            saved = feed.state_dict()
    whole += read(feed, data, 2)
    data, first = (data, feed.at_first) if survives else (Counts(), None)
    feed = feed_of(data)  # each generation of ranks has a separate dealer
    feed.at_first = first or feed.at_first
    feed.load_state_dict(saved)
    assert [*read(feed, data, 1, trained), *read(feed, data, 2)] == whole[trained:]
    feed.load_state_dict(None)  # from the start
    if survives:
        assert list(read(feed, data, 0)) == before


def test_a_counter_that_a_hook_changes_within_an_epoch_keeps_its_value_on_resume() -> None:
    def read(data: Counts, state: Any = None, first: int = 0, stop: int = 6) -> tuple[list[Any], Any]:
        feed = ListFeed(DataLoader(data, batch_size=None), World(), float("inf"))
        if state is not None:
            feed.load_state_dict(state)
        batches = []
        for microbatch in feed.epoch(0, first=first):
            data.level += 1  # as a hook
            batches.append(microbatch.data.tolist())
            state = feed.state_dict()
            if len(batches) == stop:
                break
        return batches, state

    whole, _ = read(Counts())
    before, saved = read(Counts(), stop=2)
    after, _ = read(Counts(), saved, first=2)
    assert [*before, *after[1:]] == [*whole[:2], *whole[3:]]  # the prefetched batch has the earlier level
    assert [batch[1:] for batch in after] == [batch[1:] for batch in whole[2:]]


class Parts(IterableDataset[Any]):
    """A stream of four batches that increments its part before a batch, or at its end.

    Args:
        at: index of this batch.
    """

    def __init__(self, at: int) -> None:
        self.at, self.part = at, 0

    def __iter__(self) -> Iterator[Any]:
        for number in range(5):
            self.part += number == self.at
            if number < 4:
                yield torch.tensor([self.part, number])


@pytest.mark.parametrize("own_pace", [False, True])
@pytest.mark.parametrize("at", range(5))
def test_a_counter_changed_by_the_prefetched_batch_is_not_a_change_of_a_hook(at: int, own_pace: bool) -> None:
    def read(feed: ListFeed, epoch: int, first: int = 0, stop: int = 5) -> list[Any]:
        leases: tuple[Any, Any] = Leases(stop), lambda done, limit: None
        stream = feed.leased(*leases, epoch, first=first) if own_pace else feed.epoch(epoch, first=first)
        batches = []
        for microbatch in stream:
            if microbatch.synchronises or len(batches) == stop:
                break
            batches.append(microbatch.data.tolist())
            if len(batches) == stop and not own_pace:
                break
        return batches

    def feed_of() -> ListFeed:
        return ListFeed(DataLoader(Parts(at), batch_size=None), World(), float("inf"))

    undisturbed = feed_of()
    whole = [read(undisturbed, epoch) for epoch in range(3)]
    for trained in range(0 if own_pace else 1, 5):  # at its own pace, a rank may have trained no batch of the epoch
        first, resumed = feed_of(), feed_of()
        assert [read(first, 0), read(first, 1, stop=trained)] == [whole[0], whole[1][:trained]]
        resumed.load_state_dict(first.state_dict())
        assert [read(resumed, 1, first=trained), read(resumed, 2)] == [whole[1][trained:], whole[2]]


def test_data_in_attributes_of_a_stream_is_not_recorded() -> None:
    data: Any = Counts()
    data.files, data.table, data.nested = list(range(65)), torch.zeros(2), [list(range(40)), list(range(40))]
    feed = ListFeed(DataLoader(data, batch_size=None), World(), float("inf"))
    recorded = {path.rpartition(".")[2] for path in feed.at_first}
    assert {"at", "epoch", "level", "order"} <= recorded
    assert not {"files", "table", "nested"} & recorded
