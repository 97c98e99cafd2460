"""Rows that are pulled before a function of torch reads a table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from fabricx.parameter_server.sparse_embeddings import TableReads


class Pulls:
    """Records the pulled rows."""

    def __init__(self) -> None:
        self.lacks_rows = True
        self.pulled: list[Any] = []

    def pull_rows(self, ids: dict[int, Tensor]) -> None:
        self.pulled.append({number: rows.tolist() for number, rows in ids.items()})

    def pull_tables(self) -> None:
        self.pulled.append("all")
        self.lacks_rows = False


@pytest.fixture
def table() -> nn.Embedding:
    return nn.Embedding(5, 2, sparse=True)


def reads(table: nn.Embedding) -> tuple[TableReads, Pulls]:
    pulls = Pulls()
    return TableReads({3: table.weight}, pulls), pulls


def test_lookups_pull_their_rows(table: nn.Embedding) -> None:
    mode, pulls = reads(table)
    ids = torch.tensor([[2, 4, 2]])
    with mode:
        table(ids)
        F.embedding(ids, table.weight)
        F.embedding_bag(ids, table.weight)
        torch.embedding(table.weight, ids)
        _ = table.weight.shape, table.weight.dtype, len(table.weight)
        nn.Linear(2, 2)(torch.ones(2))
    assert pulls.pulled == [{3: [2, 4]}] * 4


@pytest.mark.parametrize(
    "read",
    [Tensor.detach, Tensor.sum, lambda weight: weight.data, lambda weight: weight[2], lambda w: torch.stack([w])],
)
def test_other_functions_pull_the_table_once(table: nn.Embedding, read: Any) -> None:
    mode, pulls = reads(table)
    with mode:
        read(table.weight)
        read(table.weight)
        table(torch.tensor([1]))
    assert pulls.pulled == ["all"]


@pytest.mark.parametrize(
    "write", [lambda w: w.mul_(2), lambda w: w.data.mul_(2), lambda w: w.__setitem__(0, 1.0), lambda w: w[1:].zero_()]
)
def test_a_step_may_not_write_to_a_table(table: nn.Embedding, write: Any) -> None:
    mode, _ = reads(table)
    with mode, torch.no_grad(), pytest.raises(ValueError, match="training_step changes a sparse table by"):
        write(table.weight)
    with mode:
        table.weight.requires_grad_(False)
        torch.zeros(3).add_(1)
        torch.vmap(lambda x: (x * 2).add_(1))(torch.zeros(3))
    with mode, pytest.raises(ValueError, match="max_norm changes rows on a worker"):
        F.embedding(torch.tensor([1]), table.weight, max_norm=1.0)
