"""A wait for a lost operation is distinguished from Python code, computation and file reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from fabricx.distributed.activity import heartbeat
from fabricx.distributed.membership.generations import Generation, Membership, enter, membership
from fabricx.distributed.membership.lost_operations import CHECKS, BlockedMainThread, wait
from fabricx.errors import PeerLost


@pytest.fixture
def member() -> Iterator[Membership]:
    before = membership()
    enter(Membership(0, "", lambda kind, content: None))
    yield membership()
    enter(before)


class SlowOperation:
    """A collective that ends at the fourth check, because another rank has begun it late."""

    def __init__(self) -> None:
        self.checks = 0

    def wait(self, timeout: object = None) -> None:
        self.checks += 1
        if self.checks < 4:
            raise RuntimeError("timed out")

    def is_completed(self) -> bool:
        return self.checks >= 4


def test_an_operation_ends_also_if_a_worker_waits_to_join(member: Membership) -> None:
    """Regression: a rank left the others in a hook at the end of the run, at which no worker joins."""
    member.on_message("generation", Generation(1, (0, 1, 2)))
    wait(SlowOperation(), None, 0)
    member.on_message("broken", 0)
    with pytest.raises(PeerLost, match="did not end"):
        wait(SlowOperation(), None, 0)


@pytest.mark.parametrize(
    ("used", "waits", "lost"),
    [
        (itertools.repeat(1.0), True, True),
        (itertools.repeat(1.0), False, False),  # such as a loader's batch, or a file
        (itertools.count(), True, False),  # such as a long backward
        (itertools.repeat(None), True, False),
    ],
)
def test_only_an_operation_that_uses_no_cpu_time_is_lost(
    used: itertools.repeat[float | None], *, waits: bool, lost: bool
) -> None:
    blocked = BlockedMainThread(lambda: next(used), lambda: waits)
    assert not any(blocked.found() for _ in range(CHECKS))
    assert blocked.found() is lost


def test_progress_resets_the_count() -> None:
    used = itertools.chain(itertools.repeat(1.0, CHECKS), itertools.repeat(2.0))
    blocked = BlockedMainThread(lambda: next(used), lambda: True)
    assert not any(blocked.found() for _ in range(2 * CHECKS))
    assert blocked.found()


def test_a_python_thread_outside_of_collectives_is_not_in_an_operation() -> None:
    assert not heartbeat.communicates()
