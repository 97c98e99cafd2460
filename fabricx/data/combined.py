"""Combines several loaders: their batches side by side, or the loaders in sequence."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, final

from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader

from fabricx.core.module_state.rng import random_kept
from fabricx.data.data_state import copied
from fabricx.data.epochs import set_epoch_of_loader
from fabricx.errors import did_you_mean

CombineMode = Literal["min_size", "max_size_cycle", "max_size", "sequential"]
MODES: Final = ("min_size", "max_size_cycle", "max_size", "sequential")
_NOTHING: Final[Any] = object()  # in place of an item at the end of a loader


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
        self._first = [False] * loaders  # whether that is the first since the loader began
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
        begun = self._begun.pop(number, None)
        batches, first = begun or iter(loader), begun is None
        while True:
            before = copied(loader.state_dict())
            batch = next(batches, _NOTHING)
            self._before[number] = None if batch is _NOTHING else before
            self._first[number], first = first and batch is not _NOTHING, False
            if batch is _NOTHING:
                return
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of the loaders."""
        return {
            "loaders": [loader.state_dict() for loader in self.combined.flattened],
            "before": list(self._before),
            "first": list(self._first),
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
            # A loader whose __iter__ is a generator begins with its first batch: the state before is an older one.
            first = state.get("first", self._first)[number] and not state["over"]
            loader.load_state_dict(copied(saved if before is None or first else before))
            if before is not None and not first:
                with random_kept():
                    self._begun[number] = iter(loader)
                    next(self._begun[number], None)
        if not state["over"]:
            self._before, self._ended, self._number = list(state["before"]), list(state["ended"]), state["number"]
            self._first = list(state.get("first", self._first))
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
