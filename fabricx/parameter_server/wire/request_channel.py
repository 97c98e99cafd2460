"""Requests to a server with exactly-once processing, also when the server restarts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor

from fabricx.parameter_server.wire.link import LINK_ERRORS, Link
from fabricx.parameter_server.wire.messages import Pull


@dataclass(slots=True)
class _Sent:
    """A message without a reply so far, with the byte ranges of its vector."""

    number: int
    message: Any
    spans: list[tuple[int, int]] = field(default_factory=list)


@final
class Channel:
    """Numbered messages over a link that is replaced when it ends.

    A reply confirms all messages up to its number. Later messages are sent again over a new link, and the server skips
    those that it has processed. The vector still contains their data, because it is not written between a message and
    the next reply.

    Args:
        link: the first link.
        reconnect: returns a new link with the vectors of an ended link; raises `ServerLost` if that is impossible.

    Attributes:
        inbox, outbox: vectors of the link.
    """

    def __init__(self, link: Link, reconnect: Callable[[Link], Link]) -> None:
        self._link, self._reconnect = link, reconnect
        self.inbox: Tensor = link.inbox
        self.outbox: Tensor = link.outbox
        self._number = 0
        self._posted: list[tuple[int, int]] = []  # since the newest message
        self._unanswered: list[_Sent] = []
        self._traffic = (0, 0)  # bytes of earlier links
        self._arrived: Callable[[int], None] | None = None

    @property
    def traffic(self) -> tuple[int, int]:
        """Return the bytes of vectors (sent, received)."""
        return self._traffic[0] + self._link.sent, self._traffic[1] + self._link.received

    @property
    def arrived(self) -> Callable[[int], None] | None:
        """Return the callback for parts that are received before their message; see `Link.arrived`."""
        return self._arrived

    @arrived.setter
    def arrived(self, call: Callable[[int], None] | None) -> None:
        self._arrived = self._link.arrived = call

    def post(self, start: int, stop: int) -> None:
        """Send the bytes [start, stop) of the outbox with the next message.

        Args:
            start, stop: positions in bytes.
        """
        self._posted.append((start, stop))
        try:
            self._link.post(start, stop)
        except LINK_ERRORS:
            self._send_again()

    def send(self, message: Any) -> None:
        """Send a message after all posted bytes.

        Args:
            message: can be pickled.
        """
        self._number += 1
        posted, self._posted = self._posted, []
        self._unanswered.append(_Sent(self._number, message, posted))
        try:
            self._link.send((self._number, message))
        except LINK_ERRORS:
            self._send_again()

    def recv(self) -> Any:
        """Wait for the next reply."""
        while True:
            try:
                number, answer = self._link.recv()
            except LINK_ERRORS:
                self._send_again()
                continue
            self._unanswered = [sent for sent in self._unanswered if sent.number > number]
            return answer

    def _send_again(self) -> None:
        """Replace the link, and send all messages that the server may not have processed."""
        while True:
            previous = self._link
            self._link = self._reconnect(previous)
            self._link.arrived = self._arrived
            self._traffic = self._traffic[0] + previous.sent, self._traffic[1] + previous.received
            previous.close()
            try:
                for sent in self._unanswered:
                    self._post_all(sent.spans)
                    if isinstance(sent.message, Pull):
                        sent.message.whole = True  # a difference may refer to a reply that was lost
                    self._link.send((sent.number, sent.message))
                self._post_all(self._posted)
            except LINK_ERRORS:
                continue
            return

    def _post_all(self, spans: list[tuple[int, int]]) -> None:
        for start, stop in spans:
            self._link.post(start, stop)

    def close(self, *, done: bool) -> None:
        """Close the link.

        Args:
            done: this worker does not need the server any more.
        """
        try:
            if done:
                self._link.send(None)
        except LINK_ERRORS:
            pass
        finally:
            self._link.close()
