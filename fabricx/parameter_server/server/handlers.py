"""The table of messages that a server supports: when a message can be processed, and the reaction to it.

A function with a parameter `worker` is a condition (`Handler.ready`). A function with a parameter `sender` is a
reaction (`Handler.handle`), which returns the reply. Their arguments:

- `state`: state of this server.
- `worker`: number of the worker whose message waits for the condition.
- `sender`: the worker of the message, and its vectors.
- `message`: the message; its class in `wire/messages.py` describes the fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from torch import Tensor

from fabricx.parameter_server.server.aggregation import Part
from fabricx.parameter_server.server.state import ServerState
from fabricx.parameter_server.wire.messages import (
    ApplyUpdate,
    CloseSection,
    LeaseReply,
    LeaveSection,
    OpenSection,
    Pull,
    Push,
    PushReply,
    ReadNorm,
    ReadState,
    Reply,
    RequestLease,
    ServerInit,
    SetReceivedWeights,
    StartAverage,
    TakeTurn,
)

M = TypeVar("M")
Answer = Reply | PushReply | LeaseReply | None  # None: the message has no reply


@dataclass(slots=True)
class Sender:
    """The sender of a message.

    Attributes:
        worker: number of the worker.
        inbox: vector from the worker, flat.
        outbox: vector to the worker, flat, in which the reply to a `Pull` is written.
    """

    worker: int
    inbox: Tensor
    outbox: Tensor


@dataclass(frozen=True)
class Handler:
    """Reaction of a server to a type of messages; `handles` checks the types of its functions.

    Attributes:
        kind: type of the messages.
        handle: called with the state, the sender and a message that is ready; processes the message and returns the
            reply, None without a reply.
        ready: called with the state, the number of a worker and its message; returns whether the message can be
            processed now. Until then the worker waits.
        repeatable: a message may be processed again when it is sent again; the replies to other messages are kept.
        journaled: whether a message must be replayed to restore the state.
    """

    kind: type[Any]
    handle: Callable[[ServerState, Sender, Any], Answer]
    ready: Callable[[ServerState, int, Any], bool]
    repeatable: bool
    journaled: Callable[[Any], bool]


def handles(
    kind: type[M], handle: Callable[[ServerState, Sender, M], Answer],
    ready: Callable[[ServerState, int, M], bool] = lambda state, worker, message: True,
    *, repeatable: bool = False, journaled: Callable[[M], bool] = lambda message: True,
) -> Handler:  # fmt: skip
    """Return an entry of the table; by default, a message never waits.

    Args:
        kind, handle, ready, repeatable, journaled: see `Handler`.
    """
    return Handler(kind, handle, ready, repeatable, journaled)


# -- weights and gradients --------------------------------------------------------------------------------------------


def init_server(state: ServerState, sender: Sender, message: ServerInit) -> Reply:
    """Initialise this server with the weights and optimizers of the first worker; reply with the counts of updates."""
    state.initialise(message)
    return state.shard.reply()


def may_pull(state: ServerState, worker: int, message: Pull) -> bool:
    """Return whether the requested version exists, and whether the staleness bound admits one more computing worker."""
    may_begin = not message.to_train or state.order.may_begin(worker)
    return state.shard.version >= message.version and may_begin


def pull(state: ServerState, sender: Sender, message: Pull) -> Reply:
    """Write the weights, or the newest sum of gradients, to the sender's vector."""
    if message.to_train:
        state.order.record_pull(sender.worker, state.shard.version)
    return state.shard.send_values(sender.worker, message, sender.inbox, sender.outbox)


def may_push(state: ServerState, worker: int, message: Push) -> bool:
    """Return whether an update keeps the staleness of other workers within its bound."""
    return state.order.may_push(worker, state.shard.version)


def push(state: ServerState, sender: Sender, message: Push) -> PushReply | None:
    """Add a gradient to an update, unless it is too late, or the sender no longer holds the leases of the gradient."""
    worker, ledger = sender.worker, state.ledger
    in_order = state.order.has_place(worker)
    base = state.order.record_push(worker)  # ends the worker's place in the order
    used = not ledger.is_leased or ledger.accepts(worker, message.leases, in_order=in_order)
    if used:
        gradient = state.shard.decode(message, sender.inbox)
        part = Part(worker, message, gradient, state.shard.version if base is None else base, sender.outbox)
        used = state.updates.add(part)
    state.counts.dropped += not used
    if message.logged is not None:
        ledger.logged.add(worker, message.logged, used=used)
    return PushReply(used) if message.confirm else None


def may_take_turn(state: ServerState, worker: int, message: TakeTurn) -> bool:
    """Return whether this worker's update may be the next."""
    return state.order.may_take_turn(worker, state.shard.version)


