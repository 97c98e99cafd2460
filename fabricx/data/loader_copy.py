"""A copy of a map-style DataLoader that fetches selected items."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch.utils.data import DataLoader

from fabricx.data.batch_seeding import BatchSeededDataset
from fabricx.data.loader_classes import fetches_lists
from fabricx.data.loader_signals import TerminatedByTrainer
from fabricx.data.preprocess import Preprocess


@final
class PickedItems:
    """Batch sampler of the copied DataLoader, which receives the items of each epoch."""

    def __init__(self) -> None:
        self.source: Callable[[], Iterator[Any]] = lambda: iter(())
        self.count = 0

    def __iter__(self) -> Iterator[Any]:
        return self.source()

    def __len__(self) -> int:
        return self.count


def copy_loader(loader: DataLoader[Any], picked: PickedItems, ranks: int, *, seeded: bool) -> DataLoader[Any]:
    """Copy a loader, with selected items in place of the loader's order.

    Args:
        loader: the user's loader.
        picked: batch sampler of the copy.
        ranks: ranks on this machine.
        seeded: seed each batch also without loader processes.
    """
    workers, ahead = loader.num_workers, loader.prefetch_factor
    if isinstance(loader, Preprocess):
        workers, ahead = loader.processes(ranks)
    several: dict[str, Any] = (
        {"prefetch_factor": ahead, "persistent_workers": loader.persistent_workers} if workers > 0 else {}
    )
    alone = loader.batch_sampler is None or fetches_lists(loader)
    dataset: Any = BatchSeededDataset(loader.dataset, keeps=not several) if several or seeded else loader.dataset
    return DataLoader(
        dataset,
        **({"sampler": picked, "batch_size": None} if alone else {"batch_sampler": picked}),
        num_workers=workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=TerminatedByTrainer(loader.worker_init_fn) if workers > 0 else None,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),
        **several,
    )
