"""Agree on one step boundary for an action of all ranks, such as a stop, without a collective on earlier steps."""

from __future__ import annotations

import contextlib
import threading
from typing import Final, final

from torch.distributed import DistError, Store

from fabricx.distributed.membership.deaths import Deaths
from fabricx.distributed.membership.generations import membership
from fabricx.distributed.messages.authentication import AuthenticationError
from fabricx.distributed.store.client import PrivateStore
from fabricx.distributed.world import World
from fabricx.errors import PeerLost

LOOK_S: Final = 0.5  # interval at which a rank that waits at a boundary checks whether all ranks exist
LONG_S: Final = 10.0  # longest wait without a supervisor, after which the wait is repeated
RETRY_S: Final = 0.2  # pause after a failed connection to the store
RETRIES: Final = 10  # failed connections in a row after which the store has ended
WATCH_S: Final = 3600.0  # longest wait for a request, after which the wait is repeated
STOP_KEY: Final = "stop/requested"  # set by the supervisor, which has received a signal; applies to all runs
SIGNALS: Final = ("interrupted", "terminated")  # reasons of requests that no minimum of steps delays


@final
class Agreement:
    """Requests an action on all ranks, and determines the boundary at which all ranks can perform it.

    Ranks pass the same boundaries in the same order, though not at the same time. A rank with a request publishes at
    each boundary that it wants to act, and waits until all ranks want to act at this boundary (then all do) or until a
    rank turns out to have passed it (then it continues to the next boundary, where that rank will want to act as well).
    Ranks that receive the request at the same boundary stop exactly at that boundary. A thread of each rank waits for
    requests, without polling, and publishes the boundary that its rank has passed; without a request, a boundary costs
    a few attribute accesses. An action costs each rank the same number of store requests for any number of ranks.

    Args:
        world: all ranks.
        name: name of the action; for "signal" the supervisor's request counts, too.
        beside: agreement on another action of the same world, whose thread also serves this agreement.

    Attributes:
        reason: reason of the request; None without a request.
    """

    def __init__(self, world: World, name: str, beside: Agreement | None = None) -> None:
        self.reason: str | None = None
        self._world, self._name = world, name
        self._passed = self._published = -1
        self._answered = False  # the position at the time of the request is published
        self._publishing = threading.RLock()  # reentrant: a signal handler may request
        self._watcher: _Watcher | None = None
        if world.size > 1:
            assert isinstance(world.store, PrivateStore)
            self._store, self._deaths = world.store, Deaths(world.store)
            if beside is not None:
                self._watcher = beside._watcher
            self._watcher = self._watcher or _Watcher(self._store, name)
            self._watcher.add(self)

    @property
    def alone(self) -> bool:
        """Return whether there is no other rank."""
        return self._watcher is None

    def forget(self, other: Agreement) -> None:
        """Stop to serve an agreement that shares this agreement's thread.

        Args:
            other: created with `beside=self`.
        """
        if self._watcher is not None:
            self._watcher.remove(other)

    def request(self, reason: str) -> None:
        """Request the action on all ranks; may be called from any thread or signal handler.

        Args:
            reason: text for all ranks; the first request counts.
        """
        if self.reason is None:
            self.reason = reason
        if self._watcher is not None:
            self._store.set(self._key("requested"), reason)

    def at_boundary(self, index: int) -> bool:
        """Return whether all ranks perform the action at this boundary.

        Args:
            index: number of the boundary; increases by 1 from boundary to boundary.
        """
        if self.reason is None:
            self.pass_by(index)
            return False
        if self._watcher is None:
            return True
        wanted, passed = self._key(f"want/{index}"), self._key("passed")
        self._store.add(wanted, 1)
        while True:
            conditions = {wanted: self._world.size, passed: index, **self._deaths.condition}
            reached = self._store.reach(conditions, LOOK_S if membership().changes else LONG_S)
            if wanted in reached:
                return True
            if passed in reached:
                self.pass_by(index)
                return False
            self.check_peers()

    def check_peers(self) -> None:
        """Raise an error if a rank has ended, which will never reach this boundary.

        Raises:
            PeerLost: a rank has ended, or has left the group.
        """
        member, world = membership(), self._world
        member.check(world.generation)
        dead = self._deaths.read()
        if not member.changes:  # no supervisor ends the generation
            workers = member.members(world.generation, max(world.members) + 1)
            for rank in world.members:
                if workers[rank] in dead:
                    raise PeerLost(f"rank {rank} has ended before all ranks agreed on the request {self._name!r}")

    def pass_by(self, index: int) -> None:
        """Record that this rank has passed a boundary.

        Args:
            index: number of the boundary.
        """
        self._passed = index
        # The watching thread publishes the position after it has set the reason. Read the reason after setting the
        # position: either that thread publishes this position, or this one.
        if self.reason is not None and self._watcher is not None:
            self._publish()

    def passed_by(self, rank: int) -> int:
        """Return the newest boundary that a rank has published since a request; -1 for none.

        Args:
            rank: any other rank.
        """
        key = self._key(f"passed/{rank}")
        return int(self._store.get(key)) if self._store.check([key]) else -1

    def local_keys(self) -> list[str]:
        """Return the store keys that this rank has to delete."""
        common = ("requested", "passed") if self._world.main_rank else ()
        return [self._key(name) for name in (f"passed/{self._world.rank}", *common)]

    def close(self) -> None:
        """Stop the thread that waits for requests."""
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None

    def _key(self, name: str) -> str:
        return self._world.key(f"{self._name}/{self._world.generation}/{name}")

    def _request_keys(self) -> list[str]:
        """Return the store keys that are set by requests of this action."""
        return [self._key("requested"), *([STOP_KEY] if self._name == "signal" else [])]

    def _answer(self) -> None:
        """Receive a request, and publish the position of this rank; called by the watching thread."""
        if self._name in ("signal", "stop"):
            self._read_request(self._store, self._request_keys())
        elif self.reason is None:
            self.reason = self._name
        if self.reason is not None:
            self._publish()
            self._answered = True

    def _publish(self) -> None:
        with self._publishing:
            if self._passed > self._published:
                self._published = self._passed
                self._store.set(self._key(f"passed/{self._world.rank}"), str(self._published))
                self._store.raise_to(self._key("passed"), self._published)

    def _read_request(self, store: Store, keys: list[str]) -> None:
        """Read the request of another process."""
        reason = _requested(store, keys)
        if reason is not None:  # do not overwrite a request that this rank has made during the store access
            self.reason = reason


