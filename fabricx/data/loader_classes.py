"""Classes of DataLoaders that read their data in a way of their own."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset


def reads_otherwise(loader: DataLoader[Any]) -> bool:
    """Return whether a class of the user changes what a DataLoader yields, or how many batches it counts.

    Args:
        loader: data of the user.
    """
    kind = type(loader)
    if kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator:
        return True
    chooses = kind._index_sampler is not DataLoader._index_sampler
    if (chooses or kind._auto_collation is not DataLoader._auto_collation) and not fetches_lists(loader):
        return True
    if kind.__len__ is DataLoader.__len__ or isinstance(loader.dataset, IterableDataset):
        return False
    try:
        return len(loader) != DataLoader.__len__(loader)
    except TypeError:  # the sampler has no length
        return True


def fetches_lists(loader: DataLoader[Any]) -> bool:
    """Return whether a class of the user passes all indices of a batch to the dataset: `collate_fn(dataset[[3, 7]])`.

    torch_spatiotemporal's loaders do so: their datasets read the windows of a batch at once.

    Args:
        loader: data of the user.
    """
    batches = loader.batch_sampler
    return not loader._auto_collation and batches is not None and loader._index_sampler is batches
