"""Combines several loaders: their batches side by side, or the loaders in sequence."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, final

from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, Sampler

from fabricx.core.rng import random_kept
from fabricx.data.epochs import set_epoch, set_epoch_of_loader
from fabricx.data.loader_classes import fetches_lists
from fabricx.data.loader_order import is_ordered, order_of
from fabricx.errors import did_you_mean

CombineMode = Literal["min_size", "max_size_cycle", "max_size", "sequential"]
MODES: Final = ("min_size", "max_size_cycle", "max_size", "sequential")


@final
class CombinedLoader:
    """Combine several loaders; an epoch has batches of all loaders.

    In training, a dict, list or tuple of loaders is the same as `CombinedLoader(loaders, "max_size_cycle")`. In an
    evaluation it is the same as mode "sequential": one loader after the other, with their `dataloader_idx`.

    With several ranks, each rank reads different combined batches; together they are the global batch.
    Map-style loaders are divided and resumed exactly, like a single loader. The number of samples of all loaders
    together is the weight of a rank's batch.

    >>> loader = CombinedLoader({"a": range(1, 4), "b": range(4, 5)}, "max_size_cycle")
    >>> [batch for batch, batch_idx, dataloader_idx in loader]
    [{'a': 1, 'b': 4}, {'a': 2, 'b': 4}, {'a': 3, 'b': 4}]

    Args:
        iterables: loaders, in dicts, lists and tuples; a batch has the same structure. A list of numbers or texts is
            one loader, which yields them; an empty list is a loader without batches.
        mode: "min_size" ends with the shortest loader, "max_size_cycle" with the longest, while others begin again,
            "max_size" with the longest, while the batch of others is None. "sequential" yields the batches of one
            loader after the other, without the structure.

    Raises:
        ValueError: the mode is unknown, or a loader is a CombinedLoader.
    """

    def __init__(self, iterables: Any, mode: CombineMode = "min_size") -> None:
        if mode not in MODES:
            hint = did_you_mean(mode, MODES) if isinstance(mode, str) else ""
            raise ValueError(f"CombinedLoader: Unsupported mode {mode!r}, please select one of: {list(MODES)}.{hint}")
        self.mode: CombineMode = mode
        self._flattened, structure = tree_flatten(iterables, is_leaf=_is_one_loader)
        self._numbers = tree_unflatten(range(len(self._flattened)), structure)  # can be pickled without a warning
        self._iterables = iterables
        self._limits: Any = None
        self._iterator: Iterator[tuple[Any, int, int]] | None = None
        if any(isinstance(loader, CombinedLoader) for loader in self._flattened):
            raise ValueError(
                "CombinedLoader: one of the loaders is a CombinedLoader, which can't be a part of another: pass its "
                "loaders in the dict or list"
            )

    @property
    def iterables(self) -> Any:
        """Return the loaders in their structure."""
        return self._iterables

    @property
    def flattened(self) -> list[Any]:
        """Return the loaders without the structure."""
        return self._flattened

    @flattened.setter
    def flattened(self, loaders: list[Any]) -> None:
        if len(loaders) != len(self._flattened):
            raise ValueError(
                f"CombinedLoader: Mismatch in flattened length ({len(loaders)}) and existing length "
                f"({len(self._flattened)}): assign a list with a loader for each"
            )
        self._iterables = self.structured(loaders)
        self._flattened = loaders

    @property
    def sampler(self) -> Any:
        """Return the sampler of each loader, in the structure of the loaders; None for one without a sampler."""
        return self.structured([getattr(loader, "sampler", None) for loader in self.flattened])

    @property
    def batch_sampler(self) -> Any:
        """Return the batch sampler of each loader, in the structure of the loaders; None for one without it."""
        return self.structured([getattr(loader, "batch_sampler", None) for loader in self.flattened])

    @property
    def limits(self) -> Any:
        """Return the maximum batches of each loader in iterations of a program; None, the default, for no limits.

        A single number is for every loader. In a run the limits of the Trainer apply; it refuses a loader with limits.
        """
        return self._limits

    @limits.setter
    def limits(self, limits: float | Sequence[float] | None) -> None:
        if isinstance(limits, (int, float)):
            limits = [limits] * len(self.flattened)
        elif limits is not None and len(limits) != len(self.flattened):
            raise ValueError(
                f"CombinedLoader: Mismatch in number of limits ({len(limits)}) and number of iterables "
                f"({len(self.flattened)}): assign a number, or a list with a number for each"
            )
        self._limits = limits

    def structured(self, batches: Sequence[Any]) -> Any:
        """Return batches in the structure of the loaders.

        Args:
            batches: a batch of each loader.
        """
        return tree_unflatten(list(batches), tree_flatten(self._numbers)[1])

    def __len__(self) -> int:
        lengths = [_length(loader) for loader in self.flattened]
        length = self._limited(lengths)
        if length == math.inf:
            kind = type(self.flattened[lengths.index(math.inf)]).__name__
            raise TypeError(f"CombinedLoader(mode={self.mode!r}) has no length, because {kind!r} has none")
        return int(length)

    def _limited(self, lengths: Sequence[int | float]) -> int | float:
        """Return the number of combined batches within the limits.

        Args:
            lengths: batches of each loader; infinity for an unknown length.
        """
        limits = self._limits_of_each()
        return combined_length([min(pair) for pair in zip(lengths, limits, strict=True)], self.mode)

    def _limits_of_each(self) -> list[int | float]:
        """Return whole numbers; infinity for no limit."""
        if self._limits is None:
            return [math.inf] * len(self.flattened)
        return [limit if limit == math.inf else math.ceil(limit) for limit in self._limits]

    def __iter__(self) -> CombinedLoader:
        """Begin; the object itself then yields the items, for `next`. Loaders side by side begin at once."""
        self._iterator = self.read()
        return self

    def __next__(self) -> tuple[Any, int, int]:
        if self._iterator is None:
            raise TypeError("CombinedLoader: call iter(combined_loader) before next(combined_loader)")
        return next(self._iterator)

    def reset(self) -> None:
        """Forget the position of `next`, and end the processes of loaders with `persistent_workers`."""
        self._iterator = None
        for loader in self.flattened:
            if isinstance(loader, DataLoader):
                loader._iterator = None  # its processes end with it

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_iterator": None}

    def read(self) -> Iterator[tuple[Any, int, int]]:
        """Return an iterator of its own over batches, with their numbers and those of their loaders."""
        loaders, limits = self.flattened, self._limits_of_each()
        if self.mode == "sequential":
            # The first loader begins at once, the others in their turn.
            return _in_sequence([iter(loader) for loader in loaders[:1]] + loaders[1:], limits)
        rows = side_by_side([functools.partial(iter, loader) for loader in loaders], self.mode)
        if self._limits is not None:
            rows = _first(rows, self._limited([_length(loader) for loader in loaders]))
        return ((self.structured(batches), index, 0) for index, batches in enumerate(rows))


def _in_sequence(loaders: Sequence[Any], limits: Sequence[int | float]) -> Iterator[tuple[Any, int, int]]:
    for number, (loader, limit) in enumerate(zip(loaders, limits, strict=True)):
        if limit:
            for index, batch in enumerate(_first(iter(loader), limit)):
                yield batch, index, number


def _first(items: Iterator[Any], limit: int | float) -> Iterator[Any]:
    return items if limit == math.inf else itertools.islice(items, int(limit))


def flat(iterables: Any) -> list[Any]:
    """Return the loaders in dicts, lists and tuples without the structure.

    Args:
        iterables: loaders, as for a `CombinedLoader`.
    """
    return tree_flatten(iterables, is_leaf=_is_one_loader)[0]


def _is_one_loader(value: Any) -> bool:
    """Return whether a part of the structure has no loaders in it: it is a list of numbers or texts, or empty."""
    parts = tree_flatten(value, is_leaf=lambda part: part is not value)[0]
    return all(isinstance(part, (int, float, str)) for part in parts)


def _length(loader: Any) -> int | float:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # of a stream
        return math.inf


class Batches:
    """The batches of a `CombinedLoader`, without their numbers.

    Args:
        combined: `CombinedLoader` of loaders that are read as they are.
    """

    def __init__(self, combined: CombinedLoader) -> None:
        self.combined = combined

    def __len__(self) -> int:
        return len(self.combined)

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch, _, _ in self.combined.read())

    def set_epoch(self, epoch: int) -> None:
        """Pass the number of the epoch to the loaders, their samplers and datasets that have `set_epoch`.

        Args:
            epoch: epoch that begins.
        """
        for loader in self.combined.flattened:
            set_epoch_of_loader(epoch, loader)


@final
class StatefulBatches(Batches):
    """The batches of a `CombinedLoader` whose loaders have `state_dict`: a resumed run continues at their positions.

    When a state is loaded, the newest batch of each loader is read again: at the end of an epoch, some loaders are in
    the middle of their data, and the next epoch begins them as a run without the interruption does.

    Args:
        combined: `CombinedLoader` of loaders with `state_dict` and `load_state_dict`.
    """

    def __init__(self, combined: CombinedLoader) -> None:
        super().__init__(combined)
        self._restored = False
        self._begun: dict[int, Iterator[Any]] = {}  # iterators of loaders with which a resumed epoch continues
        self._begin_anew()

    def _begin_anew(self) -> None:
        loaders = len(self.combined.flattened)
        self._ended = [False] * loaders
        self._before: list[Any] = [None] * loaders  # each loader's state before its newest batch; None at its end
        self._number = 0  # of the present loader in mode "sequential"
        self._over = False

    def __iter__(self) -> Iterator[Any]:
        if not self._restored:
            self._begun = {}
            self._begin_anew()
        self._restored = False
        return self._read()

    def _read(self) -> Iterator[Any]:
        loaders, mode = self.combined.flattened, self.combined.mode
        if mode == "sequential":
            for number in range(self._number, len(loaders)):
                self._number = number
                yield from self._read_one(number)
        else:
            begin = [functools.partial(self._read_one, number) for number in range(len(loaders))]
            absent = [ended and mode == "max_size" for ended in self._ended]
            sources = [iter(()) if out else start() for out, start in zip(absent, begin, strict=True)]
            for row in _side_by_side(sources, begin, mode, self._ended):
                yield self.combined.structured(row)
        self._over = True

    def _read_one(self, number: int) -> Iterator[Any]:
        loader = self.combined.flattened[number]
        batches = self._begun.pop(number, None) or iter(loader)
        while True:
            before = loader.state_dict()
            batch = next(batches, _NOTHING)
            self._before[number] = None if batch is _NOTHING else before
            if batch is _NOTHING:
                return
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of the loaders."""
        return {
            "loaders": [loader.state_dict() for loader in self.combined.flattened],
            "before": list(self._before),
            "ended": list(self._ended),
            "number": self._number,
            "over": self._over,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the positions of the loaders.

        Args:
            state: result of `state_dict`.
        """
        self._begin_anew()
        self._begun = {}
        for number, (saved, before) in enumerate(zip(state["loaders"], state["before"], strict=True)):
            loader = self.combined.flattened[number]
            loader.load_state_dict(saved if before is None else before)
            if before is not None:
                with random_kept():
                    self._begun[number] = iter(loader)
                    next(self._begun[number], None)
        if not state["over"]:
            self._before, self._ended, self._number = list(state["before"]), list(state["ended"]), state["number"]
            self._restored = True


def combined_length(lengths: Sequence[int | float], mode: CombineMode) -> int | float:
    """Return the number of combined batches.

    Args:
        lengths: batches of each loader; infinity for an unknown length.
        mode: mode of `CombinedLoader`.

    >>> [combined_length([2, 3], mode) for mode in MODES]
    [2, 3, 3, 5]
    """
    if mode == "sequential":
        return sum(lengths)
    return min(lengths) if mode == "min_size" else max(lengths)


def side_by_side(begin: Sequence[Callable[[], Iterator[Any]]], mode: CombineMode) -> Iterator[list[Any]]:
    """Return an iterator over lists with an item of each source; the sources begin at once.

    Args:
        begin: functions that begin each source.
        mode: mode of `CombinedLoader`, except "sequential".

    Raises:
        ValueError: a source yields nothing when it begins again.

    >>> [list(side_by_side([[1, 2].__iter__, [3].__iter__], mode)) for mode in MODES[:3]]
    [[[1, 3]], [[1, 3], [2, 3]], [[1, 3], [2, None]]]
    """
    return _side_by_side([start() for start in begin], begin, mode, [False] * len(begin))


def _side_by_side(
    sources: list[Iterator[Any]], begin: Sequence[Callable[[], Iterator[Any]]], mode: CombineMode, ended: list[bool]
) -> Iterator[list[Any]]:
    while True:
        items = []
        for number, source in enumerate(sources):
            item = next(source, _NOTHING)
            if item is _NOTHING:
                ended[number] = True
                if mode == "min_size" or all(ended):
                    return
                if mode == "max_size_cycle":
                    sources[number] = begin[number]()
                    if (item := next(sources[number], _NOTHING)) is _NOTHING:
                        raise ValueError(
                            f'loader {number} of a CombinedLoader(mode="max_size_cycle") yields no batch when it '
                            "begins again: use an iterable that restarts and is not empty, or another mode"
                        )
            items.append(None if item is _NOTHING else item)
        yield items


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
        self._lengths = [
            len(part.sampler) if part.batch_sampler is None else len(part.batch_sampler)  # type: ignore[arg-type]
            for part in loaders
        ]

    def __len__(self) -> int:
        return int(combined_length(self._lengths, self._mode))

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


_NOTHING: Any = object()
