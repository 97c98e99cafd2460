"""Feed of a map-style DataLoader, read in the global order."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    SequentialSampler,
    default_collate,
)

from fabricx.core.module_state.rng import random_kept, seed_generators, seed_torch
from fabricx.core.strategy_support.dealer import Dealer
from fabricx.core.tensors.transfer import common_size
from fabricx.data.batch_seeding import BatchSeededDataset
from fabricx.data.data_state import changes, find_generators, put_back_sampler, sampler_values
from fabricx.data.epochs import set_epoch
from fabricx.data.feed import Feed, Microbatch
from fabricx.data.leasing import LeasedSection, Section
from fabricx.data.loader_copy import PickedItems, copy_loader
from fabricx.data.loader_order import chosen_items, is_shuffled, order_of, seed_of
from fabricx.data.loader_signals import block_sigterm_in_forks
from fabricx.data.order import Balance, Cut, epoch_order, epoch_seed
from fabricx.distributed.world import World
from fabricx.errors import RanksDisagree


@final
class OrderedFeed(Feed):
    """Reads the dataset of a map-style DataLoader in the global order.

    The order is that of the loader's sampler, drawn under the epoch's seed, so all ranks have the same order; a plain
    `shuffle=True` becomes a permutation that depends on (seed, epoch) only.

    Args:
        loader: the user's loader.
        world: the ranks.
        seed: seed of the data order.
        limit: maximum batches per epoch (int), or fraction of the batches (float).
        began_with: number of ranks that determines the global batch size; 0 for the present number.
        example: a rank without a sample reads the first sample of the global batch, so that it can take part in the
            computation of others.
        parts, balance: see `Cut`.
        dealt: ranks work at their own pace; batches are counted for `began_with` ranks.
        undivided: a rank's share of a global batch is one batch, also if fewer ranks than `began_with` divide it.
        fixed: every epoch has the order of the first epoch, and a plain `shuffle=True` is ignored.
        beside: number of ranks that each read an order of their own, not divided.
        weighted: the module defines the weight of a batch, also if its samples are not all that were read.
        keeps_last: read an incomplete last batch also with `drop_last=True`.

    Raises:
        ValueError: `undivided` with fewer ranks than `began_with`, and batches that can't be joined.
    """

    def __init__(
        self, loader: DataLoader[Any], world: World, seed: int, limit: int | float, began_with: int = 0,
        *, example: bool = False, parts: int = 0, dealt: bool = False, balance: Balance | None = None,
        undivided: bool = False, fixed: bool = False, beside: int = 1, weighted: bool = False,
        keeps_last: bool = False,
    ) -> None:  # fmt: skip
        self._fixed = fixed
        self._beside, self.of_rank = beside, beside > 1
        self._balance = balance
        self._parts, self._dealt = parts, dealt
        self._example = example
        self._undivided = undivided
        self._began_with = began_with or world.size
        self._world = world
        self._limit = limit
        self._sampler: Any
        self._sampler, self._batch, self._drop_last = order_of(loader)
        self._drop_last = self._drop_last and not keeps_last
        self._seed = seed_of(loader, self._sampler, seed)
        self._placed = False  # the sampler was restored since the newest order was drawn
        self._newest: Any = ()  # order of the epoch that `epoch` reads
        # With a user's own batch sampler, the items of the order are whole batches.
        self._whole_batches = own_batches = self._sampler is loader.batch_sampler
        self._picked = PickedItems()
        self._singly = loader.batch_sampler is None  # an item of the dataset is a batch that the user made
        if undivided and self._began_with > world.size and (own_batches or loader.batch_sampler is None):
            raise ValueError(
                "a manually optimised module steps once per batch, but each global batch of this run consists of "
                f"{self._began_with} batches, one for each rank that the run began with: resume with "
                f"{self._began_with} ranks"
            )
        self._loader = copy_loader(loader, self._picked, max(1, world.local_size), seeded=parts > 0)
        self.chosen = chosen_items(self._dataset)
        own = loader.collate_fn is not default_collate and not getattr(loader.collate_fn, "joins_loaders", False)
        self._may_drop = own and loader.batch_sampler is not None and not weighted

    def _items(self) -> int:
        """Return the number of items of the order that an epoch uses."""
        total = len(self._sampler)
        together = self._batch * self._began_with
        if self._drop_last:
            total -= total % together
        limit = self._limit
        if limit == float("inf"):
            return total
        count = int(limit) if isinstance(limit, int) else int(-(-total // together) * limit)
        return min(total, count * together)

    def begin(self, epoch: int) -> None:
        if not is_shuffled(self._sampler):
            epoch = 0 if self._fixed else epoch
            set_epoch(epoch, self._sampler)
            self._put_back(epoch, placed=self._placed)

    def batches(self, accumulate: int = 1) -> int | float:
        return len(self._numbered(accumulate))

    def planned_batches(self, accumulate: int) -> int | None:
        return len(self._planned(self._cut(self._items(), accumulate)))

    def _planned(self, cut: Cut) -> Cut:
        """Return the cut for the ranks with which the run began: a global batch has `accumulate` batches of each."""
        return replace(cut, ranks=self._began_with, parts=0)

    def global_batches(self, accumulate: int) -> int | None:
        cut = self._cut(self._items(), accumulate)
        return -(-cut.items // cut.global_batch)

    def described(self) -> str:
        length = f"DataLoader of {len(self._sampler)} {'batches' if self._whole_batches else 'samples'}"
        if not self._whole_batches:
            length += f", {self._batch} in a batch" + (", drop_last" if self._drop_last else "")
        if self._world.size == 1:  # not divided: the order may differ between ranks
            return length
        seed = f", seed {self._seed}" if is_shuffled(self._sampler) else ""
        items = f", items {self.chosen} of a Subset (draw them after fx.seed_everything)" if self.chosen else ""
        return f"{length}, {type(self._sampler).__name__}{seed}{items}"

    def leaves_out(self, accumulate: int) -> bool:
        return self._cut(self._items(), accumulate).leaves_out

    def batches_before(self, position: int, accumulate: int) -> int | None:
        if self._dealt:  # the position may lie within a global batch
            return -(-position // (self._batch * self._began_with))
        return self._numbered(accumulate).batches_before(position)

    def _numbered(self, accumulate: int) -> Cut:
        """Return the cut that numbers batches: with leases, that of the initial number of ranks."""
        cut = self._cut(self._items(), accumulate)
        return replace(cut, ranks=self._began_with) if self._dealt else cut

    def _cut(self, items: int, accumulate: int, epoch: int = 0) -> Cut:
        world, parts = self._world, self._parts
        if parts and self._alone:  # a microbatch has a single item
            parts = max(parts, self._batch * self._began_with * accumulate)
        return Cut(
            items, self._batch, world.rank, world.size, accumulate, self._began_with, parts,
            self._balance or Balance(), epoch, self._undivided,
        )  # fmt: skip

    @property
    def global_batch(self) -> int:  # type: ignore[override]
        return 0 if self._alone or self._balance is None else self._batch * self._began_with

    @property
    def ahead(self) -> int:  # type: ignore[override]
        workers = self._loader.num_workers
        return workers * (self._loader.prefetch_factor or 2) + 1 if workers else 0

    @property
    def processes(self) -> int:  # type: ignore[override]
        """Return the number of loader processes of this rank."""
        return self._loader.num_workers

    def _order(self, epoch: int) -> Any:
        sampler = self._sampler
        if type(sampler) is SequentialSampler or (self._fixed and is_shuffled(sampler)):
            return range(len(sampler))
        epoch = 0 if self._fixed else epoch
        if is_shuffled(sampler):
            # A numpy array: slicing it is ten times cheaper than slicing a tensor.
            return epoch_order(len(sampler), self._seed, epoch).numpy()
        self.begin(epoch)
        seed = epoch_seed(self._seed, epoch)
        self._placed = False
        before = sampler_values(sampler)
        with random_kept(), _seeded(getattr(sampler, "generator", None), seed):
            seed_generators(seed % 2**32)  # a user's sampler may draw from python's or numpy's generator
            seed_torch(seed)
            length, order = len(sampler), list(sampler)
        if len(order) > length and self._world.main_rank:
            warnings.warn(
                f"{type(sampler).__name__} yields {len(order)} items, and its length is {length}: the items beyond the "
                "length are left out. Return the number of items from __len__",
                stacklevel=2,
            )
        was, now = changes(before, sampler_values(sampler))
        self.at_first = was | (self.at_first or {})
        self.drawn = {"epoch": epoch, "sampler": _form(sampler), "before": was, "after": now} if now else None
        return order

    def generators(self) -> dict[str, Any]:
        return {} if self.processes else find_generators(self._dataset, "data")

    def lost_generators(self, *, within: bool) -> list[str]:
        if not self.processes or not (within or self._loader.persistent_workers):
            return []
        return list(find_generators(self._dataset, type(self._dataset).__name__))

    @property
    def _dataset(self) -> Any:
        """Return the user's dataset, without the wrapper that seeds its batches."""
        dataset: Any = self._loader.dataset
        return vars(dataset)["_dataset"] if isinstance(dataset, BatchSeededDataset) else dataset

    def place_sampler(self, epoch: int) -> None:
        if self.drawn is None:  # no order had been drawn when the state was saved
            put_back_sampler(self._sampler, self.at_first or {})
            return
        if self.drawn["sampler"] != _form(self._sampler):
            if self._world.main_rank:
                warnings.warn(
                    f"the checkpoint has the state of a {self.drawn['sampler']}, which is not restored to the "
                    f"{_form(self._sampler)} of this run: its orders differ from those of a run without interruption. "
                    "Give it the data and the length that it had",
                    stacklevel=2,
                )
            self.drawn = None
            return
        self._put_back(epoch, placed=True)
        self._placed = True  # for this epoch; if it is over, the next order drawn is that of the next epoch

    def _put_back(self, epoch: int, *, placed: bool) -> None:
        """Restore the sampler's state from before the order of an epoch was drawn.

        Args:
            epoch: epoch whose order will be drawn.
            placed: the sampler is not in the state that drawing the newest order has produced.
        """
        if self.drawn is not None and (placed or self.drawn["epoch"] == epoch):
            put_back_sampler(self._sampler, self.drawn["before" if self.drawn["epoch"] == epoch else "after"])

    def state_dict(self) -> Any:
        return self.drawn if self._beside > 1 else None

    def load_state_dict(self, state: Any) -> None:
        if self._beside > 1:
            self.drawn = state

    def _compare_order(self, order: Any, position: int) -> None:
        """Warn if the order differs from that of the checkpoint of this epoch."""
        if isinstance(order, range):
            self.order = f"{len(order)} in the order of the data"
        elif isinstance(order, np.ndarray):
            self.order = f"{len(order)} shuffled with seed {self._seed}"
        else:
            self.order = f"{len(order)} by {type(self._sampler).__name__} {_digest(order)}"
        if position and self.order_before not in ("", self.order) and self._world.main_rank:
            own = self._whole_batches
            batches = "; batches of a batch sampler, or of several loaders, must be those of before" if own else ""
            warnings.warn(
                f"the epoch continues in an order of the data ({self.order}) that differs from the checkpoint's "
                f"({self.order_before}): some of its samples are trained twice, and others not at all. A sampler must "
                "draw from torch's, numpy's or python's global generator, or from its attribute generator" + batches,
                stacklevel=2,
            )
        self.order_before = ""

    def _check_order(self, order: Any, published_at: int | None = None) -> None:
        """Refuse a sampler whose order differs between ranks: samples would be trained twice or never.

        Args:
            order: of an epoch.
            published_at: the epoch, where ranks work at their own pace and do not wait for each other here.

        Raises:
            RanksDisagree: the orders differ.
        """
        if self._world.size == 1 or isinstance(order, (range, np.ndarray)):
            return
        digest = _digest(order)
        digests = self._world.gather_objects(digest) if published_at is None else self._published(published_at, digest)
        if len(set(digests)) > 1:
            raise RanksDisagree(
                f"{type(self._sampler).__name__} returns a different order of the data on each rank, but the order is "
                "divided over the ranks: return the same order on all ranks (drawn from torch's, numpy's or python's "
                "global generator, which have the same seed on all ranks), or set use_distributed_sampler=False, so "
                "that each rank reads all samples of its own sampler"
            )

    def _published(self, epoch: int, digest: str) -> list[str]:
        """Publish the digest of an order, and return those that exist: of the main rank and another, one reads both."""
        world = self._world
        assert world.store is not None
        keys = [world.key(f"order/{epoch}/{rank}") for rank in range(world.size)]
        world.store.set(keys[world.rank], digest)
        read = keys if world.main_rank else keys[:1]
        return [digest, *(world.store.get(key).decode() for key in read if world.store.check([key]))]

    def epoch(
        self, epoch: int, *, accumulate: int = 1, position: int = 0, first: int = 0, together: bool = True
    ) -> Iterator[Microbatch]:
        order = self._order(epoch)
        self._compare_order(order, position)
        self._check_order(order)
        self._newest = order
        cut = self._cut(min(self._items(), len(order)), accumulate, epoch)
        self._picked.count = len(cut)
        sizes = self._sizes(order)
        shares, fetched = itertools.tee(cut.shares(position))
        data = self._data(epoch, self._picks(lambda: fetched, order, example=self._example))
        index, number, planned = first, 0, self._planned(cut)
        same = planned == cut
        for share in shares:
            number = 0 if share.opens else number
            size = sizes(share.end, share.begin)
            whole = sizes(share.window_end, share.window_begin)
            batch = next(data) if size or self._example else None
            if self._may_drop and size:
                self._check_dropped(batch, size)
            yield Microbatch(
                batch, index, size, size / (whole * self._beside),
                share.opens, share.closes, share.last, share.planned, empty=size == 0, window_end=share.window_end,
                begin=share.begin, incomplete=share.incomplete, window_begin=share.window_begin,
                # With an order per rank, no rank waits for this one.
                idle=self._world.ranks_of_run(share.idle) if self._world.size > 1 else (),
                user_batch=self._singly,
                completes=None if same else cut.completes(planned, share, number),
            )  # fmt: skip
            index, number = index + (not share.incomplete), number + (not share.incomplete)

    def _check_dropped(self, batch: Any, size: int) -> None:
        """Warn once if a user's collate_fn drops samples, so that the weight of a batch is not that of its samples."""
        kept = common_size(batch)
        if kept is not None and kept < size:
            self._may_drop = False
            warnings.warn(
                f"the collate_fn of a DataLoader has made a batch of {kept} from {size} samples. Gradients of ranks "
                f"and logged means have the weight {size} for it: if samples are dropped, define batch_weight in the "
                "module, which returns the number of samples of a batch; results are then means over these samples",
                stacklevel=2,
            )

    def indices(self, micro: Microbatch) -> list[int] | None:
        if not micro.size:
            return []
        if self._whole_batches:
            return list(self._newest[micro.begin])
        items = self._newest[micro.begin : micro.begin + micro.size]
        return items.tolist() if isinstance(items, np.ndarray) else list(items)

    def leased(
        self, dealer: Dealer, section: Section, epoch: int, *, accumulate: int = 1, position: int = 0, first: int = 0
    ) -> Iterator[Microbatch]:
        if self._beside > 1:
            raise ValueError(
                "use_distributed_sampler=False gives each rank an order of its own, but this strategy leases a single "
                "order to ranks that work at their own pace: remove use_distributed_sampler, or use strategy=ddp"
            )
        order = self._order(epoch)
        self._compare_order(order, position)
        self._check_order(order, published_at=epoch)
        items = min(self._items(), len(order))
        sizes, batch = self._sizes(order), self._batch
        self._picked.count = len(self._cut(items, accumulate))
        while position < items:
            deal = LeasedSection(dealer, position, items, batch, accumulate)
            dealer.open(deal.plan(section), (epoch, position, items))
            while not deal.over:
                for share, data in deal.taken(self._data(epoch, self._picks(deal.shares, order))):
                    size, whole = sizes(share.end, share.begin), sizes(share.window_end, share.window_begin)
                    if self._may_drop:
                        self._check_dropped(data, size)
                    yield Microbatch(
                        data, share.begin // (batch * dealer.planned), size, size / whole,
                        share.opens, share.closes, False, share.planned, leased=True, begin=share.begin, end=share.end,
                        user_batch=self._singly,
                    )  # fmt: skip
            start, position = position, deal.end
            index = -(-position // (batch * dealer.planned)) - 1
            yield Microbatch(
                None, index, 0, 0.0, True, True, position >= items, 1,
                empty=True, window_end=position, synchronises=True, done=-(-position // (batch * accumulate)),
                window_begin=start, incomplete=position == start,
            )  # fmt: skip

    def _picks(
        self, shares: Callable[[], Iterator[Any]], order: Any, *, example: bool = False
    ) -> Callable[[], Iterator[tuple[int, Any]]]:  # fmt: skip
        """Return a function for the loader. It has no reference to this feed, whose processes end with the last one."""
        alone = self._alone
        return lambda: _picks(shares(), order, alone, example=example)

    @property
    def _alone(self) -> bool:
        """Return whether the loader fetches a single item of the order at a time."""
        return self._singly or self._whole_batches

    def _sizes(self, order: Any) -> Callable[[int, int], int]:
        """Return a function that counts the samples between two positions of the order: (end, begin) -> samples."""
        if self._whole_batches:
            if not all(map(len, order)):
                raise ValueError(
                    f"{type(self._sampler).__name__} yields an empty list of samples: a batch sampler has to leave out "
                    "batches without a sample"
                )
            return lambda end, begin: sum(len(batch) for batch in order[begin:end])
        return operator.sub

    def _data(self, epoch: int, picks: Callable[[], Iterator[tuple[int, Any]]]) -> Iterator[Any]:
        """Return an iterator over the loader's batches for the selected items."""
        if isinstance(self._loader.dataset, BatchSeededDataset):
            seed = epoch_seed(self._seed, epoch)
            self._picked.source = lambda: ((epoch_seed(seed, begin), picked) for begin, picked in picks())
        else:
            self._picked.source = lambda: map(operator.itemgetter(1), picks())
        if self._loader.generator is not None:  # seeds loader processes by rank and epoch, independent of earlier draws
            self._loader.generator.manual_seed(epoch_seed(self._seed + 7919 * (self._world.rank + 1), epoch) % 2**62)
        with block_sigterm_in_forks():
            return iter(self._loader)


def _form(sampler: Any) -> str:
    return f"{type(sampler).__name__} of {len(sampler)}"


@contextlib.contextmanager
def _seeded(generator: Any, seed: int) -> Iterator[None]:
    """Seed a sampler's own generator inside this context; `initial_seed` stays the seed of all epochs."""
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


def _picks(shares: Iterable[Any], order: Any, alone: bool, *, example: bool) -> Iterator[tuple[int, Any]]:
    """Yield (position in the order, items to fetch) for the loader."""
    for share in shares:
        begin, end = share.begin, share.end
        if begin == end:
            if not example:
                continue
            begin, end = share.window_begin, share.window_begin + 1
        items = order[begin:end]
        picked: list[Any] = items.tolist() if isinstance(items, np.ndarray) else list(items)
        if alone:  # an item is a user's own batch, or a sample that is not collated
            yield from ((begin + offset, item) for offset, item in enumerate(picked))
        else:
            yield begin, picked
