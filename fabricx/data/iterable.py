"""Any iterable of batches, read independently on each rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast, final

import torch

from fabricx.core.rng import RandomState, random_kept
from fabricx.data.feed import Feed, Microbatch
from fabricx.data.leasing import Dealer, Section
from fabricx.data.own_state import find_generators, set_generators, states_of_generators
from fabricx.distributed.world import World


@final
class ListFeed(Feed):
    """Anything else that gives batches: taken as it is on each rank, with ranks' lengths told to each other.

    A length, or a limit, is a promise; a batch that is missing then is empty, and its `size` unknown. Where there is
    neither, ranks that train together say before each batch whether they have another one: one number is summed.

    A source with `state_dict` and `load_state_dict` is asked where it is, and put there again, by these; of others the
    batches that were trained already are read once more, with the random numbers that the epoch began with. With
    `company`, a rank whose source has ended has its newest batch in an empty one, so that it can compute something
    while the others need it.
    """

    exact_position = False

    def __init__(
        self, source: Iterable[Any], world: World, limit: int | float, *, fixed: bool = False, company: bool = False
    ) -> None:
        self._source = source
        self._company = company
        self._newest: Any = _NOTHING  # batch of this rank, kept for `company`
        self._fixed = fixed
        self._world = world
        self._limit = limit
        self._stateful = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
        self.reads_again = not self._stateful
        self._began: Any = None  # random numbers as they were when the epoch's first batch was asked for
        self._ahead: Any = _NOTHING  # the source's state before it was asked for one batch too many
        self._over = False  # has the source ended its epoch, so that its state is that of the next one?
        self._restored: Any = None

    def state_dict(self) -> Any:
        if not self._stateful:
            return None if self._began is None else {"began": self._began}
        source: Any = self._source
        return {"over": self._over, "source": source.state_dict() if self._ahead is _NOTHING else self._ahead}

    def load_state_dict(self, state: Any) -> None:
        if state is None:
            return
        if self._stateful and "source" in state:
            self._restored = state
        self._began = state.get("began")

    def generators(self) -> dict[str, Any]:
        in_processes = bool(getattr(self._source, "num_workers", 0))
        return {} if self._stateful or in_processes else find_generators(self._source, "data")

    def _random(self) -> dict[str, Any]:
        """Return the state of all random numbers that a source in this process may draw."""
        return RandomState().state_dict() | {"own": states_of_generators(self.generators())}

    def _length(self) -> int | float:
        try:
            length: int | float = len(self._source)  # type: ignore[arg-type]
        except TypeError:
            length = float("inf")
        if isinstance(self._limit, int):
            return min(length, self._limit)
        if self._limit == float("inf") or length == float("inf"):
            return length
        return int(length * self._limit)

    def batches(self, accumulate: int = 1) -> int | float:
        return self._length()

    def leaves_out(self, accumulate: int) -> bool:
        lengths: list[int | float] = self._world.gather_objects(self._length())
        return max(lengths) == float("inf") or min(lengths) < max(lengths)

    def epoch(
        self, epoch: int, *, accumulate: int = 1, position: int = 0, first: int = 0, together: bool = True
    ) -> Iterator[Microbatch]:
        part: Any
        for part in (self._source, getattr(self._source, "sampler", None), getattr(self._source, "dataset", None)):
            if hasattr(part, "set_epoch"):
                part.set_epoch(0 if self._fixed else epoch)
        data = self._data(first)
        lengths = self._world.gather_objects(self._length()) if self._world.size > 1 else [self._length()]
        if max(lengths) == float("inf"):
            yield from self._until_all_end(data, accumulate, first, together=together)
        else:
            yield from self._with_lengths(data, [int(length) for length in lengths], accumulate, first)

    def leased(
        self, dealer: Dealer, section: Section, epoch: int, *, accumulate: int = 1, position: int = 0, first: int = 0
    ) -> Iterator[Microbatch]:
        if dealer.leases_per_update > 1:
            raise ValueError(
                f"{type(self._source).__name__} gives each rank batches of its own, and a global batch of the ranks' "
                "parts needs one order of the data: give a DataLoader over a map-style dataset, or apply='arrival'"
            )
        data, index, more = self._data(first), first, True
        done = 0
        upcoming = next(data, _NOTHING)
        while more:
            dealer.open(section(done, float("inf")))
            while upcoming is not _NOTHING and (lease := dealer.ask(wait=True)).lease is not None:
                dealer.lease = lease
                for number in range(accumulate):
                    batch, upcoming = upcoming, next(data, _NOTHING)
                    closes = number == accumulate - 1 or upcoming is _NOTHING
                    yield Microbatch(
                        batch, index, None, 1 / accumulate, number == 0, closes, False, accumulate, apart=True
                    )  # fmt: skip
                    index += 1
                    if closes:
                        break
            told = self._world.gather_objects((upcoming is not _NOTHING, index // accumulate))
            more, done = any(one for one, _ in told), sum(trained for _, trained in told)
            yield Microbatch(
                None, index - 1, 0, 0.0, True, True, not more, 1, empty=True, position=index, meets=True, done=done
            )

    def _data(self, first: int) -> Iterator[Any]:
        """Return the source's batches from one of the epoch on."""
        left = None if self._limit == float("inf") else _stop(self._length() - first)
        self._ahead, self._over = _NOTHING, False
        if self._restored is None:
            if not first or self._began is None:
                self._began = self._random()
            if not first:
                return itertools.islice(iter(self._source), left)
            with random_kept():  # the draws of reading are of the earlier run
                RandomState.of(self._began).restore()
                set_generators(self.generators(), self._began.get("own", {}))
                data = iter(self._source)
                for batch in itertools.islice(data, first):
                    self._keep(batch)
            return itertools.islice(data, left)
        source: Any = self._source
        source.load_state_dict(self._restored["source"])
        self._over = bool(self._restored["over"] and first)  # else an epoch begins
        self._restored = None
        return iter(()) if self._over else itertools.islice(iter(source), left)

    def _keep(self, batch: Any) -> Any:
        if self._company and batch is not _NOTHING:
            self._newest = batch
        return batch

    def _along(self) -> Any:
        """Return a batch to compute along with the ranks that have one; None if it isn't needed, or there is none."""
        if self._company and self._newest is _NOTHING and self._stateful:  # the run was resumed after the last batch
            source: Any = self._source
            with random_kept():
                state = source.state_dict()
                self._keep(next(iter(source), _NOTHING))  # the first of the next epoch
                source.load_state_dict(state)
        return None if self._newest is _NOTHING else self._newest

    def _with_lengths(
        self, data: Iterator[Any], lengths: Sequence[int], accumulate: int, first: int
    ) -> Iterator[Microbatch]:
        total, mine = max(lengths), lengths[self._world.rank]
        for index in range(first, total):
            window = index - (index - first) % accumulate
            stop = min(window + accumulate, total)
            # Every batch of the window, on whatever rank, counts the same.
            batches = sum(max(0, min(stop, length) - window) for length in lengths)
            empty = index >= mine
            batch = self._along() if empty else self._keep(next(data, _NOTHING))
            if batch is _NOTHING and self._world.size > 1:
                empty, batch = True, None  # the loader's len() promised more than it gave
            if batch is _NOTHING:
                if index > window:  # update with what there is of the window
                    yield Microbatch(
                        None, index, 0, 0.0, False, True, True, stop - window, empty=True, portion=0.0
                    )  # fmt: skip
                return
            yield Microbatch(
                batch, index, 0 if index >= mine else None, 0.0 if empty else 1 / batches,
                index == window, index == stop - 1, index == total - 1, stop - window, empty=empty,
                idle=sum(index >= length for length in lengths),
            )  # fmt: skip
        if self._stateful and mine == total:
            next(data, None)  # as a plain loop does: only then does the source know that its epoch is over
        self._over = True

    def _until_all_end(
        self, data: Iterator[Any], accumulate: int, first: int, *, together: bool
    ) -> Iterator[Microbatch]:  # fmt: skip
        """Yield the batches of a source without a length, and empty ones while other ranks still have some."""
        ranks = self._world.size if together else 1
        batch = next(data, _NOTHING)
        present, index = self._present(batch, ranks), first
        while present:
            empty = batch is _NOTHING
            if self._stateful and not empty:
                self._ahead = cast(Any, self._source).state_dict()
            upcoming = _NOTHING if empty else next(data, _NOTHING)  # one ahead: so the last one is known
            to_come = self._present(upcoming, ranks)
            held = (index - first) % accumulate + 1
            closes = held == accumulate or not to_come
            # How many batches a window has in the end isn't known yet: `portion` corrects the factor.
            counted = present if accumulate == 1 else accumulate * ranks
            yield Microbatch(
                self._along() if empty else self._keep(batch), index,
                0 if empty else None, 0.0 if empty else 1 / counted,
                held == 1, closes, not to_come, accumulate, empty=empty,
                idle=ranks - present, portion=1.0 if accumulate == 1 else present / ranks,
            )  # fmt: skip
            if upcoming is _NOTHING:
                self._ahead, self._over = _NOTHING, True
            batch, present, index = upcoming, to_come, index + 1
        self._ahead, self._over = _NOTHING, True

    def _present(self, batch: Any, ranks: int) -> int:
        """Return how many ranks have another batch."""
        mine = int(batch is not _NOTHING)
        return mine if ranks == 1 else int(self._world.all_reduce(torch.tensor(mine, device=self._world.device)))


_NOTHING: Any = object()


def _stop(length: int | float) -> int | None:
    return None if length == float("inf") else max(0, int(length))
