"""A worker's view of membership: the current generation of the process group, and its end after a death.

A process group that has lost a member is unusable, and gloo's collectives wait for the dead member. The supervisor
detects each death and notifies all workers. This module then shuts down the connections of the group, so that every
pending collective fails at once. The supervisor announces the next generation when its members are complete.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, final

SAVING: Final = "saving"  # key of the store: path and step of a checkpoint of the user's being written, as JSON


@dataclass(frozen=True)
class Generation:
    """The members of a process group.

    Attributes:
        number: counted from 0.
        workers: worker numbers by rank. A worker keeps its number when its rank changes.
        heirs: for each replacement that may not have taken over state yet, the workers that it replaces, newest first.
        gone: empty places whose state the present members may lack: (first generation without a worker, the workers
            that had the place, newest first).
        whole: all members of the previous generation are alive.
        failures: descriptions of all failures of the run.
        settled: newest generation in which a worker has started to train, so that all members had taken over its state.
    """

    number: int
    workers: tuple[int, ...]
    heirs: dict[int, tuple[int, ...]] = field(default_factory=dict)
    gone: tuple[tuple[int, tuple[int, ...]], ...] = ()
    whole: bool = False
    failures: tuple[str, ...] = ()
    settled: int = 0


class PeerLost(RuntimeError):
    """A worker of the process group has died."""


def gone(worker: int) -> str:
    """Return the key of the store that the supervisor sets when a worker dies before it has returned its result."""
    return f"gone/{worker}"


@final
class _Sockets:
    """The connections that process groups open: what there is after they were built and wasn't before.

    Args:
        store: connections to it aren't a group's.
        silent: the groups have links of their own, which don't end with sockets; they have to be aborted.
    """

    def __init__(self, store: Any, silent: bool) -> None:
        self._store = store
        self.silent = silent
        self._aborted: set[int] = set()
        self._own: set[str] = set()
        self._before: set[str] | None = None

    def opening(self) -> None:
        """Let sockets that are opened from now on be a group's."""
        self._before = set(_open_sockets())

    def opened(self) -> None:
        """Let sockets that are opened from now on be others'."""
        if self._before is not None:
            self._own |= set(_open_sockets()) - self._before
        self._before = None

    def shut(self) -> None:
        """End all connections; never a socket that listens, at which gloo would end the process."""
        if self.silent:
            _abort(self._aborted)
        for name, number in _open_sockets().items():
            before = self._before
            if name not in self._own and (before is None or name in before):
                continue
            try:
                with socket.socket(fileno=os.dup(number)) as link:
                    peer, internet = link.getpeername(), link.family in (socket.AF_INET, socket.AF_INET6)
                    # Asked for now: the address is known once the store has a connection.
                    store = getattr(self._store, "port" if internet else "peer", None)
                    if (peer[1] if internet else peer) != store:
                        link.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it isn't connected, or is closed by now


def _abort(aborted: set[int]) -> None:
    """Abort this process's groups, but for those that were already: who waits for one gets a result, of anything.

    In one go, since else each abort would wait for what another group has begun (pytorch/pytorch#119797).
    """
    import torch
    from torch.distributed import distributed_c10d as c10d

    names = dict(c10d._world.pg_names)
    groups = sorted((group for group in names if id(group) not in aborted), key=lambda one: names[one], reverse=True)
    aborted.update(map(id, groups))
    found: list[Any] = []
    with contextlib.suppress(RuntimeError):  # a group has none, or is being built
        found = [group._get_backend(torch.device("cuda")) for group in groups[:1] if c10d.is_nccl_available()]
    for nccl in found:
        nccl._group_start()
    for group in groups:
        with contextlib.suppress(RuntimeError):
            group.abort()
    for nccl in found:
        nccl._group_end()


def _open_sockets() -> dict[str, int]:
    """Return this process's sockets, by a name that no other socket of the machine has; Linux only, else none."""
    found = {}
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            name = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if name.startswith("socket:"):
            found[name] = int(number)
    return found


