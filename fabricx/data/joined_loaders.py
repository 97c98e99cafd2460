"""A single loader in place of a combined loader: map-style loaders are divided and resumed like any other order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, final

from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, Sampler

from fabricx.data.combined import (
    Batches,
    CombinedLoader,
    CombineMode,
    StatefulBatches,
    combined_length,
    side_by_side,
)  # fmt: skip
from fabricx.data.epochs import set_epoch
from fabricx.data.loader_classes import fetches_lists
from fabricx.data.loader_order import is_ordered, order_of


def joined(loader: CombinedLoader, ranks: int) -> Any:
    """Return a single loader in place of a combined loader.

    Args:
        loader: the user's loader.
        ranks: among which its data are divided; 1 if each rank reads all.

    Returns:
        a map-style `DataLoader` with a batch sampler of combined batches, if all loaders are
        map-style; otherwise an iterable.

    Raises:
        ValueError: some of the loaders can't be divided over ranks.
    """
    loaders = loader.flattened
    ordered = [isinstance(part, DataLoader) and is_ordered(part) for part in loaders]
    if all(ordered):
        return _map_style(loader, loaders)
    if ranks > 1 and any(ordered):
        other = next(type(part).__name__ for part, divisible in zip(loaders, ordered, strict=True) if not divisible)
        raise ValueError(
            f"a CombinedLoader has a map-style DataLoader, whose samples are divided over the {ranks} ranks, and a "
            f"{other}, which each rank reads whole. Use map-style DataLoaders only, without samplers that depend on "
            "the rank; or set use_distributed_sampler=False and divide all data in the loaders"
        )
    stateful = all(hasattr(part, "state_dict") and hasattr(part, "load_state_dict") for part in loaders)
    return StatefulBatches(loader) if stateful and loaders else Batches(loader)


def _map_style(loader: CombinedLoader, loaders: Sequence[DataLoader[Any]]) -> DataLoader[Any]:
    workers = max(part.num_workers for part in loaders)
    several: dict[str, Any] = {}
    if workers:
        with_processes = [part for part in loaders if part.num_workers]
        several = {
            "prefetch_factor": max(part.prefetch_factor or 2 for part in with_processes),
            "persistent_workers": all(part.persistent_workers for part in with_processes),
            "multiprocessing_context": with_processes[0].multiprocessing_context,
            "worker_init_fn": _InitAll([part.worker_init_fn for part in with_processes if part.worker_init_fn]),
        }
    dataset: Any = JoinedDataset([part.dataset for part in loaders], list(map(fetches_lists, loaders)))
    return DataLoader(
        dataset,
        batch_sampler=JoinedSampler(loaders, loader.mode),
        num_workers=workers,
        collate_fn=_JoinedCollate(loader, loaders),
        pin_memory=any(part.pin_memory for part in loaders),
        timeout=max(part.timeout for part in loaders),
        generator=next((part.generator for part in loaders if part.generator is not None), None),
        **several,
    )


@final
class JoinedDataset:
    """Data sets beside each other; an index is (number of the data set, index in it).

    Args:
        datasets: map-style.
        lists: for each data set, whether it returns a batch for the list of its indices.
    """

    def __init__(self, datasets: Sequence[Any], lists: Sequence[bool] = ()) -> None:
        self.datasets = list(datasets)
        self.lists = list(lists) or [False] * len(datasets)

    def __len__(self) -> int:
        return sum(len(dataset) for dataset in self.datasets)

    def __getitem__(self, pair: tuple[int, Any]) -> tuple[int, Any]:
        number, index = pair
        return number, self.datasets[number][index]

    def __getitems__(self, places: Sequence[tuple[int, Any]]) -> list[tuple[int, Any]]:
        """Return several samples, or a batch of a data set that returns batches, with the numbers of their data sets.

        Args:
            places: indices.
        """
        samples: list[tuple[int, Any]] = []
        for number, group in itertools.groupby(places, key=lambda pair: pair[0]):
            indices, dataset = [index for _, index in group], self.datasets[number]
            if self.lists[number]:
                samples.append((number, dataset[indices]))
                continue
            several: Any = getattr(dataset, "__getitems__", None)
            items: Any = several(indices) if callable(several) else [dataset[index] for index in indices]
            samples += [(number, sample) for sample in items]
        return samples


@final
class JoinedSampler(Sampler[list[tuple[int, Any]]]):
    """Batch sampler for a `JoinedDataset`; a batch has the indices of a combined batch.

    Args:
        loaders: loaders to combine.
        mode: mode of `CombinedLoader`.
    """

    def __init__(self, loaders: Sequence[DataLoader[Any]], mode: CombineMode) -> None:
        self._mode: CombineMode = mode
        self._samplers, self._sizes, self._drops = map(list, zip(*map(order_of, loaders), strict=True))
        # Indices of an order: a batch at a time, unless the user's batch sampler yields batches.
        self._whole = [sampler is part.batch_sampler for sampler, part in zip(self._samplers, loaders, strict=True)]
        self._counted: list[Any] = [
            part.sampler if part.batch_sampler is None else part.batch_sampler for part in loaders
        ]

    def __len__(self) -> int:
        return int(combined_length(list(map(len, self._counted)), self._mode))

    def set_epoch(self, epoch: int) -> None:
        """Pass the number of the epoch to the samplers of the loaders that have `set_epoch`.

        Args:
            epoch: epoch that begins.
        """
        set_epoch(epoch, *self._samplers)

    def __iter__(self) -> Iterator[list[tuple[int, Any]]]:
        numbers = range(len(self._samplers))
        if self._mode == "sequential":
            yield from itertools.chain.from_iterable(map(self._batches, numbers))
            return
        for batches in side_by_side([lambda n=n: self._batches(n) for n in numbers], self._mode):  # type: ignore[misc]
            yield [index for batch in batches if batch is not None for index in batch]

    def _batches(self, number: int) -> Iterator[list[tuple[int, Any]]]:
        """Yield the indices of the batches of a loader."""
        sampler, size = self._samplers[number], self._sizes[number]
        if self._whole[number]:
            for batch in sampler:
                yield [(number, index) for index in batch]
            return
        indices = iter(sampler)
        while places := [(number, index) for index in itertools.islice(indices, size)]:
            if len(places) < size and self._drops[number]:
                return
            yield places


class _JoinedCollate:
    """Collates the samples of each loader to its batch."""

    joins_loaders: Final = True  # tensors have the samples of one of the loaders

    def __init__(self, combined: CombinedLoader, loaders: Sequence[DataLoader[Any]]) -> None:
        # The structure without the loaders, which loader processes need not have.
        self._structure = combined.structured(range(len(loaders)))
        self._sequential = combined.mode == "sequential"
        self._collates = [part.collate_fn for part in loaders]
        self._alone = [part.batch_sampler is None or fetches_lists(part) for part in loaders]  # not to be batched

    def __call__(self, samples: Iterable[tuple[int, Any]]) -> Any:
        batches: list[Any] = [None] * len(self._collates)
        for number, group in itertools.groupby(samples, key=lambda sample: sample[0]):
            selected = [sample for _, sample in group]
            batches[number] = self._collates[number](selected[0] if self._alone[number] else selected)
            if self._sequential:
                return batches[number]
        return tree_unflatten(batches, tree_flatten(self._structure)[1])


class _InitAll:
    def __init__(self, functions: Sequence[Callable[[int], None]]) -> None:
        self._functions = functions

    def __call__(self, worker: int) -> None:
        for function in self._functions:
            function(worker)
