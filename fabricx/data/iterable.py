"""Feed of any iterable of batches, which each rank reads independently."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast, final

import torch
from torch.utils.data import DataLoader

from fabricx.core.module_state.rng import RandomState, random_kept
from fabricx.core.strategy_support.dealer import Dealer
from fabricx.data.data_state import (
    changes,
    copied,
    find_generators,
    iterated_values,
    put_back_sampler,
    set_generators,
    states_of_generators,
)
from fabricx.data.epochs import set_epoch_of_loader
from fabricx.data.feed import Feed, Microbatch
from fabricx.data.leasing import Section
from fabricx.data.same_batches import advise_on_same_batches, digest_of
from fabricx.data.stream_draws import Drawn, OwnDraws
from fabricx.distributed.world import World
from fabricx.errors import PeerLost


@final
class ListFeed(Feed):
    """Reads any iterable of batches without dividing it; ranks exchange their lengths.

    A length, or a limit, is a promise: a batch that is missing then is empty, with unknown `size`. Without both, ranks
    in lockstep sum a flag before each batch, to determine how many ranks have a further batch. A source draws from
    random states of its own.

    If the source has `state_dict` and `load_state_dict`, these save and restore its position. Otherwise the trained
    batches of the epoch are read again, with the random state and the counters of the source at the epoch's begin. If
    a limit has ended an epoch, its last batch is read again: the next `iter(source)` begins anew or continues, as in a
    run without the interruption.

    Args:
        source: iterable of batches, such as a DataLoader.
        world: the ranks.
        limit: maximum batches per epoch (int), or fraction of the batches (float).
        fixed: pass epoch 0 to `set_epoch` in every epoch.
        example: a rank whose source has ended receives its newest batch in an empty microbatch, so that it can run the
            same collectives.
        compares: warn if ranks read the same first batch.
    """

    exact_position = False

    def __init__(
        self, source: Iterable[Any], world: World, limit: int | float, *, fixed: bool = False, example: bool = False,
        compares: bool = False,
    ) -> None:  # fmt: skip
        self._source = source
        self.of_rank = not isinstance(source, (list, tuple))
        self._example = example
        self._newest: Any = _NOTHING  # this rank's newest batch, for `example`
        self._fixed = fixed
        self._world = world
        self._limit = limit
        self._compares = compares and world.size > 1
        self._stateful = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
        self.reads_again = not self._stateful
        self.at_first: dict[str, Any] = self._values()
        self._began: Any = None  # random state, and counters of the source, when the epoch's first batch was requested
        self._now: dict[str, Any] | None = None  # counters of the source in the checkpoint that was loaded
        self._drawn: Drawn | None = None  # random states of the present iterator, if it draws random numbers
        self._ahead: Any = _NOTHING  # the source's state before the batch that was prefetched
        self._last: Any = None  # the source's state before the last batch that the limit permits, when it is drawn
        self._over = False  # the source has ended its epoch, so that its state belongs to the next epoch
        # Loader processes begin a stream anew in each epoch, so that a batch more may be read.
        processes = isinstance(source, DataLoader) and source.num_workers > 1
        self._may_be_longer = processes and limit == float("inf")
        self._restored: Any = None
        self._own = (-1, 0)  # epoch, and batches of it that this rank has trained at its own pace

    def state_dict(self) -> Any:
        trained = {"trained": list(self._own)} if self._own[0] >= 0 else {}
        if not self._stateful:
            return None if self._began is None else {"began": self._began, "now": self._changed(), **trained}
        state, draws = self._present() if self._ahead is _NOTHING else self._ahead
        drawn = {} if draws is None else {"draws": draws.state_dict()}
        last = {} if self._last is None or self._ahead is not _NOTHING else {"last": self._last}
        return {"over": self._over, "source": state, **last, **drawn, **trained}

    def _present(self) -> tuple[Any, RandomState | None]:
        """Return the state of the source, and its random states."""
        state = copied(cast(Any, self._source).state_dict())
        return state, None if self._drawn is None else self._drawn.state

    def load_state_dict(self, state: Any) -> None:
        if state is None:
            self._put_back({})  # other ranks have died before the first batch
            return
        epoch, trained = state.get("trained", (-1, 0))
        self._own = epoch, trained
        if self._stateful and "source" in state:
            self._restored = state
        self._began = state.get("began")
        self._now = state.get("now")
        if self._now is not None:
            self._put_back(self._now)

    def generators(self) -> dict[str, Any]:
        if self._stateful:
            return {}
        if getattr(self._source, "num_workers", 0):  # this process draws the seed of the loader processes only
            return find_generators(getattr(self._source, "generator", None), "data.generator")
        return find_generators(self._source, "data")

    def _random(self) -> dict[str, Any]:
        """Return the state of all generators that a source in this process may draw from, and of its counters."""
        return RandomState().state_dict() | {
            "own": states_of_generators(self.generators()), "values": self._changed()
        }  # fmt: skip

    def _values(self) -> dict[str, Any]:
        """Return the values that iterating may change in the source, if it is iterated in this process."""
        elsewhere = bool(getattr(self._source, "num_workers", 0))
        return {} if self._stateful or elsewhere or not self.of_rank else iterated_values(self._source)

    def _changed(self) -> dict[str, Any]:
        return changes(self.at_first, self._values())[1]

    def _put_back(self, changed: dict[str, Any]) -> None:
        """Set the values of the source to those of a former moment.

        Args:
            changed: result of `_changed` at that moment.
        """
        put_back_sampler(self._source, {**self.at_first, **changed})

    def _put_back_hooks_values(self) -> None:
        """Set the counters that reading again has not moved to those of the checkpoint: hooks have changed these."""
        now, self._now = self._now, None
        if now is None or "values" not in self._began:
            return
        began, read = {**self.at_first, **self._began["values"]}, self._values()
        kept = changes(read, {**self.at_first, **now})[1]
        put_back_sampler(self._source, {path: kept[path] for path in kept if not changes(began, {path: read[path]})[1]})

    def _length(self) -> int | float:
        try:
            length: int | float = len(self._source)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            length = float("inf")
        if isinstance(self._limit, int):
            return min(length, self._limit)
        if self._limit == float("inf") or length == float("inf"):
            return length
        return int(length * self._limit)

    def begin(self, epoch: int) -> None:
        set_epoch_of_loader(0 if self._fixed else epoch, self._source)

    def batches(self, accumulate: int = 1) -> int | float:
        return self._length()

    def leaves_out(self, accumulate: int) -> bool:
        lengths: list[int | float] = self._world.gather_objects(self._length())
        return max(lengths) == float("inf") or min(lengths) < max(lengths)

    def epoch(
        self, epoch: int, *, accumulate: int = 1, position: int = 0, first: int = 0, together: bool = True
    ) -> Iterator[Microbatch]:
        self.begin(epoch)
        lengths = self._world.gather_objects(self._length()) if self._world.size > 1 else [self._length()]
        data = self._data(first, prefetched=max(lengths) == float("inf"))
        if max(lengths) == float("inf"):
            yield from self._until_all_end(data, accumulate, epoch, first, together=together)
        else:
            yield from self._with_lengths(data, [int(length) for length in lengths], accumulate, epoch, first)

    def _compare(self, batch: Any, epoch: int, first: int) -> None:
        """Compare the ranks' first batches of the first epoch; every rank calls it."""
        if self._compares and not epoch and not first:
            advise_on_same_batches(self._source, self._world.gather_objects(digest_of(batch)), self._world)

    def leased(
        self, dealer: Dealer, section: Section, epoch: int, *, accumulate: int = 1, position: int = 0, first: int = 0
    ) -> Iterator[Microbatch]:
        if dealer.leases_per_update > 1:
            raise ValueError(
                f"{type(self._source).__name__} yields separate batches on each rank, but global batches that workers "
                "share need a single order of the data: use a DataLoader over a map-style dataset, or apply='arrival'"
            )
        if dealer.drops_late:
            raise ValueError(
                f"{type(self._source).__name__} is a stream, so the batch of a dropped gradient would not be trained: "
                "use on_stale='wait' or 'damp', or a DataLoader over a map-style dataset"
            )
        resumes = self._own[0] == epoch
        if resumes:  # the other ranks have trained other numbers of batches, and this rank perhaps none
            first = self._own[1]
        self._own = epoch, first
        data, index, more = self._data(first, prefetched=True, resumes=resumes), first, True
        done, dropped = 0, dealer.not_used()
        upcoming = self._prefetch(data)
        digest = None if epoch or first or not self._compares else digest_of(upcoming)
        while more:
            dealer.open(section(done, float("inf")))
            while upcoming is not _NOTHING and (lease := dealer.ask(wait=True)).lease is not None:
                dealer.lease = lease
                for number in range(accumulate):
                    batch, upcoming = upcoming, self._prefetch(data)
                    closes = number == accumulate - 1 or upcoming is _NOTHING
                    yield Microbatch(
                        batch, index, None, 1 / accumulate, number == 0, closes, False, accumulate, leased=True
                    )  # fmt: skip
                    index += 1
                    if closes:
                        self._own = epoch, index
                        break
            if upcoming is _NOTHING:
                dealer.leave_section()
            dealer.within_section = False
            state = upcoming is not _NOTHING, -(-index // accumulate), dealer.not_used(), digest
            states, digest = self._world.gather_objects(state), None
            advise_on_same_batches(self._source, [first_batch for *_, first_batch in states], self._world)
            if any(now > dropped for _, _, now, _ in states):  # the lease of a lost link is granted to another worker
                raise PeerLost(
                    "a server was restarted or a link was lost, and the servers have dropped a gradient whose batch no "
                    "other worker can train, because each reads its own stream: resume from the newest checkpoint"
                )
            more, before = any(continues for continues, *_ in states), done
            done = sum(trained for _, trained, *_ in states)
            yield Microbatch(
                None, max(index - 1, 0 if done else -1), 0, 0.0, True, True, not more, 1, empty=True, window_end=index,
                synchronises=True, done=done, incomplete=more and done == before,
            )  # fmt: skip

    def _prefetch(self, data: Iterator[Any]) -> Any:
        """Return the next batch, and keep the state of the source before it, since the batch may never be trained."""
        ahead = self._present() if self._stateful and not self._over else _NOTHING
        batch = next(data, _NOTHING)
        self._ahead, self._over = (_NOTHING, True) if batch is _NOTHING else (ahead, False)
        return batch

    def _data(self, first: int, *, prefetched: bool, resumes: bool = False) -> Iterator[Any]:
        """Return the source's batches from a position of the epoch.

        Args:
            first: position, in batches.
            prefetched: a state of the source that was saved at this position is that after a batch more was read.
            resumes: the epoch has begun before, even if no batch of it was trained.
        """
        remaining = None if self._limit == float("inf") else _stop(self._length() - first)
        self._ahead, self._last, self._over = _NOTHING, None, False
        if self._restored is None:
            if self._began is None or not (first or resumes):
                self._began, resumes = self._random(), False
            if not first and not resumes:
                return self._limited(self._iterator(), remaining)
            with random_kept():  # reading again must not change the restored random state of this run
                RandomState.of(self._began).restore()
                set_generators(self.generators(), self._began.get("own", {}))
                if "values" in self._began:
                    self._put_back(self._began["values"])
                data = self._iterator()
                for batch in itertools.islice(data, first):
                    self._keep(batch)
                ahead = list(itertools.islice(data, int(prefetched and remaining != 0)))
                self._put_back_hooks_values()
            return itertools.islice(itertools.chain(ahead, data), remaining)
        source: Any = self._source
        saved, self._restored = self._restored, None
        source.load_state_dict(copied(saved.get("last", saved["source"])))
        if "last" in saved:
            with random_kept():
                next(self._iterator(), None)
            self._last = saved["last"] if first else None
        self._over = bool(first and (saved["over"] or "last" in saved))  # at first=0 an epoch begins
        if self._over:
            return iter(())
        draws = saved.get("draws") if first else None
        return self._limited(self._iterator(None if draws is None else RandomState.of(draws)), remaining)

    def _limited(self, data: Iterator[Any], limit: int | None) -> Iterator[Any]:
        """Yield batches up to a limit; before the last one, keep the state of the source."""
        if limit is None or not self._stateful:
            yield from itertools.islice(data, limit)
            return
        for number in range(limit):
            before = self._present()[0] if number == limit - 1 else None
            if (batch := next(data, _NOTHING)) is _NOTHING:
                return
            self._last = before
            yield batch

    def _iterator(self, draws: RandomState | None = None) -> Iterator[Any]:
        """Return an iterator of the source.

        Args:
            draws: random states with which it continues; None to begin.
        """
        if isinstance(self._source, (list, tuple)):
            self._drawn = None
            return iter(self._source)
        own = OwnDraws(self._source, draws)
        self._drawn = own.drawn  # not the iterator, whose loader processes end with the epoch, complete or not
        return own

    def _keep(self, batch: Any) -> Any:
        if self._example and batch is not _NOTHING:
            self._newest = batch
        return batch

    def _along(self) -> Any:
        """Return a batch to compute with while other ranks have data; None if not required or not available."""
        if self._example and self._newest is _NOTHING and self._stateful:  # the run was resumed after the last batch
            source: Any = self._source
            with random_kept():
                state = copied(source.state_dict())
                self._keep(next(iter(source), _NOTHING))  # the first batch of the next epoch
                source.load_state_dict(state)
        return None if self._newest is _NOTHING else self._newest

    def _with_lengths(
        self, data: Iterator[Any], lengths: Sequence[int], accumulate: int, epoch: int, first: int
    ) -> Iterator[Microbatch]:
        total, local = max(lengths), lengths[self._world.rank]
        for index in range(first, total):
            window = index - (index - first) % accumulate
            stop = min(window + accumulate, total)
            # Every batch of the window has the same weight, on whichever rank it is.
            batches = sum(max(0, min(stop, length) - window) for length in lengths)
            empty = index >= local
            batch = self._along() if empty else self._keep(next(data, _NOTHING))
            if index == first:
                self._compare(batch, epoch, first)
            if batch is _NOTHING and self._world.size > 1:
                empty, batch = True, None  # the loader has ended before its len()
            if batch is _NOTHING:
                if index > window:  # close the incomplete window
                    yield Microbatch(
                        None, index, 0, 0.0, False, True, True, stop - window, empty=True, window_weight=0.0
                    )  # fmt: skip
                return
            yield Microbatch(
                batch, index, 0 if index >= local else None, 0.0 if empty else 1 / batches,
                index == window, index == stop - 1, index == total - 1, stop - window, empty=empty,
                idle=self._world.ranks_of_run(rank for rank, length in enumerate(lengths) if index >= length),
            )  # fmt: skip
        if self._stateful:
            next(data, None)  # as in a plain loop: only then does the source end its epoch
        elif self._may_be_longer:
            self._check_length(data, local)
        self._over = True

    def _check_length(self, data: Iterator[Any], length: int) -> None:
        """Warn once if loader processes make more batches than the length, which is that of a single process.

        Args:
            data: batches of the epoch that are not read.
            length: batches that were read.
        """
        loader: Any = self._source
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a longer stream, which it would read
            self._may_be_longer = next(data, _NOTHING) is _NOTHING
        if not self._may_be_longer:
            warnings.warn(
                f"the DataLoader of {type(loader.dataset).__name__} has more batches than its length of {length}, and "
                f"these are not read: each of its {loader.num_workers} processes makes batches of its own samples, "
                "which are all samples unless the data set divides them by torch.utils.data.get_worker_info(). Remove "
                "__len__ of the data set to read all batches",
                stacklevel=2,
            )

    def _until_all_end(
        self, data: Iterator[Any], accumulate: int, epoch: int, first: int, *, together: bool
    ) -> Iterator[Microbatch]:  # fmt: skip
        """Yield the batches of a source without a length, then empty batches while other ranks have data."""
        ranks = self._world.size if together else 1
        batch = next(data, _NOTHING)
        self._compare(batch, epoch, first)
        idle, index = self._idle(batch, ranks), first
        while present := ranks - len(idle):
            empty = batch is _NOTHING
            if self._stateful and not empty:
                self._ahead = self._present()
            upcoming = _NOTHING if empty else next(data, _NOTHING)  # prefetched, to detect the last batch
            idle_next = self._idle(upcoming, ranks)
            last = len(idle_next) == ranks
            held = (index - first) % accumulate + 1
            closes = held == accumulate or last
            # The final number of batches in a window is unknown at this point: `portion` corrects the factor.
            counted = present if accumulate == 1 else accumulate * ranks
            yield Microbatch(
                self._along() if empty else self._keep(batch), index,
                0 if empty else None, 0.0 if empty else 1 / counted,
                held == 1, closes, last, accumulate, empty=empty,
                idle=self._world.ranks_of_run(idle), window_weight=1.0 if accumulate == 1 else present / ranks,
            )  # fmt: skip
            if upcoming is _NOTHING:
                self._ahead, self._over = _NOTHING, True
            batch, idle, index = upcoming, idle_next, index + 1
        self._ahead, self._over = _NOTHING, True

    def _idle(self, batch: Any, ranks: int) -> tuple[int, ...]:
        """Return the ranks without a further batch."""
        if ranks == 1:
            return () if batch is not _NOTHING else (0,)
        ended = torch.zeros(ranks, dtype=torch.int64, device=self._world.device)
        ended[self._world.rank] = batch is _NOTHING
        return tuple(self._world.all_reduce(ended).nonzero().flatten().tolist())


_NOTHING: Any = object()


def _stop(length: int | float) -> int | None:
    return None if length == float("inf") else max(0, int(length))
