from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from fabricx.model_parallel.microbatches import joined, rows_of, split


@dataclass
class Sample:
    image: torch.Tensor
    label: torch.Tensor
    temperature: float


def test_microbatches_differ_by_one_row_at_most_and_none_is_empty():
    for rows in range(1, 12):
        for parts in range(1, 6):
            microbatches = [part.tolist() for part in split(torch.arange(rows), parts)]
            sizes = [len(part) for part in microbatches]
            assert len(sizes) == min(rows, parts)
            assert max(sizes) - min(sizes) <= 1
            assert [row for part in microbatches for row in part] == list(range(rows))


def test_nested_batches_are_split_and_values_without_rows_are_shared():
    step, positions = torch.tensor(3), torch.zeros(1, 5)
    batch = {
        "x": torch.arange(4), "array": np.arange(4), "names": ["a", "b", "c", "d"], "step": step,
        "positions": positions,
        "inner": [Sample(torch.ones(4, 2), torch.arange(4), 0.5), (torch.arange(4.0), None, "text")],
        "tokens": UserDict(ids=torch.arange(4)),
    }  # fmt: skip
    first, second = split(batch, 2)
    assert first["x"].tolist() == [0, 1]
    assert second["array"].tolist() == [2, 3]
    assert second["names"] == ["c", "d"]
    assert first["step"] is step
    assert first["positions"] is positions
    assert first["inner"][0].image.shape == (2, 2)
    assert second["inner"][0].label.tolist() == [2, 3]
    assert second["inner"][0].temperature == 0.5
    assert second["inner"][1][0].tolist() == [2.0, 3.0]
    assert second["inner"][1][1:] == (None, "text")
    assert isinstance(first["tokens"], UserDict)
    assert second["tokens"]["ids"].tolist() == [2, 3]
    assert batch["tokens"]["ids"].tolist() == [0, 1, 2, 3]


def test_changes_of_a_microbatch_are_not_counted_as_changes_of_others():
    weight = torch.ones((), requires_grad=True)
    first, second = split(torch.ones(4), 2)
    loss = (first * weight).sum()
    second.mul_(2)
    loss.backward()  # needs `first`, of which autograd has recorded the version
    assert weight.grad is not None
    assert weight.grad.item() == 2.0
    assert split(torch.ones(2, requires_grad=True), 2)[0].requires_grad


def test_a_single_microbatch_is_the_batch():
    batch = object()
    assert split(batch, 1) == [batch]


class Graph:
    """An object that only its library can split."""


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"a": 1}, "a batch without a tensor that has samples can't be split into 2 microbatches"),
        (torch.zeros(0, 2), "a batch without samples can't be split"),
        ([torch.zeros(4), Graph()], "an object of class Graph"),
        ([torch.zeros(4), pack_sequence([torch.ones(2), torch.ones(1)])], "an object of class PackedSequence"),
        ([torch.zeros(4), torch.eye(4).to_sparse()], "a nested or sparse tensor"),
    ],
)
def test_a_batch_that_cannot_be_split_is_an_error_with_the_remedy(batch, message):
    with pytest.raises(ValueError, match=f"{message}.*or set microbatches=1"):
        split(batch, 2)


def test_the_number_of_rows_is_that_of_the_first_tensor_with_a_dimension():
    assert rows_of({"a": "text", "b": [torch.tensor(1), torch.zeros(3, 2)]}) == 3
    assert rows_of({"a": 1}) is None


def test_results_of_microbatches_are_concatenated_to_the_result_of_the_batch():
    parts = split(torch.arange(3.0), 2)
    outputs = [{"loss": part.mean(), "logits": part * 2, "epoch": 4, "count": torch.tensor(7)} for part in parts]
    whole = joined(outputs, [2, 1], [2 / 3, 1 / 3])
    assert whole["loss"] == torch.arange(3.0).mean()
    assert whole["logits"].tolist() == [0, 2, 4]
    assert whole["epoch"] == 4
    assert whole["count"] == 7


def test_numbers_and_lists_of_microbatches_become_those_of_the_batch():
    outputs = [{"n": n, "texts": ["a"] * n, "mean": float(n), "logits": [torch.ones(n)]} for n in (2, 1)]
    whole = joined(outputs, [2, 1], [2 / 3, 1 / 3])
    assert whole["n"] == 3
    assert whole["texts"] == ["a"] * 3
    assert whole["mean"] == pytest.approx(5 / 3)
    assert [len(logits) for logits in whole["logits"]] == [3]


@pytest.mark.parametrize("values", [(5, 6), (torch.tensor(5), torch.tensor(6)), ("a", "b"), (5, None), (2, 2)])
def test_values_of_microbatches_that_can_not_be_joined_are_a_warning(values):
    with pytest.warns(UserWarning, match=r"returns count, which seems to be of each microbatch .* an item for each"):
        whole = joined([{"count": value} for value in values], [2, 2], [0.5, 0.5])
    assert whole["count"] == values[0]


def test_microbatches_without_a_loss_are_omitted():
    assert joined([None, torch.tensor(5.0, requires_grad=True)], [2, 1], [2 / 3, 1 / 3]) == 5
    assert not joined([torch.tensor(5.0, requires_grad=True)], [2], [1.0]).requires_grad
    assert joined([None, None], [2, 1], [2 / 3, 1 / 3]) is None
