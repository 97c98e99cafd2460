"""What the loop reads batches from: a user's loader, wrapped so that every rank gets its share of one global order."""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, final

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from fabricx.comm.world import World
from fabricx.data.deal import Deal, Dealer, Section
from fabricx.data.order import Balance, Cut, Share, epoch_order, epoch_seed
from fabricx.data.preprocess import Preprocess
from fabricx.data.seeded import Seeded


@dataclass(slots=True)
class Microbatch:
    """One rank's next piece of work.

    Attributes:
        data: the batch as the user's loader gives it; where `empty`, None or somebody else's sample to compute along
            with.
        index: its number in the epoch.
        size: this rank's samples, or None where only the batch itself can tell.
        factor: what part of the global batch's mean this rank's mean is.
        opens, closes: first and last of an accumulation window.
        last: last of the epoch, as far as that is known.
        empty: nothing to compute here; other ranks have something.
        planned: microbatches of the window that `factor` reckons with.
        position: samples of the epoch's global order that are done after this one's window.
        apart: other ranks may be anywhere; they are together at the next one that isn't.
        meets: nothing to compute: ranks that were apart are together here.
        done: leases of the epoch that are done, where they meet.
        begin: where in the global order its first sample is.
        part: others of the same index follow.
    """

    data: Any
    index: int
    size: int | None
    factor: float
    opens: bool
    closes: bool
    last: bool
    planned: int
    empty: bool = False
    position: int = 0
    apart: bool = False
    meets: bool = False
    done: int = 0
    begin: int = 0
    part: bool = False


class Feed(ABC):
    """Batches of one loader for one rank."""

    exact_position = True  # can it start anywhere without reading what lies before?
    global_batch = 0  # samples of one, without accumulation; 0 where they can't be divided
    ahead = 0  # the most global batches whose shares may be taken already when one is trained
    processes: int | None = None  # that load data, where that is known
    _world: World

    def world_changed(self, world: World) -> None:
        """Give each of other ranks its share, from the next epoch or section on."""
        self._world = world

    @abstractmethod
    def batches(self, accumulate: int = 1) -> int | float:
        """Return the batches of an epoch on each rank, infinity where that isn't known."""

    def state_dict(self) -> Any:
        """Return where this rank's own stream is; None where the position in the global order says it all."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Let the next epoch begin where a `state_dict` was taken."""

    def batches_before(self, position: int, accumulate: int) -> int | None:
        """Return how many of an epoch's batches lie before a position; None where only counting tells."""
        return None

    @abstractmethod
    def epoch(self, epoch: int, *, accumulate: int = 1, position: int = 0, first: int = 0) -> Iterator[Microbatch]:
        """Yield an epoch's batches from a position on; `first` is the number of the first batch."""

    @abstractmethod
    def leased(
        self, dealer: Dealer, section: Section, epoch: int, *, accumulate: int = 1, position: int = 0, first: int = 0
    ) -> Iterator[Microbatch]:
        """Yield what a dealer gives this rank of an epoch, and one that `meets` at the end of each section."""


class _Picked:
    """A batch sampler that DataLoader takes; what it yields is exchanged at each epoch."""

    def __init__(self) -> None:
        self.source: Callable[[], Iterator[Any]] = lambda: iter(())
        self.count = 0

    def __iter__(self) -> Iterator[Any]:
        return self.source()

    def __len__(self) -> int:
        return self.count


