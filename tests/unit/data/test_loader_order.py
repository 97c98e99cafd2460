"""The order of a DataLoader's samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from fabricx.data.loader_order import chosen_items

DATA: Any = range(20)


def test_items_are_equal_in_each_form_of_loader() -> None:
    forms: list[Any] = [[3, 5, 7], (3, 5, 7), range(3, 9, 2), np.array([3, 5, 7]), torch.tensor([3, 5, 7])]
    digests = {chosen_items(Subset(DATA, form)) for form in forms}
    assert len(digests) == 1
    assert digests.isdisjoint(
        {chosen_items(Subset(DATA, [3, 7, 5])), chosen_items(Subset(Subset(DATA, range(20)), [3, 5, 7]))}
    )
    assert chosen_items(DATA) == chosen_items(Subset(DATA, ["a"])) == ""  # type: ignore[arg-type, list-item]
