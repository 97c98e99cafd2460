"""Operations of gloo that never end after a death.

When a connection ends, gloo fails the operations that wait for it. It misses an operation that has transferred a part
of its tensor, or whose write has just failed: such an operation waits for its timeout of 30 minutes. Collectives of
`World` leave it (`wait`). Where torch itself waits, as in DDP and FSDP, the worker ends and is replaced
(`BlockedMainThread`).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, final

from fabricx.distributed.activity import heartbeat
from fabricx.distributed.membership.generations import membership
from fabricx.errors import PeerLost

CHECK: Final = timedelta(seconds=1)  # between two checks of the group during an operation
CHECKS: Final = 250  # number of checks without progress after which an operation is lost
_BLOCKED: Final[list[Any]] = []  # groups with a destructor that would wait for a lost operation


def wait(work: Any, group: Any, generation: int) -> None:
    """Wait for a collective of gloo; leave it if a worker has died and it does not end.

    Args:
        work: torch's work handle.
        group: process group of the collective. If its operation is lost, it is never destroyed.
        generation: number of the group's generation.

    Raises:
        PeerLost: a worker has died, and the operation does not end.
        RuntimeError: the operation has failed.
    """
    broken = False
    while True:
        try:
            work.wait(CHECK)
        except RuntimeError as error:
            if work.is_completed():  # with an error, or just after the time had passed
                work.wait()
                return
            if broken:
                _BLOCKED.append(group)
                raise PeerLost("a worker has died, and the operation did not end") from error
            broken = membership().is_broken(generation)
        else:
            return


@final
class BlockedMainThread:
    """Detects that the main thread waits for a lost operation.

    Checks are counted, and not seconds: a process that was suspended must not end when it continues.

    Args:
        used: returns the CPU time that the main thread has used, or None if the system does not report it.
        waits: returns whether the main thread waits in an operation of torch.distributed.
        checks: calls of `found` without progress after which the operation is lost.
    """

    def __init__(
        self, used: Callable[[], float | None] | None = None, waits: Callable[[], bool] | None = None,
        checks: int = CHECKS,
    ) -> None:  # fmt: skip
        self._used, self._waits = used or heartbeat.cpu_time, waits or heartbeat.communicates
        self._needed, self._checks = checks, 0
        self._last: float | None = None

    def found(self) -> bool:
        """Return whether the main thread has waited without using the CPU during the last calls, `checks` of them."""
        used = self._used()
        if used is None or used != self._last or not self._waits():
            self._checks, self._last = 0, used
        else:
            self._checks += 1
        return self._checks >= self._needed