@final
class OrderedFeed(Feed):
    """A map-style DataLoader: its dataset is read along the global order.

    The order is that of the loader's own sampler, drawn with the seed of the epoch, so that every rank has the same
    one; a plain `shuffle=True` becomes a permutation by (seed, epoch). With `company`, a rank without a sample reads
    the first one of the global batch, so that it can compute something while the others need it.
    """

    def __init__(
        self, loader: DataLoader[Any], world: World, seed: int, limit: int | float, began_with: int = 0,
        *, company: bool = False, parts: int = 0, dealt: bool = False, balance: Balance | None = None,
    ) -> None:  # fmt: skip
        self._loader = loader
        self._balance = balance
        self._parts, self._dealt = parts, dealt
        self._company = company
        self._began_with = began_with or world.size
        self._world = world
        self._seed = _seed_of(loader, seed)
        self._limit = limit
        # A batch sampler of the user's own: the places of the order are then whole batches.
        own_batches = (
            loader.batch_sampler is not None and type(loader.batch_sampler) is not torch.utils.data.BatchSampler
        )
        self._whole_batches = own_batches
        self._batch = 1 if own_batches or loader.batch_size is None else loader.batch_size
        self._sampler: Any = loader.batch_sampler if own_batches else loader.sampler
        self._picked = _Picked()
        self._own = _copy_loader(loader, self._picked, max(1, world.local_size))

    def _items(self) -> int:
        """Return the places of the order that an epoch uses."""
        total = len(self._sampler)
        together = self._batch * self._began_with
        if self._loader.drop_last:
            total -= total % together
        limit = self._limit
        if limit == float("inf"):
            return total
        count = int(limit) if isinstance(limit, int) else int(-(-total // together) * limit)
        return min(total, count * together)

    def batches(self, accumulate: int = 1) -> int | float:
        cut = self._cut(self._items(), accumulate if self._parts else 1)
        return len(replace(cut, ranks=self._began_with) if self._dealt else cut)

    def batches_before(self, position: int, accumulate: int) -> int | None:
        return self._cut(self._items(), accumulate).batches_before(position)

    def _cut(self, items: int, accumulate: int, epoch: int = 0) -> Cut:
        world = self._world
        return Cut(
            items, self._batch, world.rank, world.size, accumulate, self._began_with, self._parts,
            self._balance or Balance(), epoch,
        )  # fmt: skip

    @property
    def global_batch(self) -> int:  # type: ignore[override]
        return 0 if self._alone or self._balance is None else self._batch * self._began_with

    @property
    def ahead(self) -> int:  # type: ignore[override]
        workers = self._own.num_workers
        return workers * (self._own.prefetch_factor or 2) + 1 if workers else 0

    @property
    def processes(self) -> int:  # type: ignore[override]
        """Return how many processes load the data of this rank."""
        return self._own.num_workers

    def _order(self, epoch: int) -> Any:
        sampler = self._sampler
        if type(sampler) is SequentialSampler:
            return range(len(sampler))
        if _shuffles(sampler):
            # An array: a slice of it is ten times cheaper than one of a tensor.
            return epoch_order(len(sampler), self._seed, epoch).numpy()
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        with torch.random.fork_rng(devices=[]):  # any other sampler: drawn under the epoch's seed
            torch.manual_seed(epoch_seed(self._seed, epoch))
            generator = getattr(sampler, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(epoch_seed(self._seed, epoch))
            return list(sampler)

    def epoch(self, epoch: int, *, accumulate: int = 1, position: int = 0, first: int = 0) -> Iterator[Microbatch]:
        order = self._order(epoch)
        cut = self._cut(min(self._items(), len(order)), accumulate, epoch)
        self._picked.count = len(cut)
        sizes = self._sizes(order)
        data = self._data(epoch, lambda: _picks(cut.shares(position), order, self._alone, company=self._company))
        index = first
        for share in cut.shares(position):
            size = sizes(share.begin, share.end)
            whole = sizes(share.window_begin, share.window_end)
            yield Microbatch(
                next(data) if size or self._company else None, index, size, size / whole,
                share.opens, share.closes, share.last, share.planned, empty=size == 0, position=share.window_end,
                begin=share.begin, part=share.part,
            )  # fmt: skip
            index += not share.part

    def leased(
        self, dealer: Dealer, section: Section, epoch: int, *, accumulate: int = 1, position: int = 0, first: int = 0
    ) -> Iterator[Microbatch]:
        order = self._order(epoch)
        items = min(self._items(), len(order))
        sizes, batch = self._sizes(order), self._batch
        self._picked.count = len(self._cut(items, accumulate))
        while position < items:
            deal = Deal(dealer, position, items, batch, accumulate)
            dealer.open(deal.plan(section))
            while not deal.over:
                fetches = functools.partial(self._fetches, deal, order)
                for share, data in deal.taken(self._data(epoch, fetches)):
                    size, whole = sizes(share.begin, share.end), sizes(share.window_begin, share.window_end)
                    yield Microbatch(
                        data, share.begin // (batch * dealer.planned), size, size / whole,
                        share.opens, share.closes, False, share.planned, apart=True,
                    )  # fmt: skip
            position = deal.end
            index = -(-position // (batch * dealer.planned)) - 1
            yield Microbatch(
                None, index, 0, 0.0, True, True, position >= items, 1,
                empty=True, position=position, meets=True, done=-(-position // (batch * accumulate)),
            )  # fmt: skip

    def _fetches(self, deal: Deal, order: Any) -> Iterator[tuple[int, Any]]:
        return _picks(deal.shares(), order, self._alone, company=False)

    @property
    def _alone(self) -> bool:
        """Return whether a place of the order is all that is fetched at a time."""
        return self._own.batch_sampler is None or self._whole_batches

    def _sizes(self, order: Any) -> Callable[[int, int], int]:
        """Return what counts the samples between two places."""
        if self._whole_batches:
            return lambda a, b: sum(len(batch) for batch in order[a:b])
        return lambda a, b: b - a

    def _data(self, epoch: int, picks: Callable[[], Iterator[tuple[int, Any]]]) -> Iterator[Any]:
        """Return the loader's batches of what is picked."""
        if isinstance(self._own.dataset, Seeded):
            seed = epoch_seed(self._seed, epoch)
            self._picked.source = lambda: ((epoch_seed(seed, begin), picked) for begin, picked in picks())
        else:
            self._picked.source = lambda: (picked for _, picked in picks())
        if self._own.generator is not None:  # seeds of loader processes: by rank and epoch, not by what ran before
            self._own.generator.manual_seed(epoch_seed(self._seed + 7919 * (self._world.rank + 1), epoch) % 2**62)
        return iter(self._own)


def _picks(shares: Iterable[Any], order: Any, alone: bool, *, company: bool) -> Iterator[tuple[int, Any]]:
    """Yield what a loader is to fetch, and where in the order it lies."""
    for share in shares:
        begin, end = share.begin, share.end
        if begin == end:
            if not company:
                continue
            begin, end = share.window_begin, share.window_begin + 1
        places = order[begin:end]
        picked: list[Any] = places.tolist() if isinstance(places, np.ndarray) else list(places)
        if alone:  # a place is a batch of the user's own, or a sample that isn't collated
            yield from ((begin + offset, place) for offset, place in enumerate(picked))
        else:
            yield begin, picked


@final
class ListFeed(Feed):
    """Anything else that gives batches: taken as it is on each rank, with ranks' lengths told to each other.

    A source with `state_dict` and `load_state_dict` is asked where it is, and put there again, by these; of others the
    batches that were trained already are read once more.
    """

    exact_position = False

    def __init__(self, source: Iterable[Any], world: World, limit: int | float) -> None:
        self._source = source
        self._world = world
        self._limit = limit
        self._stateful = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
        self._ahead: Any = _NOTHING  # the source's state before it was asked for one batch too many
        self._over = False  # has the source ended its epoch, so that its state is that of the next one?
        self._restored: Any = None

    def state_dict(self) -> Any:
        if not self._stateful:
            return None
        source: Any = self._source
        return {"over": self._over, "source": source.state_dict() if self._ahead is _NOTHING else self._ahead}

    def load_state_dict(self, state: Any) -> None:
        self._restored = state

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

    def epoch(self, epoch: int, *, accumulate: int = 1, position: int = 0, first: int = 0) -> Iterator[Microbatch]:
        part: Any
        for part in (self._source, getattr(self._source, "sampler", None), getattr(self._source, "dataset", None)):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        data = self._data(first)
        lengths = self._world.gather_objects(self._length()) if self._world.size > 1 else [self._length()]
        if max(lengths) == float("inf"):
            yield from self._until_it_ends(data, accumulate, first)
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
        stop = None if self._limit == float("inf") else _stop(self._length())
        self._ahead, self._over = _NOTHING, False
        if self._restored is None:
            return itertools.islice(iter(self._source), first, stop)
        source: Any = self._source
        source.load_state_dict(self._restored["source"])
        self._over = bool(self._restored["over"] and first)  # else an epoch begins
        self._restored = None
        return iter(()) if self._over else itertools.islice(iter(source), None if stop is None else stop - first)

    def _with_lengths(
        self, data: Iterator[Any], lengths: Sequence[int], accumulate: int, first: int
    ) -> Iterator[Microbatch]:
        total, mine = max(lengths), lengths[self._world.rank]
        for index in range(first, total):
            window = index - index % accumulate
            stop = min(window + accumulate, total)
            # Every batch of the window, on whatever rank, counts the same.
            batches = sum(max(0, min(stop, length) - window) for length in lengths)
            empty = index >= mine
            batch = None if empty else next(data, _NOTHING)
            if batch is _NOTHING:
                if self._world.size == 1:
                    return  # the loader's len() promised more than it gave
                empty, batch = True, None
            yield Microbatch(
                batch, index, None, 0.0 if empty else 1 / batches,
                index == window, index == stop - 1, index == total - 1, stop - window, empty=empty,
            )  # fmt: skip
        if self._stateful and mine == total:
            next(data, None)  # as a plain loop does: only then does the source know that its epoch is over
        self._over = True

    def _until_it_ends(self, data: Iterator[Any], accumulate: int, first: int) -> Iterator[Microbatch]:
        batch = next(data, _NOTHING)
        index = first
        while batch is not _NOTHING:
            if self._stateful:
                self._ahead = cast(Any, self._source).state_dict()
            upcoming = next(data, _NOTHING)  # one ahead: only then is it known which one is the last
            last = upcoming is _NOTHING and self._world.size == 1
            held = index % accumulate + 1
            closes = held == accumulate or last
            yield Microbatch(
                batch, index, None, 1 / (accumulate * self._world.size), held == 1, closes, last, accumulate
            )  # fmt: skip
            batch = upcoming
            index += 1
        self._ahead, self._over = _NOTHING, True
        # Other ranks may have more: join them until nobody has. The loop notices and ends the epoch.
        while self._world.size > 1:
            held = index % accumulate + 1
            yield Microbatch(None, index, 0, 0.0, held == 1, held == accumulate, False, accumulate, empty=True)
            index += 1


_NOTHING: Any = object()


def _stop(length: int | float) -> int | None:
    return None if length == float("inf") else int(length)


def _shuffles(sampler: Any) -> bool:
    """Return whether a sampler is what `shuffle=True` makes."""
    return type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None


def _seed_of(loader: DataLoader[Any], seed: int) -> int:
    """Return the seed of a loader's own generator, where the user gave it one."""
    for generator in (loader.generator, getattr(loader.sampler, "generator", None)):
        if isinstance(generator, torch.Generator):
            return generator.initial_seed() % 2**62
    return seed


def _copy_loader(loader: DataLoader[Any], picked: _Picked, ranks: int) -> DataLoader[Any]:
    """Return a loader like another one that reads what is picked, on one of so many ranks of this machine."""
    workers, ahead = loader.num_workers, loader.prefetch_factor
    if isinstance(loader, Preprocess):
        workers, ahead = loader.processes(ranks)
    several: dict[str, Any] = (
        {"prefetch_factor": ahead, "persistent_workers": loader.persistent_workers} if workers > 0 else {}
    )
    alone = loader.batch_sampler is None
    dataset: Any = Seeded(loader.dataset) if several and not alone else loader.dataset
    return DataLoader(
        dataset,
        **({"sampler": picked, "batch_size": None} if alone else {"batch_sampler": picked}),
        num_workers=workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),
        **several,
    )


def make_feed(
    source: Any,
    world: World,
    *,
    seed: int,
    limit: int | float = float("inf"),
    shard: bool = True,
    began_with: int = 0,
    company: bool = False,
    parts: int = 0,
    dealt: bool = False,
    balance: Balance | None = None,
) -> Feed:
    """Return the feed for what a user gave: a map-style DataLoader is read along the global order, all else as it is.

    Args:
        source: a DataLoader or any iterable of batches.
        world: the ranks.
        seed: of the data order.
        limit: batches an epoch at most (int), or the part of them (float).
        began_with: ranks that the global batch was fixed for; 0 if those that there are.
        shard: cut a DataLoader's data over ranks; False takes it as it is.
        company: give a rank without a sample of a global batch one of the others'.
        parts: cut each global batch into so many parts, whoever gets them; 0 for the loader's batches.
        dealt: ranks will go at their own pace; batches are counted as if those were there that the run began with.
        balance: of the ranks' shares; equal ones if not given.

    Raises:
        ValueError: what is no map-style DataLoader can't be cut into parts.
    """
    ordered = (
        isinstance(source, DataLoader)
        and not isinstance(source.dataset, IterableDataset)
        and type(source).__iter__ is DataLoader.__iter__
        and not isinstance(source.sampler, DistributedSampler)
        and not hasattr(source, "state_dict")
        and hasattr(source.sampler, "__len__")
    )
    if ordered and (shard or world.size == 1):
        return OrderedFeed(
            source, world, seed, limit, began_with, company=company, parts=parts, dealt=dealt, balance=balance
        )
    if parts:
        raise ValueError(
            f"deterministic='elastic' cuts the order of the data itself: it needs a map-style DataLoader, without a "
            f"DistributedSampler and with use_distributed_sampler=True, not {type(source).__name__}"
        )
    if ordered:
        return OrderedFeed(source, World(device=world.device), seed + world.rank, limit)
    return ListFeed(source, world, limit)


__all__ = ["Feed", "ListFeed", "Microbatch", "OrderedFeed", "Share", "make_feed"]
