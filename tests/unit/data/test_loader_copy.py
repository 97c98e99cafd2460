"""Copies of DataLoaders that fetch selected items."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from fabricx.data.loader_copy import PickedItems, copy_loader


@pytest.mark.parametrize("options", [{"batch_size": 4}, {"batch_size": None}], ids=["batches", "single items"])
def test_a_copy_has_the_options_of_the_loader_and_fetches_the_picked_items(options: dict[str, Any]) -> None:
    loader = DataLoader(range(10), collate_fn=list if options["batch_size"] else None, timeout=0, **options)
    picked = PickedItems()
    copy = copy_loader(loader, picked, ranks=1, seeded=False)
    items: list[Any] = [[7, 1], [3]] if options["batch_size"] else [7, 1, 3]
    picked.source, picked.count = lambda: iter(items), len(items)
    assert list(copy) == items
    assert len(copy) == picked.count
    assert (copy.num_workers, copy.collate_fn) == (loader.num_workers, loader.collate_fn)
    assert list(copy) == items  # again in the next epoch
