"""Two network namespaces that a slow link connects: `tc netem` in a process, for kernels without it.

The link is a pair of TUN devices, whose packets this process reads, delays and writes. It needs root.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Final

ADDRESSES: Final = ("10.203.78.1", "10.203.78.2")
QUEUE_S: Final = 0.5  # packets that would wait longer for the link are dropped
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


class _Direction:
    """The packets on their way to an end of the link.

    Args:
        to: file descriptor of this end.
        delay_s: of each packet.
        rate: bytes a second.
    """

    def __init__(self, to: int, delay_s: float, rate: float) -> None:
        self._to, self._delay_s, self._rate = to, delay_s, rate
        self._free = 0.0  # time at which the link has sent all packets
        self._waiting = collections.deque[tuple[float, bytes]]()

    def send(self, packet: bytes, now: float) -> None:
        """Begin to send a packet."""
        begin = max(now, self._free)
        if begin - now < QUEUE_S:
            self._free = begin + len(packet) / self._rate
            self._waiting.append((self._free + self._delay_s, packet))

    def deliver(self, now: float) -> float:
        """Deliver the packets that have arrived; returns the time of the next."""
        while self._waiting and self._waiting[0][0] <= now:
            with contextlib.suppress(OSError):  # the namespace is deleted
                os.write(self._to, self._waiting.popleft()[1])
        return self._waiting[0][0] if self._waiting else float("inf")


@contextlib.contextmanager
def connected(delay_s: float, rate: float) -> Iterator[tuple[str, str]]:
    """Return a context with the names of two connected namespaces, with the addresses of `ADDRESSES`.

    Args:
        delay_s: delay of each packet, in one direction.
        rate: bytes a second, in each direction.
    """
    names = (f"slow{os.getpid()}a", f"slow{os.getpid()}b")
    ends: list[int] = []
    over = threading.Event()
    relay = threading.Thread(target=_relay, args=(ends, delay_s, rate, over))
    try:
        for name, address in zip(names, ADDRESSES, strict=True):
            ends.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
            fcntl.ioctl(ends[-1], _TUNSETIFF, struct.pack("16sH", f"{name}0".encode()[:15], _IFF_TUN | _IFF_NO_PI))
            _ip("netns", "add", name)
            _ip("link", "set", f"{name}0", "netns", name)
            _ip("-n", name, "address", "add", f"{address}/24", "dev", f"{name}0")
            _ip("-n", name, "link", "set", f"{name}0", "txqueuelen", "10000", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        relay.start()
        yield names
    finally:
        over.set()
        if relay.is_alive():
            relay.join()
        for end in ends:
            os.close(end)
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _relay(ends: list[int], delay_s: float, rate: float, over: threading.Event) -> None:
    away = {ends[0]: _Direction(ends[1], delay_s, rate), ends[1]: _Direction(ends[0], delay_s, rate)}
    following = float("inf")
    while not over.is_set():
        wait_s = min(0.2, max(0.0, following - time.monotonic()))
        for end in select.select(ends, [], [], wait_s)[0]:
            with contextlib.suppress(BlockingIOError):
                while True:
                    away[end].send(os.read(end, 65536), time.monotonic())
        now = time.monotonic()
        following = min(direction.deliver(now) for direction in away.values())


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, check=True, text=True)
