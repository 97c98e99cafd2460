"""Seeds the random numbers of a dataset per batch, so that they don't depend on earlier draws of a process."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np

from fabricx.core.module_state.rng import random_kept, seed_torch


@final
class BatchSeededDataset:
    """Wraps a map-style dataset and seeds the random number generators before each batch, so that draws are repeatable.

    A run that resumes in the middle of an epoch has new loader processes. Because of the seed per batch, augmentations
    that draw from torch, numpy or random produce the same values as in the original processes, on whichever rank the
    batch is read. All other attributes are read from the dataset.

    Args:
        dataset: a map-style dataset.
        keeps: restore this process's random state after each batch, because the process does not only load data.
    """

    def __init__(self, dataset: Any, *, keeps: bool = False) -> None:
        self.__dict__["_dataset"] = dataset
        self.__dict__["_keeps"] = keeps

    def __getitems__(self, seed_and_places: tuple[int, Sequence[Any]]) -> list[Any]:
        """Return the samples of a batch, drawn under the batch's seed.

        Args:
            seed_and_places: seed of the batch, and indices of the samples.
        """
        seed, indices = seed_and_places
        dataset = self.__dict__["_dataset"]
        with self._under(seed):
            if callable(several := getattr(dataset, "__getitems__", None)):
                samples: Any = several(indices)
                return list(samples)
            return [dataset[index] for index in indices]

    def __getitem__(self, seed_and_place: tuple[int, Any]) -> Any:
        """Return an item of a dataset that returns whole batches, drawn under a seed.

        Args:
            seed_and_place: seed of the item, and its index.
        """
        seed, index = seed_and_place
        with self._under(seed):
            return self.__dict__["_dataset"][index]

    @contextlib.contextmanager
    def _under(self, seed: int) -> Iterator[None]:
        with random_kept() if self.__dict__["_keeps"] else contextlib.nullcontext():
            seed_torch(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield

    def __len__(self) -> int:
        return len(self.__dict__["_dataset"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_dataset"], name, value)  # a worker_init_fn may set attributes of the dataset

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
