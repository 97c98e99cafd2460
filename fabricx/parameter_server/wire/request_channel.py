"""Requests to one server with exactly-once handling, also when the server restarts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor

from fabricx.parameter_server.wire.channel import LOST, Link
from fabricx.parameter_server.wire.messages import Pull


@dataclass(slots=True)
class _Sent:
    """A message to which there is no answer yet, and the bytes of the vector that belong to it."""

    number: int
    message: Any
    spans: list[tuple[int, int]] = field(default_factory=list)


@final
class Channel:
    """Numbered messages over a link that is replaced when it ends.

    An answer shows that all messages up to its own were handled. Later ones are sent again over a new link, and the
    server skips those that it knows. The vector holds what was sent with them, because nothing is written to it
    between a message and the next answer.

    Args:
        link: the first link.
        reconnect: returns a link with the vectors of one that has ended; raises `ServerLost` if there is none.
    """

    def __init__(self, link: Link, reconnect: Callable[[Link], Link]) -> None:
        self._link, self._reconnect = link, reconnect
        self.inbox: Tensor = link.inbox
        self.outbox: Tensor = link.outbox
        self._number = 0
        self._posted: list[tuple[int, int]] = []  # since the newest message
        self._unanswered: list[_Sent] = []
        self._traffic = (0, 0)  # of links before this one
        self._arrived: Callable[[int], None] | None = None

    @property
    def traffic(self) -> tuple[int, int]:
        """Return the bytes of vectors that were sent and received."""
        return self._traffic[0] + self._link.sent, self._traffic[1] + self._link.received

    @property
    def arrived(self) -> Callable[[int], None] | None:
        """Return what is called with the last byte of each part that comes before its message."""
        return self._arrived

    @arrived.setter
    def arrived(self, call: Callable[[int], None] | None) -> None:
        self._arrived = self._link.arrived = call

    def post(self, start: int, stop: int) -> None:
        """Send the bytes [start, stop) of the outbox with the next message."""
        self._posted.append((start, stop))
        try:
            self._link.post(start, stop)
        except LOST:
            self._send_again()

    def send(self, message: Any) -> None:
        """Send a message after all bytes that were posted."""
        self._number += 1
        posted, self._posted = self._posted, []
        self._unanswered.append(_Sent(self._number, message, posted))
        try:
            self._link.send((self._number, message))
        except LOST:
            self._send_again()

    def recv(self) -> Any:
        """Wait for the next answer."""
        while True:
            try:
                number, answer = self._link.recv()
            except LOST:
                self._send_again()
                continue
            self._unanswered = [sent for sent in self._unanswered if sent.number > number]
            return answer

    def _send_again(self) -> None:
        """Replace the link, and send what the server may not have handled."""
        while True:
            before = self._link
            self._link = self._reconnect(before)
            self._link.arrived = self._arrived
            self._traffic = self._traffic[0] + before.sent, self._traffic[1] + before.received
            before.close()
            try:
                for sent in self._unanswered:
                    self._post_all(sent.spans)
                    if isinstance(sent.message, Pull):
                        sent.message.whole = True  # the server may have counted on an answer that was lost
                    self._link.send((sent.number, sent.message))
                self._post_all(self._posted)
            except LOST:
                continue
            return

    def _post_all(self, spans: list[tuple[int, int]]) -> None:
        for start, stop in spans:
            self._link.post(start, stop)

    def close(self, *, done: bool) -> None:
        """Leave the server; with `done`, this worker needs it no more."""
        try:
            if done:
                self._link.send(None)
        except LOST:
            pass
        finally:
            self._link.close()
