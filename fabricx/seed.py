"""One seed for every source of random numbers."""

from __future__ import annotations

import random
import sys

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