def take_turn(state: ServerState, sender: Sender, message: TakeTurn) -> Reply:
    """Reserve the next update for a worker, if its gradient would be used."""
    if has_place := state.order.has_place(sender.worker):
        state.order.take_turn(sender.worker)
    return state.shard.reply(has_place)


def is_held(state: ServerState, worker: int, message: ReadNorm | ApplyUpdate) -> bool:
    """Return whether all parts of an update have arrived, or the update was made before."""
    return state.shard.version > message.clock or state.updates.is_complete(message.clock)


def read_norm(state: ServerState, sender: Sender, message: ReadNorm) -> Reply:
    """Reply with the squared 2-norms of pieces of a held gradient."""
    gradient = state.updates.held(message.clock).dense
    squares = [float(gradient[start:stop].square().sum()) for start, stop in state.shard.spans(message.pieces)]
    return state.shard.reply(squares)


def apply_update(state: ServerState, sender: Sender, message: ApplyUpdate) -> None:
    """Make a held update when the last worker has sent this message, unless the update was made before."""
    if state.shard.version <= message.clock:
        state.updates.apply(sender.worker, message)


# -- leases -----------------------------------------------------------------------------------------------------------


def open_section(state: ServerState, sender: Sender, message: OpenSection) -> None:
    """Begin a section of the data, unless another worker has begun the same section."""
    state.open(message)


def may_request_lease(state: ServerState, worker: int, message: RequestLease) -> bool:
    """Return whether the reply is certain now: a lease is available, the section is over, or the worker won't wait."""
    leases = state.ledger.leases
    if message.section != leases.section or not message.wait:
        return True
    return leases.available(worker) or leases.over


def request_lease(state: ServerState, sender: Sender, message: RequestLease) -> LeaseReply:
    """Grant a lease of the section; after the section's end the reply says that it is over."""
    if message.section != state.ledger.leases.section:
        return LeaseReply(None, over=True)
    granted = state.ledger.grant(sender.worker)
    state.updates.update_without_late()
    return granted


def close_section(state: ServerState, sender: Sender, message: CloseSection) -> None:
    """End a section early, also before another worker begins it."""
    state.close(message.section)


def leave_section(state: ServerState, sender: Sender, message: LeaveSection) -> None:
    """Remove a worker that trains no more leases of the section, so that the staleness bound ignores it."""
    if message.section == state.ledger.leases.section:
        state.ledger.leases.remove_worker(sender.worker)


# -- other state ------------------------------------------------------------------------------------------------------


def set_received_weights(state: ServerState, sender: Sender, message: SetReceivedWeights) -> None:
    """Record the weights of the sender, to which its next compressed difference refers."""
    state.shard.set_weights_of(sender.worker, message.weights)


def start_average(state: ServerState, sender: Sender, message: StartAverage) -> Reply:
    """Start a moving average of the weights, unless an average exists."""
    state.shard.keep_average(message.rule, message.step, message.values, message.updates)
    return state.shard.reply()


def read_state(state: ServerState, sender: Sender, message: ReadState) -> Reply:
    """Reply with the state that the message names; see `READABLE`."""
    return state.shard.reply(READABLE[message.name](state, message))


READABLE: Final[Mapping[str, Callable[[ServerState, ReadState], Any]]] = {
    "optimizers": lambda state, message: state.shard.optimizers(),
    "rule": lambda state, message: state.shard.rule_state,
    "weights": lambda state, message: state.shard.values,
    "average": lambda state, message: state.shard.average,
    "error_feedback": lambda state, message: state.shard.error_feedback,
    "counts": lambda state, message: state.counts,
    "samples": lambda state, message: state.shard.samples,
    "logged": lambda state, message: state.ledger.logged.of(message.section),
}


class _Handlers(dict[type[Any], Handler]):
    def __missing__(self, kind: type[Any]) -> Handler:
        raise TypeError(f"a server does not support messages of type {kind.__name__}")


# Handlers by the type of the message; looking up another type raises TypeError.
HANDLERS: Final[Mapping[type[Any], Handler]] = _Handlers(
    {
        handler.kind: handler
        for handler in (
            handles(ServerInit, init_server, journaled=lambda message: False),  # a snapshot follows
            handles(Pull, pull, may_pull, repeatable=True, journaled=lambda message: message.dense),
            handles(Push, push, may_push),
            handles(TakeTurn, take_turn, may_take_turn),
            handles(ReadNorm, read_norm, is_held, repeatable=True, journaled=lambda message: False),
            handles(ApplyUpdate, apply_update, is_held),
            handles(OpenSection, open_section),
            handles(RequestLease, request_lease, may_request_lease),
            handles(CloseSection, close_section),
            handles(LeaveSection, leave_section),
            handles(SetReceivedWeights, set_received_weights),
            handles(StartAverage, start_average),
            handles(ReadState, read_state, repeatable=True, journaled=lambda message: False),
        )
    }
)
