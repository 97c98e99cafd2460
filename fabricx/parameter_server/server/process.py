"""Process of a parameter server: accepts workers, and serves each of them in a thread."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any, Final, final

from fabricx.distributed.membership.generations import membership
from fabricx.distributed.messages.authentication import AuthenticationError
from fabricx.fault_tolerance import memory_checkpoint
from fabricx.parameter_server.server.journal import Journal
from fabricx.parameter_server.server.server import Server
from fabricx.parameter_server.server.telemetry import ServerTelemetry
from fabricx.parameter_server.wire.connecting import NETWORK, READY, LinkListener, Store, meet_over_gloo
from fabricx.parameter_server.wire.link import LINK_ERRORS, Handshake, Link
from fabricx.parameter_server.wire.messages import Push, Reply

CONNECT_S: Final = 0.05  # interval of looking for workers of other machines, until all workers have connected
CHECK_S: Final = 0.2  # interval afterwards, and interval of checks whether a waiting worker is alive
JOIN_S: Final = 1.0  # maximum time for a thread to end


def serve(
    store: Store, prefix: str, secret: bytes, number: int, workers: int, *, network: bool, folder: str | None = None,
    generation: int = 0, run_dir: Path | None = None, traces: bool = False, slot: int | None = None,
) -> None:  # fmt: skip
    """Run a server until the workers have finished and disconnected.

    Args:
        store: store in which the server publishes its address.
        prefix: prefix of the run's keys.
        secret: key of the run; processes without the key are refused.
        number: number of this server.
        workers: number of workers.
        network: also accept workers over gloo, from other machines or as configured.
        folder: folder of the journal, if a dead server is restarted; workers may then also reconnect after all of them
            have died. None without a journal.
        generation: number of restarts of this server.
        run_dir: the run's folder, if telemetry is recorded.
        traces: also record when each gradient is applied.
        slot: number of the journal in the folder; by default after those of the workers.
    """
    slot = workers + number if slot is None else slot
    files = (
        []
        if folder is None
        else [memory_checkpoint.path_of(folder, slot, file) for file in range(memory_checkpoint.NEWEST)]
    )
    telemetry = ServerTelemetry(run_dir, number, traces=traces)
    serving = _Serving(store, f"{prefix}/server/{number}", secret, workers, number == 0, files, telemetry)
    serving.run(generation, network=network)


@final
class _Serving:
    """A running server: the state machine, a listener for workers, a thread for each worker, and the journal."""

    def __init__(
        self, store: Store, key: str, secret: bytes, workers: int, grants: bool, files: list[Path],
        telemetry: ServerTelemetry,
    ) -> None:  # fmt: skip
        self._store, self._key, self._secret, self._telemetry = store, key, secret, telemetry
        self._workers, self._grants = workers, grants
        self._server, self._generation = Server(workers, grants=grants), 0  # server of the newest generation of workers
        self._folder = str(files[0].parent) if files else None
        self._journal = Journal(files) if files else None
        self._changed = threading.Condition()
        self._present: set[Link] = set()  # open links
        self._accepted = 0  # number of accepted links, of which some may have ended
        self._known: set[int] = set()  # workers that have connected, or died
        self._restarted = False  # workers may have finished before this process began
        self._done = False  # a worker has finished: the server ends when no link is open, and none will be
        self._waiting = 0  # messages that are not ready
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()
        self._error: BaseException | None = None

    def run(self, generation: int, *, network: bool) -> None:
        self._restarted = generation > 0
        if self._journal is not None:
            self._journal.replay(self._server)
            membership().watch_deaths(self._on_death)
        listener = LinkListener(self._secret, self._folder)
        if network:
            self._in_thread(self._accept_remote, f"{self._key}/{generation}/from")
        self._in_thread(self._accept_local, listener)
        self._in_thread(self._write_telemetry)
        self._store.set(self._key, f"{generation} {NETWORK if network else 'here'} {listener.address}")
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._error or self._finished())
        finally:
            self._over.set()
            self._telemetry.close()
            listener.close()
            for thread in self._threads:  # a daemon thread could otherwise be interrupted within a write
                thread.join(JOIN_S)
            self._telemetry.end()
            if self._journal is not None:
                self._journal.close()
        if self._error is not None:
            raise self._error

    def _finished(self) -> bool:
        """Return whether no worker needs this server any more: not before all have connected, if only to finish."""
        return self._done and not self._present and (self._restarted or len(self._known) >= self._workers)

    def _in_thread(self, function: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _write_telemetry(self) -> None:
        while self._telemetry.wait_and_write(self._server.counts):
            pass

    def _accept_local(self, listener: LinkListener) -> None:
        while True:
            try:
                link = listener.accept()
            except EOFError:
                continue  # the worker has died while connecting
            except OSError:
                return
            self._in_thread(self._serve_link, link)

    def _accept_remote(self, prefix: str) -> None:
        """Connect to workers of other machines, which announce themselves under consecutive numbers from 1."""
        number = 1
        while not self._over.wait(CONNECT_S if self._accepted < self._workers else CHECK_S):
            while self._store.check([key := f"{prefix}/{number}"]):
                number += 1
                try:
                    handshake = Handshake.loads(self._secret, key, bytes.fromhex(self._store.get(key).decode()))
                except (AuthenticationError, ValueError) as error:
                    print(f"server {self._key} has refused a worker: {error}", file=sys.stderr, flush=True)
                else:
                    self._store.set(f"{key}/{READY}", "")
                    self._in_thread(self._meet, f"{key}/link", handshake)

    def _meet(self, name: str, handshake: Handshake) -> None:
        try:
            link = meet_over_gloo(self._store, name, handshake, self._secret, server=True)
        except LINK_ERRORS:
            return  # the worker has died or has timed out
        except AuthenticationError as error:
            print(f"server {self._key} has refused a worker: {error}", file=sys.stderr, flush=True)
            return
        self._serve_link(link)

    def _serve_link(self, link: Link) -> None:
        """Process the messages of a worker in order, until it disconnects."""
        worker = link.handshake.worker
        with self._changed:
            server = self._server_of(link.handshake.generation)
            self._accepted += 1
            self._known.add(worker)
            self._present.add(link)
            if self._journal is not None:
                self._journal.record_joined(worker, resumes=link.handshake.resumes)
            server.add_worker(worker, resumes=link.handshake.resumes)
            self._telemetry.joined(worker)
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
        except LINK_ERRORS:
            pass
        except AuthenticationError as error:  # the link is closed, and the message is discarded
            print(f"server {self._key}: {error}", file=sys.stderr, flush=True)
        except BaseException as error:
            self._error = error
        finally:
            link.close()
            with self._changed:
                self._present.discard(link)
                self._leave(server, worker)
                self._done = self._done or (self._journal is None and self._accepted >= self._workers)
                self._changed.notify_all()

    def _on_death(self, worker: int) -> None:
        """Remove a worker that has died, also if it has not connected since this server was restarted."""
        with self._changed:
            self._known.add(worker)
            self._leave(self._server, worker)
            self._changed.notify_all()

    def _leave(self, server: Server, worker: int) -> None:
        """Return a worker's leases, unless the worker has another link."""
        if any(link.handshake.worker == worker for link in self._present):
            return
        if self._journal is not None and server is self._server:
            self._journal.record_left(worker)
        server.remove_worker(worker)

    def _server_of(self, generation: int | None) -> Server:
        """Return the server for a generation of workers; a new generation begins with an empty server."""
        if generation is not None and generation > self._generation:
            self._server, self._generation = Server(self._workers, grants=self._grants), generation
        return self._server if generation in (None, self._generation) else Server(self._workers)

    def _answer(self, server: Server, number: int, message: Any, link: Link) -> Any:
        """Wait until a message can be processed, and process it; returns the reply, None without a reply.

        Raises:
            EOFError: the message can never be processed, because its sender or another worker in lockstep has died.
        """
        worker = link.handshake.worker
        with self._changed:
            self._wait_until_ready(server, number, message, link)
            try:
                server.counts.messages += 1
                server.counts.queued += self._waiting
                begun = time.monotonic()
                if self._journal is not None and not server.repeated(worker, number, message):
                    self._journal.record_message(server, worker, number, message, link.inbox)
                answer = server.handle_once(worker, number, message, link.inbox, link.outbox)
                if isinstance(message, Push):
                    self._telemetry.applied(worker, begun)
                if self._journal is not None:
                    self._journal.snapshot_if_due(server, message)
                return answer
            except BaseException as error:
                self._error = error
                raise
            finally:
                self._changed.notify_all()  # other messages may be ready now

    def _wait_until_ready(self, server: Server, number: int, message: Any, link: Link) -> None:
        """Wait for the condition of a message; raises EOFError if it can't become true any more."""
        worker, in_lockstep = link.handshake.worker, link.handshake.generation is not None

        def ready() -> bool:
            return server.repeated(worker, number, message) or server.ready(worker, message)

        self._waiting += 1
        try:
            while not self._changed.wait_for(lambda: (in_lockstep and server.broken) or ready(), CHECK_S):
                if link.peer_lost():
                    raise EOFError
        finally:
            self._waiting -= 1
        if not ready():
            raise EOFError