@final
class Membership:
    """What this worker knows of its generation; the thread that hears the supervisor tells it.

    Attributes:
        worker: this worker's number.
        folder: where workers leave what others need if they die; "" where nothing outlives them.
        leave: ends this process, which the others don't need any more.
        slot: under which this worker's copies are in the folder, if not under its number.
    """

    def __init__(
        self, worker: int = 0, folder: str = "", say: Callable[[str, Any], None] | None = None,
        leave: Callable[[], None] = lambda: None, slot: int | None = None,
    ) -> None:  # fmt: skip
        self.worker, self.folder, self.leave, self.slot = worker, folder, leave, slot
        self._say = say
        self._newest: Generation | None = None
        self._broken = -1
        self._sockets: _Sockets | None = None
        self._current = -1  # whose sockets those are
        self._news = threading.Condition()
        self._died: set[int] = set()
        self._on_death: Callable[[int], None] = lambda worker: None

    @property
    def changes(self) -> bool:
        """Return whether there is a supervisor that lets others go on when one dies."""
        return self._say is not None

    # -- what the main thread asks ----------------------------------------------------------------------------------

    def say(self, kind: str, content: Any = None) -> None:
        """Tell the supervisor something, if there is one that listens."""
        if self._say is not None:
            self._say(kind, content)

    def building(self, number: int, store: Any, *, silent: bool = False) -> None:
        """Note that the group of a generation is about to be built; one that is silent has to be aborted."""
        self._sockets, self._current = _Sockets(store, silent), number

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Let connections that are opened inside be those of this generation's groups."""
        sockets = self._sockets
        if sockets is not None:
            sockets.opening()
        try:
            yield
        finally:
            if sockets is not None:
                sockets.opened()

    def shut(self) -> None:
        """Shut the links of this worker's group: it has done with it, and the others have to notice."""
        sockets, self._sockets = self._sockets, None
        if sockets is not None:
            sockets.shut()

    def outdated(self, number: int) -> bool:
        """Return whether there is, or will be, a newer generation than this one."""
        return self._broken >= number or (self._newest is not None and self._newest.number > number)

    def members(self, number: int, size: int) -> tuple[int, ...]:
        """Return the workers of the generation that this one is in, by rank; those of the first are their numbers."""
        newest = self._newest
        return newest.workers if newest is not None and newest.number == number else tuple(range(size))

    def check(self, number: int) -> None:
        """Raise an error if a generation has lost somebody."""
        if self._broken >= number:
            raise PeerLost("another worker is gone")

    def stay(self, number: int) -> None:
        """Raise an error if a generation is, or will be, followed by another one."""
        if self.outdated(number):
            raise PeerLost("others are gone, or have come")

    def becomes_outdated(self, number: int, timeout: float) -> bool:
        """Wait so many seconds for the news that there is a newer generation, or will be; returns whether it came."""
        with self._news:
            return self._news.wait_for(lambda: self.outdated(number), timeout)

    def newer_than(self, number: int, timeout: float) -> Generation:
        """Wait for the next generation.

        Raises:
            Broken: there is none after so many seconds.
        """
        with self._news:
            self._news.wait_for(lambda: self._newest is not None and self._newest.number > number, timeout)
            if self._newest is None or self._newest.number <= number:
                raise PeerLost(f"no new generation after {timeout:g} s")
            return self._newest

    # -- what the listening thread does -----------------------------------------------------------------------------

    def heard(self, kind: str, content: Any) -> None:
        """Take news from the supervisor."""
        if kind == "leave":
            self.leave()
        with self._news:
            if kind == "broken":
                self._broken = max(self._broken, content)
            elif kind == "generation":
                self._newest = content
            self._news.notify_all()
        if kind == "died":
            self._died.add(content)
            self._on_death(content)

    def watch_deaths(self, call: Callable[[int], None]) -> None:
        """Call a function with the number of each worker that has died, or dies; a server is told of those."""
        self._on_death = call
        for worker in sorted(self._died):
            call(worker)

    def shut_broken(self) -> bool:
        """Shut the links of a group that has lost somebody; returns whether more of them may be opened."""
        sockets = self._sockets
        if sockets is None or not (self._broken >= self._current or (sockets.silent and self.outdated(self._current))):
            return False  # others who leave without being lost end their links, and who waits for them notices
        sockets.shut()
        return True


_CURRENT = [Membership()]


def membership() -> Membership:
    """Return what this process knows of its generation."""
    return _CURRENT[0]


def enter(membership: Membership) -> None:
    """Let a membership be this process's."""
    _CURRENT[0] = membership
