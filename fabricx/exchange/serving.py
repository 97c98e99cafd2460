"""The process of a server: lets workers in, and attends to each in a thread of its own."""

from __future__ import annotations

import pickle
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, final

import torch

from fabricx.comm.links import LOST, Entrance, Hello, Link, Store, meet_over_gloo
from fabricx.exchange.messages import Begin, Granted, Open, Push, Reply
from fabricx.exchange.server import Server
from fabricx.exchange.told import Told

POLL_S: Final = 0.05  # how often a server looks for workers of other machines, until all are there
LOOK_S: Final = 0.2  # and later; and how often it looks whether a worker that waits is still there
END_S: Final = 1.0  # how long a thread may take to end
LONG: Final = timedelta(days=365)  # a link has no time-out: that a worker has died is known by its end


def serve(
    store: Store, prefix: str, number: int, workers: int, *, folder: str | None = None, generation: int = 0,
    run_dir: Path | None = None, traces: bool = False,
) -> None:  # fmt: skip
    """Be a server until the workers have said that they have done, and are gone.

    Args:
        store: where workers look for the address.
        prefix: of the run's keys.
        number: which server this is.
        workers: how many there are.
        folder: where snapshots are, if a server that died is to be started again; then others may come after all
            workers have died, too.
        generation: how often this one was.
        run_dir: the run's folder, if it records what happens in it.
        traces: also when each gradient is applied.
    """
    snapshot = Path(folder) / f"server-{number}" if folder is not None else None
    serving = _Serving(store, f"{prefix}/server/{number}", workers, number == 0, snapshot,
                       Told(run_dir, number, traces=traces))  # fmt: skip
    serving.run(generation)


@final
class _Serving:
    def __init__(
        self, store: Store, key: str, workers: int, deals: bool, snapshot: Path | None, told: Told
    ) -> None:  # fmt: skip
        self._store, self._key, self._told = store, key, told
        self._workers, self._deals = workers, deals
        self._server, self._generation = Server(workers, deals=deals), 0  # and of which workers
        self._snapshot = snapshot
        self._kept = -1  # version of the newest snapshot
        self._changed = threading.Condition()
        self._present: set[Link] = set()
        self._came = 0
        self._done = False  # have workers said so?
        self._queue = 0  # messages that wait
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()
        self._error: BaseException | None = None

    def run(self, generation: int) -> None:
        if self._snapshot is not None and self._snapshot.exists():
            self._server.restore(torch.load(self._snapshot, weights_only=False))  # its own
        entrance = Entrance(None if self._snapshot is None else str(self._snapshot.parent))
        self._in_thread(self._watch_for_others, f"{self._key}/{generation}/from")
        self._in_thread(self._let_in, entrance)
        self._in_thread(self._tell)
        self._store.set(self._key, f"{generation} {entrance.address}")
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
        if self._error is not None:
            raise self._error

    def _in_thread(self, function: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _tell(self) -> None:
        while self._told.tell_on(self._server.counts):
            pass

    def _let_in(self, entrance: Entrance) -> None:
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
                self._in_thread(self._meet, f"{key}/link", pickle.loads(bytes.fromhex(self._store.get(key).decode())))
                number += 1

    def _meet(self, name: str, hello: Hello) -> None:
        self._attend(meet_over_gloo(self._store, name, hello, server=True, timeout=LONG))

    def _attend(self, link: Link) -> None:
        """Answer one worker's messages, in their order, until it leaves."""
        worker = link.hello.worker
        with self._changed:
            server = self._server_of(link.hello.generation)
            self._came += 1
            self._present.add(link)
            server.joined(worker)
            self._told.joined(worker)
        try:
            while (message := link.recv()) is not None:
                answer = self._answer(server, message, link)
                if isinstance(answer, Reply):
                    for start, stop in answer.spans:
                        link.post(start, stop)
                if answer is not None:
                    link.send(answer)
            self._done = self._done or server is self._server
        except LOST:
            pass
        except BaseException as error:
            self._error = error
        finally:
            link.close()
            with self._changed:
                self._present.discard(link)
                server.left(worker)
                self._done = self._done or (self._snapshot is None and self._came >= self._workers)
                self._changed.notify_all()

    def _server_of(self, generation: int) -> Server:
        """Return who serves a generation of workers; nothing of the one before is left in a new one's."""
        if generation > self._generation:
            self._server, self._generation = Server(self._workers, deals=self._deals), generation
        return self._server if generation == self._generation else Server(self._workers)

    def _keep(self, message: Any, answer: Any) -> None:
        """Write a snapshot, if it is time; all wait for it. The end of a section, once told, has to be remembered."""
        every = self._server.snapshot_every
        if self._snapshot is None or not every:
            return
        ended = isinstance(answer, Granted) and answer.over and self._kept != self._server.version
        if ended or isinstance(message, (Begin, Open)) or self._server.version >= self._kept + every:
            self._kept = self._server.version
            new = self._snapshot.with_suffix(".new")
            torch.save(self._server.snapshot(), new)
            new.replace(self._snapshot)

    def _answer(self, server: Server, message: Any, link: Link) -> Any:
        worker = link.hello.worker
        with self._changed:
            self._queue += 1
            try:
                while not self._changed.wait_for(lambda: server.broken or server.ready(worker, message), LOOK_S):
                    if link.gone():
                        raise EOFError
            finally:
                self._queue -= 1
            if not server.ready(worker, message):
                raise EOFError  # what it waits for will never come
            try:
                server.counts.messages += 1
                server.counts.queued += self._queue
                begun = time.monotonic()
                answer = server.handle(worker, message, link.inbox, link.outbox)
                if isinstance(message, Push):
                    self._told.applied(worker, begun)
                self._keep(message, answer)
                return answer
            except BaseException as error:
                self._error = error
                raise
            finally:
                self._changed.notify_all()
