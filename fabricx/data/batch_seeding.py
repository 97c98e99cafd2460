"""Random numbers of a data set that depend on the batch, and not on what a process has drawn before."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np
import torch

from fabricx.core.rng import random_kept


@final
class Seeded:
    """A map-style dataset, read batch by batch with a seed for each: what it draws can be drawn again.

    A run that goes on in the middle of an epoch has new loader processes. Under a seed of the batch, an augmentation
    that uses torch, numpy or random as they come gives in them what it would have given in the old ones. It also gives
    the same on whichever rank reads the batch. Everything else is the dataset's own.

    Args:
        dataset: that is read.
        keeps: the random numbers of this process stay where they are: it doesn't only load data.
    """

    def __init__(self, dataset: Any, *, keeps: bool = False) -> None:
        self.__dict__["_dataset"] = dataset
        self.__dict__["_keeps"] = keeps

    def __getitems__(self, seed_and_places: tuple[int, Sequence[Any]]) -> list[Any]:
        """Return the samples of a batch, drawn under its seed."""
        seed, places = seed_and_places
        dataset = self.__dict__["_dataset"]
        with self._under(seed):
            if callable(several := getattr(dataset, "__getitems__", None)):
                found: Any = several(places)
                return list(found)
            return [dataset[place] for place in places]

    def __getitem__(self, seed_and_place: tuple[int, Any]) -> Any:
        """Return what a dataset that makes batches by itself has at a place, drawn under a seed."""
        seed, place = seed_and_place
        with self._under(seed):
            return self.__dict__["_dataset"][place]

    @contextlib.contextmanager
    def _under(self, seed: int) -> Iterator[None]:
        with random_kept() if self.__dict__["_keeps"] else contextlib.nullcontext():
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield

    def __len__(self) -> int:
        return len(self.__dict__["_dataset"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_dataset"], name, value)  # a worker_init_fn may tell the dataset something

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
