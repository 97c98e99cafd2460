"""A map-style DataLoader, read along the global order."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from fabricx.core.rng import random_kept, seed_everything
from fabricx.data.batch_seeding import Seeded
from fabricx.data.feed import Feed, Microbatch
from fabricx.data.leasing import Deal, Dealer, Section
from fabricx.data.loader_signals import EndsWithItsTrainer, forks_are_not_ended
from fabricx.data.order import Balance, Cut, epoch_order, epoch_seed
from fabricx.data.own_state import changes, find_generators, put_back_sampler, sampler_values
from fabricx.data.preprocess import Preprocess
from fabricx.distributed.world import World
from fabricx.errors import RanksDisagree


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
    the first one of the global batch, so that it can compute something while the others need it. With `undivided`, a
    rank's part of a global batch is one batch, also where fewer ranks than at the beginning share it. With `fixed`,
    each epoch has the order of the first, and a plain `shuffle=True` is ignored. So many ranks as `beside` each read an
    order of their own, undivided.
    """

    def __init__(
        self, loader: DataLoader[Any], world: World, seed: int, limit: int | float, began_with: int = 0,
        *, company: bool = False, parts: int = 0, dealt: bool = False, balance: Balance | None = None,
        undivided: bool = False, fixed: bool = False, beside: int = 1,
    ) -> None:  # fmt: skip
        self._fixed = fixed
        self._beside = beside
        self._balance = balance
        self._parts, self._dealt = parts, dealt
        self._company = company
        self._undivided = undivided
        self._began_with = began_with or world.size
        self._world = world
        self._limit = limit
        self._sampler: Any
        self._sampler, self._batch, self._drop_last = order_of(loader)
        self._seed = _seed_of(loader, self._sampler, seed)
        self._placed = False  # has the sampler been put back since the newest order was drawn?
        # A batch sampler of the user's own class: the places of the order are then whole batches.
        self._whole_batches = own_batches = self._sampler is loader.batch_sampler
        self._picked = _Picked()
        if undivided and self._began_with > world.size and (own_batches or loader.batch_sampler is None):
            raise ValueError(
                f"a manually optimised module steps once a batch, and the global batches of this run are of "
                f"{self._began_with} batches that can't be joined: go on with {self._began_with} ranks"
            )
        self._own = _copy_loader(loader, self._picked, max(1, world.local_size), seeded=parts > 0)

    def _items(self) -> int:
        """Return the places of the order that an epoch uses."""
        total = len(self._sampler)
        together = self._batch * self._began_with
        if self._drop_last:
            total -= total % together
        limit = self._limit
        if limit == float("inf"):
            return total
        count = int(limit) if isinstance(limit, int) else int(-(-total // together) * limit)
        return min(total, count * together)

    def batches(self, accumulate: int = 1) -> int | float:
        return len(self._numbered(accumulate))

    def global_batches(self, accumulate: int) -> int | None:
        cut = self._cut(self._items(), accumulate)
        return -(-cut.items // cut.global_batch)

    def described(self) -> str:
        length = f"DataLoader of {len(self._sampler)} {'batches' if self._whole_batches else 'samples'}"
        if not self._whole_batches:
            length += f", {self._batch} in a batch" + (", drop_last" if self._drop_last else "")
        if self._world.size == 1:  # not divided: the order is this rank's own
            return length
        seed = f", seed {self._seed}" if _shuffles(self._sampler) else ""
        return f"{length}, {type(self._sampler).__name__}{seed}"

    def leaves_out(self, accumulate: int) -> bool:
        return self._cut(self._items(), accumulate).leaves_out

    def batches_before(self, position: int, accumulate: int) -> int | None:
        if self._dealt:  # in the middle of a global batch, too
            return -(-position // (self._batch * self._began_with))
        return self._numbered(accumulate).batches_before(position)

    def _numbered(self, accumulate: int) -> Cut:
        """Return the cut by which batches are numbered: where they are dealt out, that of the ranks that began."""
        cut = self._cut(self._items(), accumulate)
        return replace(cut, ranks=self._began_with) if self._dealt else cut

    def _cut(self, items: int, accumulate: int, epoch: int = 0) -> Cut:
        world = self._world
        return Cut(
            items, self._batch, world.rank, world.size, accumulate, self._began_with, self._parts,
            self._balance or Balance(), epoch, self._undivided,
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
        if type(sampler) is SequentialSampler or (self._fixed and _shuffles(sampler)):
            return range(len(sampler))
        epoch = 0 if self._fixed else epoch
        if _shuffles(sampler):
            # An array: a slice of it is ten times cheaper than one of a tensor.
            return epoch_order(len(sampler), self._seed, epoch).numpy()
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        seed = epoch_seed(self._seed, epoch)
        self._put_back(epoch, placed=self._placed)
        self._placed = False
        before = sampler_values(sampler)
        with random_kept(), _seeded(getattr(sampler, "generator", None), seed):
            seed_everything(seed % 2**32)  # any other sampler, which may draw from python's or numpy's generator
            torch.manual_seed(seed)
            order = list(sampler)
        was, now = changes(before, sampler_values(sampler))
        self.at_first = was | (self.at_first or {})
        self.drawn = {"epoch": epoch, "sampler": _form(sampler), "before": was, "after": now} if now else None
        return order

    def generators(self) -> dict[str, Any]:
        return {} if self.processes else find_generators(self._own.dataset, "data")

    def lost_generators(self, *, within: bool) -> list[str]:
        if not self.processes or not (within or self._own.persistent_workers):
            return []
        dataset = self._own.dataset
        dataset = vars(dataset)["_dataset"] if isinstance(dataset, Seeded) else dataset
        return list(find_generators(dataset, type(dataset).__name__))

    def place_sampler(self, epoch: int) -> None:
        if self.drawn is None:  # it is that of a state in which no order had been drawn
            put_back_sampler(self._sampler, self.at_first or {})
            return
        if self.drawn["sampler"] != _form(self._sampler):
            self.drawn = None
            return
        self._put_back(epoch, placed=True)
        self._placed = True  # for this epoch; the order that is drawn next is the next one's if this one is over

    def _put_back(self, epoch: int, *, placed: bool) -> None:
        """Let a sampler be where it was before the order of an epoch was drawn.

        Args:
            epoch: whose order will be drawn.
            placed: the sampler isn't where the newest order has left it.
        """
        if self.drawn is not None and (placed or self.drawn["epoch"] == epoch):
            put_back_sampler(self._sampler, self.drawn["before" if self.drawn["epoch"] == epoch else "after"])

    def state_dict(self) -> Any:
        return self.drawn if self._beside > 1 else None

    def load_state_dict(self, state: Any) -> None:
        if self._beside > 1:
            self.drawn = state

    def _compare_order(self, order: Any, position: int) -> None:
        """Warn of an order that isn't that of the checkpoint of this epoch."""
        if isinstance(order, range):
            self.order = f"{len(order)} in the order of the data"
        elif isinstance(order, np.ndarray):
            self.order = f"{len(order)} shuffled with seed {self._seed}"
        else:
            self.order = f"{len(order)} by {type(self._sampler).__name__} {_digest(order)}"
        if position and self.order_before not in ("", self.order) and self._world.main_rank:
            warnings.warn(
                f"the epoch goes on in another order of the data ({self.order}) than that of the checkpoint "
                f"({self.order_before}): some of its samples are trained twice, and others not at all. A sampler has "
                "to draw from torch's, numpy's or python's global generator, or from its attribute generator",
                stacklevel=2,
            )
        self.order_before = ""

    def _check_order(self, order: Any) -> None:
        """Refuse a sampler that gives each rank another order: samples would be trained twice, others never.

        Raises:
            RanksDisagree: the orders differ.
        """
        if self._world.size == 1 or isinstance(order, (range, np.ndarray)):
            return
        if len(set(self._world.gather_objects(_digest(order)))) > 1:
            raise RanksDisagree(
                f"{type(self._sampler).__name__} gives each rank another order of the data, and the order is divided "
                "over the ranks: give all ranks the same order (drawn from torch's, numpy's or python's global "
                "generator, which are seeded alike), or set use_distributed_sampler=False, with which each rank reads "
                "all that its own sampler gives"
            )

    def epoch(
        self, epoch: int, *, accumulate: int = 1, position: int = 0, first: int = 0, together: bool = True
    ) -> Iterator[Microbatch]:
        order = self._order(epoch)
        self._compare_order(order, position)
        self._check_order(order)
        cut = self._cut(min(self._items(), len(order)), accumulate, epoch)
        self._picked.count = len(cut)
        sizes = self._sizes(order)
        data = self._data(epoch, lambda: _picks(cut.shares(position), order, self._alone, company=self._company))
        index = first
        for share in cut.shares(position):
            size = sizes(share.begin, share.end)
            whole = sizes(share.window_begin, share.window_end)
            yield Microbatch(
                next(data) if size or self._company else None, index, size, size / (whole * self._beside),
                share.opens, share.closes, share.last, share.planned, empty=size == 0, position=share.window_end,
                begin=share.begin, part=share.part, start=share.window_begin,
                idle=share.idle if self._world.size > 1 else 0,  # nobody waits for an empty part of this rank
            )  # fmt: skip
            index += not share.part

    def leased(
        self, dealer: Dealer, section: Section, epoch: int, *, accumulate: int = 1, position: int = 0, first: int = 0
    ) -> Iterator[Microbatch]:
        if self._beside > 1:
            raise ValueError(
                "use_distributed_sampler=False gives each rank an order of its own, and this strategy deals one order "
                "to ranks that go at their own pace: leave use_distributed_sampler out, or take strategy=ddp"
            )
        order = self._order(epoch)
        self._compare_order(order, position)
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
            start, position = position, deal.end
            index = -(-position // (batch * dealer.planned)) - 1
            yield Microbatch(
                None, index, 0, 0.0, True, True, position >= items, 1,
                empty=True, position=position, meets=True, done=-(-position // (batch * accumulate)), start=start,
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
        with forks_are_not_ended():
            return iter(self._own)


def _form(sampler: Any) -> str:
    return f"{type(sampler).__name__} of {len(sampler)}"


@contextlib.contextmanager
def _seeded(generator: Any, seed: int) -> Iterator[None]:
    """Seed the generator that a sampler has as its attribute; its own seed stays that of all epochs."""
    if not isinstance(generator, torch.Generator):
        yield
        return
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


def _digest(order: Any) -> str:
    return hashlib.blake2b(repr(order).encode(), digest_size=8).hexdigest()


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


def _shuffles(sampler: Any) -> bool:
    """Return whether a sampler is what `shuffle=True` makes."""
    return type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None


def order_of(loader: DataLoader[Any]) -> tuple[Any, int, bool]:
    """Return what gives a loader's order, the places of one batch, and whether a last partial batch is left out.

    A `BatchSampler` that the user made is taken apart as the one that `DataLoader(batch_size=...)` makes. The places of
    any other batch sampler are whole batches.
    """
    batches: Any = loader.batch_sampler
    if type(batches) is BatchSampler:
        return batches.sampler, batches.batch_size, batches.drop_last
    if batches is not None:
        return batches, 1, False
    return loader.sampler, 1, False


def _seed_of(loader: DataLoader[Any], sampler: Any, seed: int) -> int:
    """Return the seed of a loader's own generator, where the user gave it one."""
    for generator in (loader.generator, getattr(sampler, "generator", None)):
        if isinstance(generator, torch.Generator):
            return generator.initial_seed() % 2**62
    return seed


def _copy_loader(loader: DataLoader[Any], picked: _Picked, ranks: int, *, seeded: bool) -> DataLoader[Any]:
    """Return a loader like another one that reads what is picked.

    Args:
        loader: of the user.
        picked: what is read.
        ranks: of this machine.
        seeded: what is drawn for a batch depends on the batch without loader processes, too.
    """
    workers, ahead = loader.num_workers, loader.prefetch_factor
    if isinstance(loader, Preprocess):
        workers, ahead = loader.processes(ranks)
    several: dict[str, Any] = (
        {"prefetch_factor": ahead, "persistent_workers": loader.persistent_workers} if workers > 0 else {}
    )
    alone = loader.batch_sampler is None
    dataset: Any = Seeded(loader.dataset, keeps=not several) if several or seeded else loader.dataset
    return DataLoader(
        dataset,
        **({"sampler": picked, "batch_size": None} if alone else {"batch_sampler": picked}),
        num_workers=workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=EndsWithItsTrainer(loader.worker_init_fn) if workers > 0 else None,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),
        **several,
    )
