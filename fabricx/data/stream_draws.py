"""Random numbers of a stream, apart from those of the training that reads it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, final

import torch

from fabricx.core.module_state.rng import RandomState, random_kept, seed_often


@final
@dataclass
class Drawn:
    """Random states of a source after its newest batch; outlives the iterator.

    Attributes:
        state: states of torch, numpy and python.
    """

    state: RandomState


@final
class OwnDraws(Iterator[Any]):
    """Iterator of a source, with random states apart from the global generators.

    A batch that is read ahead, or again by a resumed run, has the same random numbers for any draws of the training
    between batches. A seed from torch's global generator begins the states.

    Args:
        source: iterable of batches.
        state: states with which the source continues; None to begin.

    Attributes:
        drawn: states after the newest batch.
    """

    def __init__(self, source: Iterable[Any], state: RandomState | None = None) -> None:
        self._elsewhere = bool(getattr(source, "num_workers", 0))  # loader processes draw, by a seed
        seed = int(torch.randint(2**32, (), dtype=torch.int64)) if state is None else 0
        with random_kept():
            if state is None:
                seed_often(seed)
            else:
                state.restore()
            self._batches = iter(source)
            self.drawn = Drawn(RandomState())

    def __next__(self) -> Any:
        if self._elsewhere:
            return next(self._batches)
        with random_kept():
            self.drawn.state.restore()
            try:
                return next(self._batches)
            finally:
                self.drawn.state = RandomState()
