"""A server's part of the model: weights or sums, optimizers, and replies with weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor

from fabricx.core.strategy_support.averaging import AverageRule, FlatAverage
from fabricx.distributed.compression.codecs import make_codec
from fabricx.parameter_server.gradients import Gradient
from fabricx.parameter_server.optimizer_parts import ServerOptimizers
from fabricx.parameter_server.sample_ledger import SampleLedger, Span
from fabricx.parameter_server.server.replies import Replies
from fabricx.parameter_server.server.update_rule import Correction, make_rule
from fabricx.parameter_server.wire.messages import Counts, Groups, Pull, Push, Reply, RuleState, ServerInit


@final
class ModelShard:
    """A server's part of the model.

    Args:
        init: initialisation of the server.
        counts: statistics of the server, updated in place.

    Attributes:
        init: see Args.
        settings: behaviour of the server.
        version: number of updates.
        trained: number of leases in the weights, without those that had no loss.
        skipped: versions without an update of the weights, because no worker had a gradient for the global batch.
        samples: samples in the weights.
        sums: the server only sums, and workers step.
        copies_gradients: `decode` returns new memory; otherwise views of the worker's vector.
    """

    def __init__(self, init: ServerInit, counts: Counts) -> None:
        self.init, self.settings = init, init.settings
        self.version = self.trained = init.version
        self.skipped = 0
        self.samples = SampleLedger()
        self._counts = counts
        self._rule = make_rule(init)
        self._replies = Replies(init)
        self._correction = Correction(init)
        self._average: FlatAverage | None = None  # of the weights, if a callback requests it
        kind = init.settings.compression
        self._codec = None if kind is None else make_codec(kind, keep=init.settings.keep, feedback=False)
        self.sums, self.copies_gradients = self._rule.sums, self._codec is not None

    @property
    def values(self) -> Tensor:
        """Return the weights (or sums) that workers pull, flat."""
        return self._rule.values

    def spans(self, pieces: Iterable[int]) -> list[tuple[int, int]]:
        """Return the positions of pieces in a vector of gradients: (start, stop), in elements.

        Args:
            pieces: numbers of the pieces.
        """
        return [self.init.shard.rooms[number] for number in pieces]

    # -- gradients ------------------------------------------------------------------------------------------------

    def decode(self, push: Push, inbox: Tensor) -> Gradient:
        """Return the gradient in a worker's vector.

        Args:
            push: description of the gradient.
            inbox: vector from the worker.
        """
        shard = self.init.shard
        dense = inbox[: shard.dense]
        if self._codec is not None and not push.empty:
            dense = self._codec.decode(inbox.view(torch.uint8), len(dense), push.scale, inbox.dtype)
        for start, stop in self.spans(push.missing):
            dense[start:stop].zero_()  # this piece was not sent
        rows = {number: shard.rows_in(inbox, number, count) for number, count in push.rows.items()}
        return Gradient(dense, push.missing, rows)

    def compensate(self, worker: int, gradient: Gradient, staleness: int) -> Gradient:
        """Return a gradient with delay compensation, if enabled.

        Args:
            worker: number of the worker that has computed it.
            gradient: the worker's gradient.
            staleness: staleness in updates.
        """
        return self._correction(gradient, self._replies.seen.get(worker, self.values), self.values, staleness)

    def compress_sum(self, vectors: list[Tensor], missing: frozenset[int]) -> None:
        """Compress a sum in place in the vectors of all workers, if workers step and replies are compressed.

        Args:
            vectors: vectors of all workers, each with the sum.
            missing: numbers of the pieces without a gradient.
        """
        if self.sums:
            self._replies.compress_sum(vectors, self.spans(missing))

    # -- updates --------------------------------------------------------------------------------------------------

    def update(
        self, gradient: Gradient, groups: Groups | None, samples: Iterable[Span], factor: float = 1.0
    ) -> None:  # fmt: skip
        """Make an update.

        Args:
            gradient: gradient of this part.
            groups: hyperparameters of the workers; None for no change.
            samples: samples of the gradient; see `Push`.
            factor: fraction of the weights' change to apply.
        """
        self._rule.update(gradient, groups, factor)
        self.samples.add(samples)
        self.version += 1
        self._counts.updates += 1
        if self._average is not None:
            self._average.follow(self.values, self.version - self.skipped)
        for table, rows in self._rule.moved_rows(gradient).items():
            self._replies.changed.note(table, rows, self.version)

    def skip_update(self, samples: Iterable[Span]) -> None:
        """Count a version without an update of the weights.

        Args:
            samples: samples without a gradient; see `Push`.
        """
        self.samples.add(samples)
        self.version += 1
        self.skipped += 1

    def keep_average(self, rule: AverageRule, step: int, values: Tensor, updates: int = 0) -> None:
        """Start a moving average of the weights, unless an average exists.

        Args:
            rule: decay of the average.
            step: weight updates of the run so far.
            values: present average, flat.
            updates: steps of the present average.
        """
        if self._average is None:
            self._average = FlatAverage(rule, step, self.version - self.skipped, values, updates)

    # -- replies --------------------------------------------------------------------------------------------------

    def reply(self, content: Any = None) -> Reply:
        """Return a reply with the counts of updates.

        Args:
            content: of the reply.
        """
        return Reply(self.version, self.trained, content)

    def send_values(self, worker: int, pull: Pull, inbox: Tensor, outbox: Tensor) -> Reply:
        """Write weights or a sum to a worker's vector; returns the reply.

        Args:
            worker: number of the worker.
            pull: the request.
            inbox: vector from the worker, with the ids of requested rows.
            outbox: vector to the worker.
        """
        reply = self._rule.reply(self._replies, worker, pull, inbox, outbox)
        reply.version, reply.trained, reply.skipped = self.version, self.trained, self.skipped
        return reply

    def set_weights_of(self, worker: int, weights: Tensor) -> None:
        """Record the weights that a worker has, to which its next compressed difference refers.

        Args:
            worker: number of the worker.
            weights: flat.
        """
        self._replies.seen[worker] = weights

    def forget_weights_of(self, worker: int) -> None:
        """Remove the record of a worker that has left.

        Args:
            worker: number of the worker.
        """
        self._replies.seen.pop(worker, None)

    def optimizers(self) -> ServerOptimizers | None:
        """Return the optimizers; None if workers step."""
        return self._rule.optimizers()

    @property
    def rule_state(self) -> RuleState:
        """Return the state of the update rule."""
        state, mean_square = self._rule.state(), self._correction.mean_square
        if mean_square is not None:
            state.tensors["mean_square"] = mean_square.new_zeros(len(self.values))
            state.tensors["mean_square"][: len(mean_square)] = mean_square
        return state

    @property
    def average(self) -> tuple[Tensor, int] | None:
        """Return the moving average of the weights, flat, and its steps; None without."""
        return None if self._average is None else (self._average.values, self._average.updates)

    @property
    def error_feedback(self) -> Tensor | None:
        """Return the error feedback of compressed sums; None without compression."""
        return self._replies.error_feedback
