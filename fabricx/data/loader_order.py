"""The order of a DataLoader's samples: its sampler, seed, and chosen items."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Subset
from torch.utils.data.distributed import DistributedSampler

from fabricx.data.loader_classes import reads_otherwise


def is_ordered(source: Any) -> bool:
    """Return whether a loader's samples can be read in an order that is divided over ranks.

    Args:
        source: data of the user.
    """
    return (
        isinstance(source, DataLoader)
        and not isinstance(source.dataset, IterableDataset)
        and not reads_otherwise(source)
        and distributed_sampler(source) is None
        and not hasattr(source, "state_dict")
        and hasattr(order_of(source)[0], "__len__")
    )


def distributed_sampler(source: Any) -> DistributedSampler[Any] | None:
    """Return the loader's `DistributedSampler`, if it orders the loader's samples or batches.

    Args:
        source: data of the user.
    """
    if not isinstance(source, DataLoader):
        return None
    for sampler in (source.sampler, source.batch_sampler, getattr(source.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            return sampler
    return None


def order_of(loader: DataLoader[Any]) -> tuple[Any, int, bool]:
    """Return a loader's sampler, items of the order per batch, and whether an incomplete last batch is dropped.

    A `BatchSampler` that the user made is treated like `DataLoader(batch_size=...)`. With any other batch sampler, the
    items of the order are whole batches.

    Args:
        loader: map-style.
    """
    batches: Any = loader.batch_sampler
    if type(batches) is BatchSampler:
        return batches.sampler, batches.batch_size, batches.drop_last
    if batches is not None:
        return batches, 1, False
    return loader.sampler, 1, False


def seed_of(loader: DataLoader[Any], sampler: Any, seed: int) -> int:
    """Return the seed of a loader's own generator, if the user has set a generator.

    Args:
        loader: map-style.
        sampler: its sampler.
        seed: returned if there is no generator.
    """
    for generator in (loader.generator, getattr(sampler, "generator", None)):
        if isinstance(generator, torch.Generator):
            return generator.initial_seed() % 2**62
    return seed


def is_shuffled(sampler: Any) -> bool:
    """Return whether a sampler is that of `shuffle=True`.

    Args:
        sampler: sampler of a DataLoader.
    """
    return type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None


def chosen_items(dataset: Any) -> str:
    """Return a digest of the items that a Subset has, which a script without a seed may draw anew; "" without.

    Args:
        dataset: data set of the user.
    """
    digest, found = hashlib.blake2b(digest_size=8), False
    while isinstance(dataset, Subset):
        indices: Any = dataset.indices
        if isinstance(indices, (list, tuple, range, np.ndarray, torch.Tensor)):
            if isinstance(indices, range):  # much faster than a conversion
                indices = np.arange(indices.start, indices.stop, indices.step)
            numbers = np.asarray(indices.cpu() if isinstance(indices, torch.Tensor) else indices)
            if numbers.dtype.kind not in "iu":  # bytes of other objects differ between processes
                return ""
            digest.update(numbers.tobytes())
            found = True
        dataset = dataset.dataset
    return digest.hexdigest() if found else ""
