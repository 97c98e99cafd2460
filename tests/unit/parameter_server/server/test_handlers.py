"""The table of a server's messages: each message of a worker has a handler, any other message is an error."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

import pytest
import torch

from fabricx.core.strategy_support.averaging import AverageRule
from fabricx.parameter_server.server.handlers import HANDLERS, READABLE
from fabricx.parameter_server.server.server import Server
from fabricx.parameter_server.wire import messages
from fabricx.parameter_server.wire.messages import (
    CloseSection,
    OpenSection,
    Pull,
    Push,
    ReadNorm,
    ReadState,
    RequestLease,
    ServerInit,
    TakeTurn,
)
from tests.unit.parameter_server.server.test_server import SIZE, begin

NONE = torch.empty(0)
REPLIES = {messages.Reply, messages.LeaseReply, messages.PushReply}
PARTS = {messages.Settings, messages.Counts, messages.RuleState}  # of messages


@dataclass
class Unknown:
    """Not a message of a worker."""


def begun(**settings: Any) -> Server:
    server, (start, _) = Server(2), begin(workers=2, **settings)
    server.handle(0, start, NONE, NONE)
    return server


def test_each_message_has_a_handler() -> None:
    kinds = {kind for _, kind in inspect.getmembers(messages, dataclasses.is_dataclass)}
    sent = {kind for kind in kinds if kind.__module__ == messages.__name__} - REPLIES - PARTS
    assert set(HANDLERS) == sent
    assert all(handler.kind is kind for kind, handler in HANDLERS.items())


@pytest.mark.parametrize("server", [Server(1), begun()], ids=["new", "begun"])
def test_an_unknown_message_is_an_error_and_waits_for_nothing(server: Server) -> None:
    for act in (
        lambda: server.ready(0, Unknown()),
        lambda: server.handle(0, Unknown(), NONE, NONE),
        lambda: server.handle_once(0, 1, Unknown(), NONE, NONE),
    ):
        with pytest.raises(TypeError, match="a server does not support messages of type Unknown"):
            act()


def test_all_other_messages_wait_for_the_begin_message() -> None:
    server, (start, _) = Server(2), begin(workers=2)
    waiting = [
        Pull(),
        Push(0, 1, (0,)),
        RequestLease(0, True),
        OpenSection(0, 1),
        CloseSection(0),
        ReadState("counts"),
        TakeTurn(),
        ReadNorm(0, []),
    ]
    assert not any(server.ready(1, message) for message in waiting)
    assert server.ready(1, start)
    server.handle(1, start, NONE, NONE)
    assert server.ready(1, Pull())


def test_other_state_is_sent_under_each_name_of_the_message() -> None:
    names = get_args(get_type_hints(ReadState)["name"])
    assert set(READABLE) == set(names)
    server = begun(aggregate=False)
    content = {name: server.handle(0, ReadState(name), NONE, NONE).content for name in names}
    assert torch.equal(content["weights"], server.values)
    assert content["counts"] is server.counts
    assert content["average"] is content["error_feedback"] is None
    assert content["rule"] == messages.RuleState({})
    assert content["logged"] == {}


def test_an_average_goes_on_from_its_steps() -> None:
    server = begun(aggregate=False)
    server.handle(0, messages.StartAverage(AverageRule(0.5), 3, server.values.clone(), updates=7), NONE, NONE)
    assert server.handle(0, ReadState("average"), NONE, NONE).content[1] == 7


def test_read_only_messages_are_processed_again_and_not_replayed() -> None:
    repeatable = {kind for kind, handler in HANDLERS.items() if handler.repeatable}
    assert repeatable == {Pull, ReadNorm, ReadState}
    assert HANDLERS[Pull].journaled(Pull())
    assert not HANDLERS[Pull].journaled(Pull(dense=False, rows={0: 1}))  # only rows: no effect on the state
    journaled = {kind for kind in set(HANDLERS) - {Pull} if HANDLERS[kind].journaled(None)}
    assert journaled == set(HANDLERS) - {Pull, ServerInit, ReadNorm, ReadState}


def test_updates_that_are_not_stored_have_no_norm() -> None:
    server = begun(aggregate=False)
    server.handle(0, Push(0, 1, (0,)), torch.zeros(SIZE), NONE)
    assert not server.ready(0, ReadNorm(5, [0]))  # indefinitely: no such update is stored
    with pytest.raises(TypeError, match="EachGradient holds no updates"):
        server.handle(0, ReadNorm(5, [0]), NONE, NONE)
