"""Loaders of numbers, and their batches as lists."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Numbers(Dataset[int]):
    """Numbers from `begin`; reads them in batches if `batched`."""

    def __init__(self, begin: int, count: int) -> None:
        self.begin, self.count = begin, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return self.begin + index


class Batched(Numbers):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self.begin + index for index in indices]


def loader(begin: int, count: int, batch_size: int = 2, **options: Any) -> DataLoader[int]:
    return DataLoader(Batched(begin, count) if begin else Numbers(begin, count), batch_size=batch_size, **options)


def plain(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: plain(part) for name, part in batch.items()}
    if isinstance(batch, list):
        return [plain(part) for part in batch]
    return batch.tolist() if isinstance(batch, Tensor) else batch


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(5))
