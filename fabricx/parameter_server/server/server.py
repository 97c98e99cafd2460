"""A parameter server as a state machine, without process, socket or clock."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor

from fabricx.parameter_server.server.handlers import HANDLERS, Answer, Sender
from fabricx.parameter_server.server.state import ServerState
from fabricx.parameter_server.wire.messages import Counts, ServerInit


@final
class Server:
    """Stores a part of the weights, and updates it with the gradients of several workers.

    A message is processed when it is `ready`; until then its worker waits, and all waiting messages are checked again
    after each processed message. The transport of messages (threads, or a simulation) therefore decides nothing. The
    state is a function of the sequence of messages: a server that replays the sequence has the same state, bit for bit.
    `handlers.HANDLERS` has the reaction to each type of message.

    Args:
        workers: initial number of workers.
        grants: this server grants the leases; other servers only record which gradients they have received.

    Attributes:
        state: see `ServerState`.
    """

    def __init__(self, workers: int, *, grants: bool = True) -> None:
        self.state = ServerState(workers, grants=grants)
        self._handled: dict[int, int] = {}  # number of the newest message of each worker
        self._answers: dict[int, Answer] = {}  # replies to these messages

    @property
    def broken(self) -> bool:
        """Return whether a worker has disconnected; workers in lockstep would wait for it without end."""
        return bool(self.state.departed)

    @property
    def counts(self) -> Counts:
        """Return the statistics."""
        return self.state.counts

    @property
    def snapshot_every(self) -> int:
        """Return the number of updates between snapshots; 0 if a dead server is not restarted."""
        return self.init.settings.snapshot_every if self.state.is_initialised else 0

    @property
    def init(self) -> ServerInit:
        """Return the message with which this server was initialised."""
        return self.state.shard.init

    @property
    def values(self) -> Tensor:
        """Return the weights (or sums) that workers pull, flat."""
        return self.state.shard.values

    @property
    def version(self) -> int:
        """Return the number of updates."""
        return self.state.shard.version

    @property
    def trained(self) -> int:
        """Return the number of leases in the weights."""
        return self.state.shard.trained

    # -- messages -------------------------------------------------------------------------------------------------

    def ready(self, worker: int, message: Any) -> bool:
        """Return whether a message can be processed now.

        Args:
            worker: number of the sender.
            message: a worker's message.

        Raises:
            TypeError: servers do not support messages of this type.
        """
        handler = HANDLERS[type(message)]
        if not self.state.is_initialised:
            return isinstance(message, ServerInit)
        return handler.ready(self.state, worker, message)

    def handle(self, worker: int, message: Any, inbox: Tensor, outbox: Tensor) -> Answer:
        """Process a message.

        Args:
            worker: number of the sender.
            message: a message that is `ready`.
            inbox: vector from the worker.
            outbox: vector to the worker, in which the reply to a `Pull` is written.

        Returns:
            The reply; None for a message without a reply.

        Raises:
            TypeError: servers do not support messages of this type.
        """
        return HANDLERS[type(message)].handle(self.state, Sender(worker, inbox, outbox), message)

    def repeated(self, worker: int, number: int, message: Any) -> bool:
        """Return whether a message with side effects was processed before.

        Args:
            worker, number, message: see `handle_once`.
        """
        return number <= self._handled.get(worker, 0) and not HANDLERS[type(message)].repeatable

    def handle_once(self, worker: int, number: int, message: Any, inbox: Tensor, outbox: Tensor) -> Answer:
        """Process a message, unless it was processed before; returns the reply, or the earlier reply.

        Args:
            worker, message, inbox, outbox: see `handle`.
            number: number of the message among those of this worker, from 1.
        """
        if self.repeated(worker, number, message):
            return self._answers.get(worker) if number == self._handled[worker] else None
        handler = HANDLERS[type(message)]
        answer = handler.handle(self.state, Sender(worker, inbox, outbox), message)
        self._handled[worker] = number
        self._answers[worker] = None if handler.repeatable else answer
        return answer

    # -- workers --------------------------------------------------------------------------------------------------

    def remove_worker(self, worker: int) -> None:
        """Remove a worker; leases for which it has pushed no gradient can be granted again.

        Args:
            worker: number of the worker.
        """
        self.state.remove_worker(worker)

    def add_worker(self, worker: int, *, resumes: bool = False) -> None:
        """Add a worker: at once before training and when it resumes, otherwise at the next section.

        Args:
            worker: number of the worker.
            resumes: it was connected before, and continues its message numbers.
        """
        if not resumes:
            self._handled.pop(worker, None)
            self._answers.pop(worker, None)
        self.state.add_worker(worker, resumes=resumes)

    # -- restarts -------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Return the state for `restore`; its tensors are not copied."""
        return dict(vars(self))

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Restore a snapshot.

        Args:
            snapshot: result of `snapshot`.
        """
        vars(self).update(snapshot)
