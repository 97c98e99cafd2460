"""Loader processes of a stream receive the rank before the user's `worker_init_fn` runs."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from fabricx.data.loader_ranks import give_rank
from fabricx.distributed import world as worlds
from fabricx.distributed.world import World


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(4))


SEEN: list[Any] = []


def first(number: int) -> None:
    SEEN.append((number, os.environ.get("RANK"), torch.distributed.get_rank()))


def test_a_loader_process_has_its_rank_before_worker_init_fn_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(Stream(), num_workers=1, worker_init_fn=first)
    give_rank(loader)
    init_fn = loader.worker_init_fn
    give_rank(loader)  # a second run with the same loader
    assert loader.worker_init_fn is init_fn
    monkeypatch.setattr(worlds, "_CURRENT", [World(rank=2, size=3)])
    sent = pickle.dumps(init_fn)
    for name in World().variables:
        monkeypatch.setenv(name, "")
    pickle.loads(sent)(7)
    try:
        assert SEEN == [(7, "2", 2)]
        assert torch.distributed.get_world_size() == 3
        with pytest.raises(RuntimeError, match="No backend"):
            torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


def test_a_loader_without_processes_is_not_changed() -> None:
    loader = DataLoader(Stream())
    give_rank(loader)
    give_rank([1, 2])
    assert loader.worker_init_fn is None
