"""Counts of messages between ranks, for the report of a hang."""

from __future__ import annotations

from fabricx.distributed.activity import heartbeat, message_counts
from fabricx.distributed.activity.collective_trace import GroupTrace
from fabricx.distributed.activity.message_counts import MessageCounts


def test_messages_are_counted_until_their_group_is_closed() -> None:
    counts = MessageCounts("gradients", [1, 3], "exchange")
    assert message_counts.traces() == (GroupTrace((1, 3), "gradients", {0: "exchange"}, ()),)
    counts.sent, counts.awaited = 4, 4
    assert message_counts.traces() == (GroupTrace((1, 3), "gradients", {4: "exchange"}, (4,)),)
    assert message_counts.traces()[0] in heartbeat.diagnosis().groups
    counts.close()
    assert message_counts.traces() == ()


def test_a_new_process_group_resets_the_message_counts() -> None:
    MessageCounts("gradients", [0, 1], "exchange")
    message_counts.forget()
    assert message_counts.traces() == ()
