"""Results refer to the receiver's own objects."""

from __future__ import annotations

import pickle

import pytest
from torch import nn

from fabricx import by_value


def test_results_refer_to_the_receivers_parameters_and_modules() -> None:
    worker, caller = nn.Linear(2, 2), nn.Linear(2, 2)
    former = nn.Parameter(worker.weight.detach().clone())
    by_value.share([("weight", former), ("weight", worker.weight), ("layer", worker)])
    data = by_value.dumps([former, worker.weight, worker, worker.bias], home=True)
    by_value.share(())
    with by_value.shared_objects({"weight": caller.weight, "layer": caller}):
        first, second, layer, bias = pickle.loads(data)
    assert first is second
    assert first is caller.weight
    assert layer is caller
    assert bias is not caller.bias  # it has no name
    with pytest.raises(StopIteration):
        pickle.loads(data)


def test_only_the_sender_of_objects_receives_their_names() -> None:
    value = ["a"]
    with by_value.shared_objects({"value": value}):
        assert pickle.loads(by_value.dumps([value])) == [["a"]]
