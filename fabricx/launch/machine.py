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
    from fabricx.launch.launcher import Ended, Program
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
        self._start = -1  # number of the start of `_ranks`
        self._newest = -1  # number of the newest start that was requested
        self._program: Program | None = None  # of that start
        self._ended: Ended | None = None  # the end of its ranks
        self._changed = threading.Condition()  # the methods are called in threads
        self._running = threading.Lock()  # the ranks of one start at a time
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

    def run(self, start: int, program: Program, variables: Sequence[Mapping[str, str]]) -> Ended:
        """Run the ranks, and wait for their end. A newer start ends the ranks of an earlier start.

        Args:
            start: number of the start, which increases.
            program: their work.
            variables: environment variables of each rank.
        """
        from fabricx.fault_tolerance import memory_holder  # local imports: they import torch
        from fabricx.launch.ranks import Ranks

        with self._changed:
            if start <= self._newest:  # a late request of a process that has died
                return _nothing()
            self._newest, self._ended = start, None
            self._program = program if program.run_dir else None
            if self._ranks is not None:
                self._ranks.end()
        ended = _nothing()
        with self._running:
            ranks = Ranks(program.job, variables, forks=True, copies=memory_holder.folder_of(0, os.getpid()))
            self._set(start, ranks)
            try:
                ended = ranks.run()
            finally:
                self._set(start, None, ended)
                self._release()
        return ended

    def newest(self) -> int:
        """Return the number of the newest start; -1 without."""
        return self._newest

    def program(self) -> Program | None:
        """Return the program of the newest start; None without, or if the run does not recover."""
        return self._program

    def ended(self, start: int) -> Ended:
        """Return the end of the ranks of a start after a wait for it, as `run` does, for another caller.

        Args:
            start: number of the start.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._newest != start or self._ended is not None)
            return _nothing() if self._ended is None or self._newest != start else self._ended

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

    def _set(self, start: int, ranks: Ranks | None, ended: Ended | None = None) -> None:
        with self._changed:
            self._start, self._ranks = start, ranks
            if self._newest == start and self._program is not None:
                self._ended = ended
            self._changed.notify_all()

    def _ranks_of(self, start: int) -> Ranks | None:
        """Return the ranks of a start, after a wait for it; None if they have ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._start >= start, BEGIN_S)
            return self._ranks if self._start == start else None


def _nothing() -> Ended:
    """Return the end of ranks that have neither a result nor a failure."""
    from fabricx.launch.launcher import Ended  # imports torch

    return Ended()
