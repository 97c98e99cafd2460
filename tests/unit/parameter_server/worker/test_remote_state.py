"""State of several servers is joined by parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fabricx.core.strategy_support.averaging import AverageRule
from fabricx.parameter_server.wire.messages import Counts, ReadState, Reply, RuleState, StartAverage
from fabricx.parameter_server.wire.partition import divide
from fabricx.parameter_server.worker.remote_state import RemoteState

PARAMETERS = [torch.arange(6.0).view(2, 3), torch.tensor([6.0, 7.0])]
SHARDS = divide([parameter.shape for parameter in PARAMETERS], 3)
FLAT = torch.cat([parameter.reshape(-1) for parameter in PARAMETERS])


def served(requests: list[Any]) -> RemoteState:
    """Return the state of three servers, each with its part of FLAT."""
    bounds = torch.tensor([0, *(shard.size for shard in SHARDS)]).cumsum(0).tolist()

    def request(number: int, message: Any) -> Reply:
        requests.append((number, message))
        part = FLAT[bounds[number] : bounds[number + 1]]
        contents = {
            "weights": part,
            "rule": RuleState({"velocity": -part}, 3),
            "average": (2 * part, 5),
            "counts": Counts(updates=number),
        }
        return Reply(content=contents.get(getattr(message, "name", "")))

    return RemoteState(PARAMETERS, SHARDS, request)


def test_parts_are_joined_in_the_shapes_of_the_parameters() -> None:
    state = served([])
    averages, updates = state.averages()
    assert updates == 5
    for factor, vectors in ((1, state.weights()), (-1, state.rule()[0]["velocity"]), (2, averages)):
        assert all(torch.equal(v, factor * p) for v, p in zip(vectors, PARAMETERS, strict=True))
    assert [counts.updates for counts in state.counts()] == [0, 1, 2]


def test_each_server_keeps_the_average_of_its_part() -> None:
    requests: list[Any] = []
    served(requests).keep_average(AverageRule(0.5), 3, PARAMETERS, 4)
    assert [number for number, _ in requests] == [0, 1, 2]
    assert all(
        isinstance(message, StartAverage) and (message.step, message.updates) == (3, 4) for _, message in requests
    )
    assert torch.equal(torch.cat([message.values for _, message in requests]), FLAT)


def test_without_servers_there_are_no_statistics() -> None:
    none = RemoteState.none()
    assert none.counts() == none.error_feedback() == none.optimizers() == []
    with pytest.raises(LookupError, match="there is no server 0"):
        none._request(0, ReadState("counts"))
