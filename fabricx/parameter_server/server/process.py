"""The process of a server: admits workers, and serves each in a thread."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any, Final, final

from fabricx.distributed.authentication import AuthenticationError
from fabricx.distributed.generations import membership
from fabricx.fault_tolerance import memory_checkpoint
from fabricx.parameter_server.server.journal import Journal
from fabricx.parameter_server.server.records import ServerRecords
from fabricx.parameter_server.server.server import Server
from fabricx.parameter_server.wire.channel import (
    LOST,
    NETWORK,
    READY,
    Handshake,
    Link,
    LinkListener,
    Store,
    meet_over_gloo,
)
from fabricx.parameter_server.wire.messages import Push, Reply

POLL_S: Final = 0.05  # how often a server looks for workers of other machines, until all are there
LOOK_S: Final = 0.2  # and later; and how often it looks whether a worker that waits is still there
END_S: Final = 1.0  # how long a thread may take to end


def serve(
    store: Store, prefix: str, secret: bytes, number: int, workers: int, *, network: bool, folder: str | None = None,
    generation: int = 0, run_dir: Path | None = None, traces: bool = False, slot: int | None = None,
) -> None:  # fmt: skip
    """Be a server until the workers have said that they have done, and are gone.

    Args:
        store: where workers look for the address.
        prefix: of the run's keys.
        secret: the run's key: who doesn't have it isn't answered.
        number: which server this is.
        workers: how many there are.
        network: workers come over gloo: from other machines, or because they were told to.
        folder: where the journal is, if a server that died is to be started again; then others may come after all
            workers have died, too.
        generation: how often this one was.
        run_dir: the run's folder, if it records what happens in it.
        traces: also when each gradient is applied.
        slot: under which number the journal is in the folder; after those of the workers if not given.
    """
    slot = workers + number if slot is None else slot
    files = (
        []
        if folder is None
        else [memory_checkpoint.path_of(folder, slot, place) for place in range(memory_checkpoint.NEWEST)]
    )
    told = ServerRecords(run_dir, number, traces=traces)
    serving = _Serving(store, f"{prefix}/server/{number}", secret, workers, number == 0, files, told)
    serving.run(generation, network=network)


@final
class _Serving:
    def __init__(
        self, store: Store, key: str, secret: bytes, workers: int, deals: bool, files: list[Path], told: ServerRecords
    ) -> None:  # fmt: skip
        self._store, self._key, self._secret, self._told = store, key, secret, told
        self._workers, self._deals = workers, deals
        self._server, self._generation = Server(workers, deals=deals), 0  # and of which workers
        self._folder = str(files[0].parent) if files else None
        self._journal = Journal(files) if files else None
        self._changed = threading.Condition()
        self._present: set[Link] = set()
        self._came = 0
        self._done = False  # have workers said so?
        self._queue = 0  # messages that wait
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()
        self._error: BaseException | None = None

    def run(self, generation: int, *, network: bool) -> None:
        if self._journal is not None:
            self._journal.bring_back(self._server)
            membership().watch_deaths(self._forget)
        entrance = LinkListener(self._secret, self._folder)
        if network:
            self._in_thread(self._watch_for_others, f"{self._key}/{generation}/from")
        self._in_thread(self._let_in, entrance)
        self._in_thread(self._tell)
        self._store.set(self._key, f"{generation} {NETWORK if network else 'here'} {entrance.address}")
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._error or (self._done and not self._present))
        finally:
            self._over.set()
            self._told.close()
            entrance.close()
            for thread in self._threads:  # else one may be cut off in the middle of something
                thread.join(END_S)
            self._told.end()
            if self._journal is not None:
                self._journal.close()
        if self._error is not None:
            raise self._error

    def _in_thread(self, function: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _tell(self) -> None:
        while self._told.tell_on(self._server.counts):
            pass

    def _let_in(self, entrance: LinkListener) -> None:
        while True:
            try:
                link = entrance.accept()
            except EOFError:
                continue  # it went away at the door
            except OSError:
                return
            self._in_thread(self._attend, link)

    def _watch_for_others(self, place: str) -> None:
        """Meet workers of other machines, as they say that they are there: they take numbers, from 1."""
        number = 1
        while not self._over.wait(POLL_S if self._came < self._workers else LOOK_S):
            while self._store.check([key := f"{place}/{number}"]):
                number += 1
                try:
                    hello = Handshake.loads(self._secret, key, bytes.fromhex(self._store.get(key).decode()))
                except (AuthenticationError, ValueError) as error:
                    print(f"server {self._key} has refused a worker: {error}", file=sys.stderr, flush=True)
                else:
                    self._store.set(f"{key}/{READY}", "")
                    self._in_thread(self._meet, f"{key}/link", hello)

    def _meet(self, name: str, hello: Handshake) -> None:
        try:
            link = meet_over_gloo(self._store, name, hello, self._secret, server=True)
        except LOST:
            return  # the worker has died, or has given up
        except AuthenticationError as error:
            print(f"server {self._key} has refused a worker: {error}", file=sys.stderr, flush=True)
            return
        self._attend(link)

    def _attend(self, link: Link) -> None:
        """Answer one worker's messages, in their order, until it leaves."""
        worker = link.hello.worker
        with self._changed:
            server = self._server_of(link.hello.generation)
            self._came += 1
            self._present.add(link)
            if self._journal is not None:
                self._journal.joined(worker, resumes=link.hello.resumes)
            server.joined(worker, resumes=link.hello.resumes)
            self._told.joined(worker)
        try:
            while (received := link.recv()) is not None:
                number, message = received
                answer = self._answer(server, number, message, link)
                if isinstance(answer, Reply):
                    for start, stop in answer.spans:
                        link.post(start, stop)
                if answer is not None:
                    link.send((number, answer))
            self._done = self._done or server is self._server
        except LOST:
            pass
        except AuthenticationError as error:  # the link ends, and nothing of what came is used
            print(f"server {self._key}: {error}", file=sys.stderr, flush=True)
        except BaseException as error:
            self._error = error
        finally:
            link.close()
            with self._changed:
                self._present.discard(link)
                self._leave(server, worker)
                self._done = self._done or (self._journal is None and self._came >= self._workers)
                self._changed.notify_all()

    def _forget(self, worker: int) -> None:
        """Go on without a worker that has died, also if it hasn't been heard of since this server was started."""
        with self._changed:
            self._leave(self._server, worker)
            self._changed.notify_all()

    def _leave(self, server: Server, worker: int) -> None:
        """Give a worker's leases to others, unless it has another link."""
        if any(link.hello.worker == worker for link in self._present):
            return
        if self._journal is not None and server is self._server:
            self._journal.left(worker)
        server.left(worker)

    def _server_of(self, generation: int | None) -> Server:
        """Return who serves a generation of workers; nothing of the one before is left in a new one's."""
        if generation is not None and generation > self._generation:
            self._server, self._generation = Server(self._workers, deals=self._deals), generation
        return self._server if generation in (None, self._generation) else Server(self._workers)

    def _answer(self, server: Server, number: int, message: Any, link: Link) -> Any:
        worker, together = link.hello.worker, link.hello.generation is not None

        def ready() -> bool:
            return server.repeated(worker, number, message) or server.ready(worker, message)

        with self._changed:
            self._queue += 1
            try:
                while not self._changed.wait_for(lambda: (together and server.broken) or ready(), LOOK_S):
                    if link.gone():
                        raise EOFError
            finally:
                self._queue -= 1
            if not ready():
                raise EOFError  # what it waits for will never come
            try:
                server.counts.messages += 1
                server.counts.queued += self._queue
                begun = time.monotonic()
                if self._journal is not None and not server.repeated(worker, number, message):
                    self._journal.said(server, worker, number, message, link.inbox)
                answer = server.handle_once(worker, number, message, link.inbox, link.outbox)
                if isinstance(message, Push):
                    self._told.applied(worker, begun)
                if self._journal is not None:
                    self._journal.keep(server, message)
                return answer
            except BaseException as error:
                self._error = error
                raise
            finally:
                self._changed.notify_all()
