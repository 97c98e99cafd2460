"""A worker's view of membership: the current generation of the process group, and its end after a death.

A process group that has lost a member is unusable, and gloo's collectives wait for the dead member. The supervisor
detects each death and notifies all workers, which then end the group's pending collectives (`group_connections.py`).
The supervisor announces the next generation when its members are complete.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, final

from fabricx.distributed.membership.group_connections import GroupConnections
from fabricx.errors import PeerLost

SAVING: Final = "saving"  # store key: path and step of a user's checkpoint that is being written, as JSON


class WorkerMessage(StrEnum):
    """Messages of a worker to the supervisor about recovery in place, with their content."""

    CAN_RECOVER = "can recover"  # None: the worker can join another generation from now on
    CANNOT_RECOVER = "cannot recover"  # None: its training has ended
    READY = "ready"  # None: a replacement waits to join
    SIZE_FIXED = "size fixed"  # (reason, whether replacements may join): the number of workers can't change
    LINKS_CUT = "links cut"  # (generation, error): the worker has lost connections of its group
    REPEAT = "repeat"  # (generation, reason): the worker requests a new generation
    LEFT = "left"  # generation: the worker has left it
    STEP = "step"  # (generation, step): the worker trains; and its first step that is further than all before


@dataclass(frozen=True)
class Generation:
    """The members of a process group.

    Attributes:
        number: counted from 0.
        workers: worker numbers by rank. A worker keeps its number when its rank changes.
        replacements: for each replacement that may lack restored state, the workers that it replaces, newest first.
        departed: vacant ranks whose state the present members may lack: (first generation without a worker, the workers
            that had the rank, newest first).
        whole: all members of the previous generation are alive.
        failures: descriptions of all failures of the run.
        settled: newest generation in which a worker has started to train, so that all members had restored its state.
    """

    number: int
    workers: tuple[int, ...]
    replacements: dict[int, tuple[int, ...]] = field(default_factory=dict)
    departed: tuple[tuple[int, tuple[int, ...]], ...] = ()
    whole: bool = False
    failures: tuple[str, ...] = ()
    settled: int = 0


@final
class Membership:
    """State of this worker's membership, shared by the main thread and the thread that receives from the supervisor.

    Args:
        worker, folder, leave, slot: see Attributes.
        send: sends a message (kind, content) to the supervisor; None without a supervisor.

    Attributes:
        worker: this worker's number.
        folder: folder for records that other workers need after a death; "" if no process outlives the workers.
        leave: ends this process when the run does not need it any more.
        slot: number of this worker's in-memory checkpoints in the folder, if it differs from the worker number.
    """

    def __init__(
        self, worker: int = 0, folder: str = "", send: Callable[[str, Any], None] | None = None,
        leave: Callable[[], None] = lambda: None, slot: int | None = None,
    ) -> None:  # fmt: skip
        self.worker, self.folder, self.leave, self.slot = worker, folder, leave, slot
        self._send = send
        self._newest = Generation(-1, ())  # before the supervisor has announced a generation
        self._broken = -1
        self._connections: GroupConnections | None = None  # None while this worker has no group
        self._left: list[GroupConnections] = []  # of groups that other workers may not have left yet
        self._current = -1  # generation that owns `_connections`
        self._news = threading.Condition()
        self._died: set[int] = set()
        self._on_death: Callable[[int], None] = lambda worker: None

    @property
    def changes(self) -> bool:
        """Return whether a supervisor forms a new generation when a worker dies."""
        return self._send is not None

    # -- called by the main thread ------------------------------------------------------------------------------------

    def send(self, kind: str, content: Any = None) -> None:
        """Send a message to the supervisor, if there is one.

        Args:
            kind: a `WorkerMessage`, or a message of `launch/worker.py`.
            content: can be pickled.
        """
        if self._send is not None:
            self._send(kind, content)

    def building(self, number: int, store: Any, *, silent: bool = False) -> None:
        """Prepare for building the group of a generation.

        Args:
            number: number of the generation.
            store: connections to it are not shut down with the group's.
            silent: aborted collectives end without an error, so the groups have to be aborted explicitly.
        """
        self._connections = None  # the receiving thread compares `_current`, and must not shut links of the new group
        self._current = number
        self._connections = GroupConnections(store, silent)

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Assign connections that are opened inside this context to this generation's groups."""
        connections = self._connections
        if connections is not None:
            connections.opening()
        try:
            yield
        finally:
            if connections is not None:
                connections.opened()

    def shut(self) -> None:
        """End the pending operations of this worker's group before it leaves; the supervisor informs other members."""
        connections, self._connections = self._connections, None
        if connections is not None:
            connections.interrupt()
            self._left.append(connections)

    def release(self) -> None:
        """Release the connections of groups that all workers have left."""
        for connections in self._left:
            connections.release()
        self._left.clear()

    def outdated(self, number: int) -> bool:
        """Return whether a generation is over, or about to end.

        Args:
            number: number of the generation.
        """
        return self._broken >= number or self._newest.number > number

    def is_broken(self, number: int) -> bool:
        """Return whether a worker of a generation has died, or has left it. A worker that waits to join breaks nothing.

        Args:
            number: number of the generation.
        """
        return self._broken >= number

    def members(self, number: int, size: int) -> tuple[int, ...]:
        """Return the worker numbers of a generation by rank.

        Args:
            number: number of a generation that this worker belongs to.
            size: number of its ranks.
        """
        newest = self._newest
        return newest.workers if newest.number == number else tuple(range(size))

    def check(self, number: int) -> None:
        """Raise `PeerLost` if a worker of a generation has died, or has left it. Loops that wait for workers call it.

        Args:
            number: number of the generation.

        Raises:
            PeerLost: a worker has died, or has left the generation because workers join.
        """
        if self.is_broken(number):
            raise PeerLost("another worker has died, or has left the group so that workers can join")

    def stay(self, number: int) -> None:
        """Raise `PeerLost` if a generation is over, or about to end.

        Args:
            number: number of the generation.

        Raises:
            PeerLost: a worker has died, or a worker has joined.
        """
        if self.outdated(number):
            raise PeerLost("other workers have died or joined")

    def becomes_outdated(self, number: int, timeout: float) -> bool:
        """Wait until a generation is over or about to end; returns whether that happened in time.

        Args:
            number: number of the generation.
            timeout: maximum time to wait, in seconds.
        """
        with self._news:
            return self._news.wait_for(lambda: self.outdated(number), timeout)

    def newer_than(self, number: int) -> Generation:
        """Wait for a generation after the present one, for which a replacement may have to read its data first.

        The supervisor ends the run if none can begin, and this process ends with the supervisor.

        Args:
            number: number of the present generation.
        """
        with self._news:
            self._news.wait_for(lambda: self._newest.number > number)
            return self._newest

    # -- called by the receiving thread -------------------------------------------------------------------------------

    def on_message(self, kind: str, content: Any) -> None:
        """Process a message of the supervisor.

        Args:
            kind: "leave", "broken", "generation" or "died".
            content: for "broken" the number of the generation, for "generation" a `Generation`, for "died" the worker
                number.
        """
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
        """Register a callback for deaths, which is also called for each worker that has already died.

        Args:
            call: called with the worker number; used by parameter servers.
        """
        self._on_death = call
        for worker in sorted(self._died):
            call(worker)

    @property
    def joins(self) -> bool:
        """Return whether this worker builds a process group, and may wait for a dead worker until a time-out."""
        connections = self._connections
        return connections is not None and connections.opens

    def shut_broken(self) -> bool:
        """End the pending operations of a group that has lost a worker; returns whether to call this again."""
        connections = self._connections
        if connections is None:
            return False
        over = self._broken >= self._current or (connections.silent and self.outdated(self._current))
        if over:
            connections.interrupt()
        return over


_CURRENT = [Membership()]


def membership() -> Membership:
    """Return the membership of this process."""
    return _CURRENT[0]


def enter(membership: Membership) -> None:
    """Set the membership of this process.

    Args:
        membership: replaces the present one.
    """
    _CURRENT[0] = membership