@final
class StopRequests:
    """Requests to stop: those of callbacks, which a minimum of steps may delay, and signals, which nothing delays.

    Two agreements, so that a signal counts after a delayed request, and all ranks stop for the same reason.

    Args:
        world: all ranks.

    Attributes:
        signals: requests with a reason of `SIGNALS`.
        callbacks: other requests.
    """

    def __init__(self, world: World) -> None:
        self.signals = Agreement(world, "signal")
        self.callbacks = Agreement(world, "stop", beside=self.signals)

    @property
    def reason(self) -> str | None:
        """Return the reason of a request that this rank has made or received; None without a request."""
        return self.signals.reason or self.callbacks.reason

    def request(self, reason: str) -> None:
        """Request that all ranks stop; may be called from any thread or signal handler.

        Args:
            reason: "interrupted" or "terminated" for a signal; otherwise any text.
        """
        (self.signals if reason in SIGNALS else self.callbacks).request(reason)

    def withdraw(self) -> bool:
        """Withdraw a request that no signal has made; return whether none is left: other ranks keep a request."""
        if self.callbacks.alone:
            self.callbacks.reason = None
        return self.callbacks.reason is None

    def at_boundary(self, index: int, *, delayed: bool) -> str | None:
        """Return the reason for which all ranks stop at this boundary; None if they continue.

        Args:
            index: number of the boundary; increases by 1 from boundary to boundary.
            delayed: only a signal stops the ranks here; equal on all ranks.
        """
        if self.signals.at_boundary(index):
            return self.signals.reason
        if delayed:
            self.callbacks.pass_by(index)
            return None
        return self.callbacks.reason if self.callbacks.at_boundary(index) else None

    def renewed(self, world: World) -> StopRequests:
        """Return the same requests for the ranks of another generation, and close these.

        Args:
            world: all ranks of the generation.
        """
        self.close()
        requests = StopRequests(world)
        for reason in (self.signals.reason, self.callbacks.reason):
            if reason is not None:
                requests.request(reason)
        return requests

    def close(self) -> None:
        """Stop the thread that waits for requests."""
        self.signals.close()


@final
class _Watcher:
    """Thread of a rank that waits for requests of all its agreements.

    Args:
        store: the run's store.
        name: name of the first agreement.
    """

    def __init__(self, store: PrivateStore, name: str) -> None:
        self._watch = store.watch()
        self._agreements: list[Agreement] = []
        self._closed = False
        self._news = threading.Event()  # the list of agreements has changed
        self._thread = threading.Thread(target=self._run, name=f"fabricx-{name}", daemon=True)
        self._thread.start()

    def add(self, agreement: Agreement) -> None:
        """Wait for requests of one more agreement."""
        self._agreements = [*self._agreements, agreement]
        self._wake()

    def remove(self, agreement: Agreement) -> None:
        """Ignore further requests of an agreement."""
        self._agreements = [other for other in self._agreements if other is not agreement]

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        self._news.set()
        self._watch.interrupt()

    def _run(self) -> None:
        failures = 0
        with contextlib.closing(self._watch):
            while failures < RETRIES:  # else the store has ended, and with it all processes that could send a request
                self._news.clear()  # before the flag is read: `close` sets the flag first
                if self._closed:
                    return
                waiting = {key: a for a in self._agreements if not a._answered for key in a._request_keys()}
                if not waiting:
                    self._news.wait()
                    continue
                try:
                    requested = self._watch.wait_any([*waiting], WATCH_S)
                    for agreement in {id(waiting[key]): waiting[key] for key in requested}.values():
                        agreement._answer()
                    failures = 0
                except (DistError, AuthenticationError):
                    failures += 1
                    self._news.wait(RETRY_S)


def _requested(store: Store, keys: list[str]) -> str | None:
    """Return the reason of a request that a process of the run has signed; None without such a request."""
    for key in keys:
        with contextlib.suppress(AuthenticationError):
            if store.check([key]):
                return store.get(key).decode()
    return None
