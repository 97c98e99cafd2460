"""`Preprocess`: a DataLoader that applies a function to each sample in separate processes."""

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
_AHEAD: Final = 16  # maximum batches that a process prepares ahead; more hide no longer pauses


@final
class Mapped(Dataset[Any]):
    """Map-style dataset that applies a function to each sample when the sample is read.

    Args:
        dataset: map-style.
        function: function from a sample to a sample.
    """

    def __init__(self, dataset: Any, function: Callable[[Any], Any]) -> None:
        self.dataset, self.function = dataset, function

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.function(self.dataset[index])


class Preprocess(DataLoader[Any]):
    """A `DataLoader` whose processes apply a function to each sample, limited by memory.

    Samples have the same order as without processes, whichever process is faster. A stopped run resumes at its next
    batch, also with a different number of ranks, and values that the function draws from torch, numpy or random are
    drawn again. One sample is processed at construction, to measure its size and to report errors before training
    begins.

    Args:
        dataset: map-style: with a length, and samples by index.
        function: function from a sample to a sample.
        workers: processes per rank; "auto" for the cores that the ranks of this machine do not use, at least 1; 0
            processes samples in the training process.
        memory_mib: maximum memory of prepared samples per rank, in MiB.
        options: options of `DataLoader`: batch_size, shuffle, drop_last, collate_fn, and so on.

    Raises:
        ValueError: the dataset is not map-style or is empty, or an option is decided by this class.

    For example:

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
                f"Preprocess: two batches of {batch_mib:.1f} MiB exceed memory_mib={memory_mib:g}, but a process "
                "holds at least one batch that is ready and one in preparation: raise memory_mib or lower batch_size",
                stacklevel=2,
            )
        super().__init__(mapped, num_workers=count, prefetch_factor=ahead if count else None, **options)

    def processes(self, ranks: int) -> tuple[int, int]:
        """Return the number of processes per rank, and the maximum number of batches per process.

        Args:
            ranks: ranks on this machine.
        """
        count = free_cores(ranks) if self._workers == "auto" else int(self._workers)
        return bounded(count, self._batch_mib, self._memory_mib)


def _check(dataset: Any, function: Any, workers: Any, memory_mib: float, options: Mapping[str, Any]) -> None:
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ValueError(
            f"Preprocess: {type(dataset).__name__} isn't map-style (a length, and samples by number), so samples can't "
            "be divided over processes in a fixed order; call the function inside of the stream's own dataset"
        )
    if not len(dataset):
        raise ValueError("Preprocess: the dataset is empty")
    if not callable(function):
        raise ValueError(f"Preprocess: function={function!r} is not callable; pass a function of a sample")
    if workers != "auto" and (not isinstance(workers, int) or workers < 0):
        raise ValueError(f"Preprocess(workers={workers!r}): must be 0 or more processes, or 'auto'")
    if memory_mib <= 0.0:
        raise ValueError(f"Preprocess(memory_mib={memory_mib}): must be more than 0 MiB")
    for name, instead in (("num_workers", "workers"), ("prefetch_factor", "memory_mib")):
        if name in options:
            raise ValueError(f"Preprocess sets {name} itself: use {instead} instead")


def bounded(workers: int, batch_mib: float, memory_mib: float) -> tuple[int, int]:
    """Return the number of processes and the maximum batches per process, ready or in preparation.

    Args:
        workers: desired processes.
        batch_mib: size of a batch, MiB.
        memory_mib: maximum memory of all batches, MiB.

    >>> bounded(4, 8.0, 256.0), bounded(4, 50.0, 256.0), bounded(4, 1000.0, 256.0), bounded(0, 8.0, 256.0)
    ((4, 8), (2, 2), (1, 1), (0, 0))
    """
    fit = int(memory_mib / max(batch_mib, 1e-9))
    workers = min(workers, max(1, fit // 2))  # at least one batch that is ready and one in preparation
    return (workers, max(1, min(_AHEAD, fit // workers))) if workers else (0, 0)


def free_cores(ranks: int) -> int:
    """Return the number of free cores per rank on this machine, at least 1.

    Args:
        ranks: ranks on this machine, each of which uses one core.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, (cores - ranks) // ranks)


def size_of(sample: Any) -> int:
    """Return the memory of a sample in bytes.

    Args:
        sample: tensors, arrays, nested in mappings, sequences or dataclasses.

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
    """Restore the random state of torch (CPU), numpy and python at the end of this context."""
    plain, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(plain)
            np.random.set_state(arrays)
