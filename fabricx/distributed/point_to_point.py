"""Tensors sent from one rank to another, with sends that do not wait."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, final

import torch.distributed as dist
from torch import Tensor

from fabricx.distributed.activity import collective_trace, heartbeat
from fabricx.distributed.activity.collective_trace import Route
from fabricx.distributed.membership.lost_peers import raise_peer_lost
from fabricx.distributed.messages.tensor_bytes import as_bytes
from fabricx.distributed.world import OPERATION, WAITED_S, World

Transfer = tuple[str, Route, int]  # "send" or "receive", route and number
CHANNELS: Final = ("forward", "backward", "forward wrap", "backward wrap")


def open_channels(everyone: World, parts: Sequence[Sequence[int]]) -> dict[str, dist.ProcessGroup]:
    """Build the process groups of `Transfers` for NCCL; all ranks of the run call it. Nothing is built for gloo.

    NCCL runs the operations of a group in the order of their calls. A rank that sends to a neighbour before it receives
    from it would wait for a neighbour that does the same, so each direction has a group of its own; and messages have
    no tags, so gradients do not share a group with activations.

    Args:
        everyone: all ranks of the run.
        parts: ranks of each pipeline; every rank is in exactly one part.
    """
    return {name: everyone.new_subgroup(parts) for name in CHANNELS} if everyone.silent else {}


@final
class Expected:
    """A tensor that is on its way from another rank.

    Args:
        tensor: written when `Transfers.complete` returns.
        work: torch's work handle; None for a tensor without elements.
        event: description for error messages and reports of a hang.
        transfer: the receive as `collective_trace` counts it; None for a tensor without elements.
    """

    def __init__(self, tensor: Tensor, work: Any, event: str, transfer: Transfer | None = None) -> None:
        self.tensor, self.work, self.event, self.transfer = tensor, work, event, transfer


@final
class Transfers:
    """Sends and receives between the ranks of a world; messages with the same channel and tag arrive in their order.

    Args:
        world: ranks that exchange tensors.
        channels: result of `open_channels`.
        timeout: maximum time of a transfer.

    Attributes:
        sent_bytes: bytes of all tensors that this rank has sent.

    Raises:
        ValueError: the backend is NCCL and there are no channels.
    """

    def __init__(
        self, world: World, channels: Mapping[str, dist.ProcessGroup] | None = None, timeout: timedelta = OPERATION
    ) -> None:  # fmt: skip
        if world.silent and world.size > 1 and not channels:
            raise ValueError("transfers by NCCL need groups of their own for each direction: pass open_channels(...)")
        self._world, self._channels, self._limit = world, dict(channels or {}), timeout
        self._sent: dict[int, tuple[Any, Tensor, str, Transfer]] = {}  # by number, in the order of the sends
        self._ranks = world.members
        self._number = 0
        self.sent_bytes = 0

    def begin_send(self, tensor: Tensor, to: int, channel: str, tag: int, event: str) -> int:
        """Begin to send a tensor; it must not be changed until the send has ended.

        Args:
            tensor: without a graph.
            to: rank.
            channel: channel of `CHANNELS`.
            tag: number of the kind of message.
            event: description for error messages and reports of a hang.

        Returns:
            number of the send, for `end_send`.

        Raises:
            PeerLost: the connection to the rank was lost.
        """
        self._number += 1
        if not tensor.numel():
            return self._number
        raw = as_bytes(tensor)
        self.sent_bytes += raw.numel() * raw.element_size()
        try:
            work = dist.isend(raw, group=self._group(channel), group_dst=to, tag=self._tag(tag))
        except RuntimeError as error:
            self._fail(error, event)
            raise
        route = Route(self._ranks[self._world.rank], self._ranks[to], channel, tag)
        self._sent[self._number] = work, raw, event, ("send", route, collective_trace.begins("send", route))
        return self._number

    def expect(self, tensor: Tensor, source: int, channel: str, tag: int, event: str) -> Expected:
        """Begin to receive a tensor.

        Args:
            tensor: contiguous, of the shape and dtype of the sent tensor.
            source: rank.
            channel: channel of `CHANNELS`.
            tag: same number as at the sender.
            event: description for error messages and reports of a hang.

        Raises:
            PeerLost: the connection to the rank was lost.
        """
        if not tensor.numel():
            return Expected(tensor, None, event)
        try:
            work = dist.irecv(as_bytes(tensor), group=self._group(channel), group_src=source, tag=self._tag(tag))
        except RuntimeError as error:
            self._fail(error, event)
            raise
        route = Route(self._ranks[source], self._ranks[self._world.rank], channel, tag)
        return Expected(tensor, work, event, ("receive", route, collective_trace.begins("receive", route)))

    def complete(self, expected: Expected) -> Tensor:
        """Wait for a tensor, and return it.

        Args:
            expected: result of `expect`.

        Raises:
            PeerLost: a rank has died, or the group was aborted.
            RuntimeError: the tensor was not received within the timeout.
        """
        if expected.work is not None:
            self._wait(expected.work, expected.event, expected.transfer)
        return expected.tensor

    def end_send(self, number: int) -> None:
        """Wait until a sent tensor was received, and release its memory.

        Args:
            number: result of `begin_send`.

        Raises:
            PeerLost: a rank has died, or the group was aborted.
            RuntimeError: the tensor was not received within the timeout.
        """
        if number in self._sent:
            work, _, event, transfer = self._sent[number]
            self._wait(work, event, transfer)
            del self._sent[number]

    def finish(self, newest: int = 0) -> None:
        """Wait until sent tensors were received; errors are those of `end_send`.

        Args:
            newest: number of sends that may still be under way.
        """
        for number in list(self._sent)[: max(len(self._sent) - newest, 0)]:
            self.end_send(number)

    @property
    def under_way(self) -> int:
        """Return the number of sends for which `finish` has not waited."""
        return len(self._sent)

    def _tag(self, tag: int) -> int:
        return 0 if self._world.silent else tag  # NCCL has no tags: the order of the messages has to suffice

    def _group(self, channel: str) -> dist.ProcessGroup | None:
        return self._channels.get(channel, self._world.group)

    def _wait(self, work: Any, event: str, transfer: Transfer | None) -> None:
        began = time.monotonic()
        heartbeat.waits_for(event)
        collective_trace.awaits(transfer)
        try:
            work.wait(self._limit)
        except Exception as error:
            self._fail(error, event)
            raise
        else:
            self._world.settle()
        finally:
            heartbeat.waits_for("")
            collective_trace.awaits(None)
            WAITED_S[0] += time.monotonic() - began

    def _fail(self, error: Exception, event: str) -> None:
        """Raise `PeerLost` if a rank was lost; after an abort, both the data and the error are meaningless."""
        self._world.settle()
        operation = f"rank {self._world.rank} of {self._world.size}, {event}"
        raise_peer_lost(error, operation)
        error.add_note(operation)
