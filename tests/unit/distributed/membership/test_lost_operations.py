"""A wait for a lost operation is distinguished from Python code, computation and file reads."""

from __future__ import annotations

import itertools

import pytest

from fabricx.distributed.activity import heartbeat
from fabricx.distributed.membership.lost_operations import CHECKS, BlockedMainThread


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
