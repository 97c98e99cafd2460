"""A process that an engine keeps on a machine between the starts of a run, and that runs the ranks of the machine."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, final

from fabricx.launch import preloaded

if TYPE_CHECKING:
    from fabricx.launch.launcher import Ended
    from fabricx.launch.ranks import Ranks

BEGIN_S: Final = 60.0  # longest time from the call of `run` until the ranks can receive signals


@final
class Machine:
    """Runs the ranks of this machine, for each start of a run.

    Ranks are forks of this process's fork server, which imports torch before this process does, on another core: a new
    machine is ready earlier. In-memory checkpoints end with this process.
    """

    def __init__(self) -> None:
        preloaded.start()
        self._ranks: Ranks | None = None  # None between two starts
        self._start = -1  # number of the newest start
        self._changed = threading.Condition()  # the methods are called in threads
        self._reserved: socket.socket | None = None  # has the port of `address`

    def begun(self) -> None:
        """Return when this process has started."""

    def address(self, host: Callable[[], str]) -> tuple[str, int]:
        """Return the address of this machine, and a port, which no other program receives until the end of `run`.

        Args:
            host: returns the address.
        """
        self._release()
        self._reserved = socket.socket()
        # A server with this option can listen at a port that is bound by a socket that does not listen.
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("", 0))
        return host(), int(self._reserved.getsockname()[1])

    def _release(self) -> None:
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

    def run(self, start: int, job: bytes, variables: Sequence[Mapping[str, str]]) -> Ended:
        """Run the ranks, and wait for their end.

        Args:
            start: number of the start, which increases.
            job: their work.
            variables: environment variables of each rank.
        """
        from fabricx.fault_tolerance import memory_holder  # local imports: they import torch
        from fabricx.launch.ranks import Ranks

        ranks = Ranks(job, variables, forks=True, copies=memory_holder.folder_of(0, os.getpid()))
        self._set(start, ranks)
        try:
            return ranks.run()
        finally:
            self._set(start, None)
            self._release()

    def signal(self, start: int, number: int) -> None:
        """Pass a signal on to the ranks; does nothing if they have ended.

        Args:
            start: number of their start.
            number: number of the signal.
        """
        if (ranks := self._ranks_of(start)) is not None:
            ranks.signal(signal.Signals(number))

    def end(self, start: int) -> None:
        """End `run`, which kills the ranks that are left; does nothing if it has ended.

        Args:
            start: number of the start.
        """
        if (ranks := self._ranks_of(start)) is not None:
            ranks.end()

    def _set(self, start: int, ranks: Ranks | None) -> None:
        with self._changed:
            self._start, self._ranks = start, ranks
            self._changed.notify_all()

    def _ranks_of(self, start: int) -> Ranks | None:
        """Return the ranks of a start, after a wait for it; None if they have ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._start >= start, BEGIN_S)
            return self._ranks if self._start == start else None
