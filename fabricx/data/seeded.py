"""Random numbers of loader processes that depend on the batch, and not on what a process has drawn before."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch


@final
class Seeded:
    """A map-style dataset, read batch by batch with a seed for each: what it draws can be drawn again.

    A run that goes on in the middle of an epoch has new loader processes. Under a seed of the batch, an augmentation
    that uses torch, numpy or random as they come gives in them what it would have given in the old ones.
    Everything else is the dataset's own.
    """

    def __init__(self, dataset: Any) -> None:
        self.__dict__["_dataset"] = dataset

    def __getitems__(self, seed_and_places: tuple[int, Sequence[Any]]) -> list[Any]:
        """Return the samples of a batch, drawn under its seed."""
        seed, places = seed_and_places
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        dataset = self.__dict__["_dataset"]
        if callable(several := getattr(dataset, "__getitems__", None)):
            found: Any = several(places)
            return list(found)
        return [dataset[place] for place in places]

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
