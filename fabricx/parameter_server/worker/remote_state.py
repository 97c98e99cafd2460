"""State that is on servers: optimizers, weights and their averages, error feedback, statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, final

import torch
from torch import Tensor

from fabricx.core.strategy_support.averaging import AverageRule
from fabricx.parameter_server.optimizer_parts import ServerOptimizers, flat_part, part_of
from fabricx.parameter_server.sample_ledger import SampleLedger
from fabricx.parameter_server.wire.messages import Counts, ReadState, RuleState, StartAverage
from fabricx.parameter_server.wire.partition import Shard


@final
class RemoteState:
    """Requests for state that is on servers.

    Args:
        parameters: parameters of the model.
        shards: part of the parameters of each server.
        request: sends a message to a server, by its number, and returns the reply.
    """

    def __init__(
        self, parameters: Sequence[Tensor], shards: Sequence[Shard], request: Callable[[int, Any], Any]
    ) -> None:  # fmt: skip
        self._parameters, self._shards, self._request = parameters, shards, request

    @staticmethod
    def none() -> RemoteState:
        """Return the state of no servers."""
        return RemoteState([], [], _no_server)

    def optimizers(self) -> list[ServerOptimizers]:
        """Return the optimizers of each server."""
        return self._read("optimizers")

    def rule(self) -> tuple[dict[str, list[Tensor]], int]:
        """Return the tensors of the servers' update rule, by name and parameter, and its rounds; see `RuleState`."""
        states: list[RuleState] = self._read("rule")
        names = [name for name in states[0].tensors if all(name in state.tensors for state in states)]
        return {name: self._by_parameter([state.tensors[name] for state in states]) for name in names}, states[0].rounds

    def weights(self) -> list[Tensor]:
        """Return the servers' weights, by parameter, in its shape, without effect on compressed differences."""
        return self._by_parameter(self._read("weights"))

    def keep_average(self, rule: AverageRule, step: int, averages: Sequence[Tensor], updates: int = 0) -> None:
        """Start moving averages of the weights on all servers; returns when all have started.

        Args:
            rule: decay of the average.
            step: weight updates of the run so far.
            averages: present averages, by parameter, in its shape.
            updates: steps of the present averages.
        """
        for number, shard in enumerate(self._shards):
            self._request(number, StartAverage(rule, step, flat_part(averages, shard).cpu(), updates))

    def averages(self) -> tuple[list[Tensor], int]:
        """Return the moving averages by parameter, in its shape, and the number of updates of the average."""
        replies: list[tuple[Tensor, int]] = self._read("average")
        return self._by_parameter([values for values, _ in replies]), replies[0][1]

    def error_feedback(self) -> list[Tensor | None]:
        """Return the servers' error feedback of compressed sums, by server, flat."""
        return self._read("error_feedback")

    def counts(self) -> list[Counts]:
        """Return the statistics of each server: updates, staleness, dropped gradients."""
        return self._read("counts")

    def samples(self) -> list[SampleLedger]:
        """Return the account of each server of the samples in its weights."""
        return self._read("samples")

    def _read(
        self, name: Literal["optimizers", "rule", "weights", "average", "error_feedback", "counts", "samples"]
    ) -> list[Any]:  # fmt: skip
        return [self._request(number, ReadState(name)).content for number in range(len(self._shards))]

    def _by_parameter(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Return the servers' vectors by parameter, in their dtype."""
        whole = [torch.zeros(parameter.shape, dtype=vectors[0].dtype) for parameter in self._parameters]
        for vector, shard in zip(vectors, self._shards, strict=True):
            for part, (start, stop) in zip(shard.parts, shard.spans, strict=True):
                target = part_of(whole[part.parameter], part)
                target.copy_(vector[start:stop].view(target.shape))
        return whole


def _no_server(number: int, message: Any) -> NoReturn:
    raise LookupError(f"there is no server {number}")
