"""A function over the samples of a data set, in separate processes."""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, Final, Literal, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

_MIB: Final = 2**20
_AHEAD: Final = 16  # batches at most that one process prepares ahead; more hide no longer pause


@final
class Mapped(Dataset[Any]):
    """A map-style dataset, each sample of it through a function when it is asked for."""

    def __init__(self, dataset: Any, function: Callable[[Any], Any]) -> None:
        self.dataset, self.function = dataset, function

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.function(self.dataset[index])


class Preprocess(DataLoader[Any]):
    """A `DataLoader` whose processes put each sample through a function, never further ahead than memory allows.

    Samples come in the order in which the same loader without processes would give them, whichever process is faster;
    a run that was stopped goes on at its next batch, also under another number of ranks, and what the function draws by
    torch, numpy or random is drawn again. One sample is mapped when the loader is made, to learn its size and to show
    mistakes before training begins.

    Args:
        dataset: map-style: with a length, and samples by number.
        function: from a sample to a sample; importable, or defined in the script.
        workers: processes of each rank; "auto" for the cores that ranks of this machine leave over, one at least; 0
            maps in the process that trains.
        memory_mib: the most that samples may take that wait to be trained, in MiB, on each rank.
        options: of `DataLoader`: batch_size, shuffle, drop_last, collate_fn, and so on.

    Raises:
        ValueError: the dataset isn't map-style or is empty, or an option is one that this class decides.

    Example::

        loader = Preprocess(images, augment, batch_size=64, shuffle=True)
    """

    def __init__(
        self, dataset: Any, function: Callable[[Any], Any], *, workers: int | Literal["auto"] = "auto",
        memory_mib: float = 256.0, **options: Any,
    ) -> None:  # fmt: skip
        _check(dataset, function, workers, memory_mib, options)
        mapped = Mapped(dataset, function)
        with _random_kept():
            sample_mib = size_of(mapped[0]) / _MIB
        self._workers, self._memory_mib = workers, memory_mib
        self._batch_mib = batch_mib = sample_mib * (options.get("batch_size", 1) or 1)
        count, ahead = self.processes(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if count and batch_mib * 2 > memory_mib:
            warnings.warn(
                f"Preprocess: two batches of {batch_mib:.1f} MiB are more than memory_mib={memory_mib:g}, and one that "
                "is ready beside one in work is the least that a process has",
                stacklevel=2,
            )
        super().__init__(mapped, num_workers=count, prefetch_factor=ahead if count else None, **options)

    def processes(self, ranks: int) -> tuple[int, int]:
        """Return how many processes each of so many ranks on this machine has, and how many batches each may have."""
        count = free_cores(ranks) if self._workers == "auto" else int(self._workers)
        return bounded(count, self._batch_mib, self._memory_mib)


def _check(dataset: Any, function: Any, workers: Any, memory_mib: float, options: Mapping[str, Any]) -> None:
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ValueError(
            f"Preprocess: {type(dataset).__name__} isn't map-style (a length, and samples by number), so samples can't "
            "be shared out among processes in a fixed order; map the stream inside of its own dataset"
        )
    if not len(dataset):
        raise ValueError("Preprocess: the dataset is empty")
    if not callable(function):
        raise ValueError(f"Preprocess: function={function!r} can't be called with a sample")
    if workers != "auto" and (not isinstance(workers, int) or workers < 0):
        raise ValueError(f"Preprocess(workers={workers!r}): 0 or more processes, or 'auto'")
    if memory_mib <= 0.0:
        raise ValueError(f"Preprocess(memory_mib={memory_mib}): more than 0 MiB")
    for name, instead in (("num_workers", "workers"), ("prefetch_factor", "memory_mib")):
        if name in options:
            raise ValueError(f"Preprocess decides about {name}: say {instead} instead")


def bounded(workers: int, batch_mib: float, memory_mib: float) -> tuple[int, int]:
    """Return how many processes may work, and how many batches each may have ready or in work.

    >>> bounded(4, 8.0, 256.0), bounded(4, 50.0, 256.0), bounded(4, 1000.0, 256.0), bounded(0, 8.0, 256.0)
    ((4, 8), (2, 2), (1, 1), (0, 0))
    """
    fit = int(memory_mib / max(batch_mib, 1e-9))
    workers = min(workers, max(1, fit // 2))  # one batch that is ready, and one in work
    return (workers, max(1, min(_AHEAD, fit // workers))) if workers else (0, 0)


def free_cores(ranks: int) -> int:
    """Return how many processes each of so many ranks can have beside itself on this machine, one at least."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, (cores - ranks) // ranks)


def size_of(sample: Any) -> int:
    """Return the bytes that a sample takes.

    >>> size_of({"image": torch.zeros(3, 4), "label": np.zeros(2)})
    64
    """
    if isinstance(sample, Tensor):
        return sample.numel() * sample.element_size()
    if isinstance(sample, np.ndarray):
        return int(sample.nbytes)
    if isinstance(sample, Mapping):
        return sum(size_of(value) for value in sample.values())
    if isinstance(sample, (list, tuple)):
        return sum(size_of(value) for value in sample)
    if is_dataclass(sample) and not isinstance(sample, type):
        return sum(size_of(getattr(sample, field.name)) for field in fields(sample))
    return sys.getsizeof(sample)


@contextmanager
def _random_kept() -> Iterator[None]:
    """Let what is drawn inside change nothing of what is drawn later."""
    plain, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(plain)
            np.random.set_state(arrays)
