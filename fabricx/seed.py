"""Random numbers: one seed for every source of them, and where they stand."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any, final

import torch


def seed_everything(seed: int, workers: bool = False) -> int:
    """Seed python, numpy and torch, on all devices.

    Ranks other than the first get a stream of their own when a run starts; the order of data is the same on all.

    Args:
        seed: a whole number from 0 to 2**32 - 1.
        workers: accepted for users of Lightning; processes of a DataLoader are always seeded.

    Raises:
        ValueError: the seed is outside of that range.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed}: a whole number from 0 to {2**32 - 1}")
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch.manual_seed(seed)
    return seed


@final
class RandomState:
    """Where the random numbers of this process stood when it was made."""

    def __init__(self) -> None:
        self.python: tuple[Any, ...] = random.getstate()
        self.torch = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        self.numpy: Any = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None

    def restore(self) -> None:
        """Go back there."""
        random.setstate(self.python)
        torch.set_rng_state(self.torch)
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.cuda)
        if self.numpy is not None:
            import numpy as np

            np.random.set_state(self.numpy)

    def state_dict(self) -> dict[str, Any]:
        """Return plain data and tensors."""
        version, numbers, gauss = self.python
        state: dict[str, Any] = {"torch": self.torch, "python": [version, list(numbers), gauss]}
        if self.cuda is not None:
            state["cuda"] = self.cuda
        if self.numpy is not None:
            kind, keys, position, has_gauss, cached = self.numpy
            state["numpy"] = [kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)]
        return state

    @classmethod
    def of(cls, state: dict[str, Any]) -> RandomState:
        """Return what has given this `state_dict`."""
        found = cls()
        version, numbers, gauss = state["python"]
        found.python, found.torch = (version, tuple(numbers), gauss), state["torch"].cpu()
        found.cuda = state["cuda"].cpu() if "cuda" in state else None
        found.numpy = None
        if "numpy" in state:
            import numpy as np

            kind, keys, *rest = state["numpy"]
            found.numpy = (kind, np.array(keys, dtype=np.uint32), *rest)
        return found


@contextlib.contextmanager
def random_kept() -> Iterator[None]:
    """Let what happens inside draw random numbers without a trace."""
    before = RandomState()
    try:
        yield
    finally:
        before.restore()
