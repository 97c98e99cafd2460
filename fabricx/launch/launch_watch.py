"""Reports of hangs, and ends of deadlocks, in ranks that a launcher has started: no supervisor watches them.

Each rank has a thread that posts the position of its main thread in the run's store when the rank makes no progress.
The thread of the main rank reads what all ranks have posted.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, final

import torch.distributed as dist

from fabricx.distributed.activity import heartbeat
from fabricx.distributed.activity.collective_trace import GroupTrace, Route, TransferTrace
from fabricx.distributed.activity.heartbeat import Diagnosis
from fabricx.distributed.world import World
from fabricx.errors import RanksDisagree
from fabricx.fault_tolerance import deadlock
from fabricx.fault_tolerance.deadlock import DeadlockDetector, explanation
from fabricx.fault_tolerance.hang_report import explain
from fabricx.fault_tolerance.liveness import learned_limit, pause_report
from fabricx.launch.lost_ranks import LostRanks
from fabricx.redaction import printable

LOOK_S: Final = 1.0  # between two looks at this rank's progress
POST_S: Final = 4.0  # between two posts of a rank without progress
JOIN_S: Final = 5.0  # for the thread to end after the run
STALE_S: Final = 15.0  # after which a rank that posts nothing does not answer


@dataclass(frozen=True)
class Post:
    """Position that a rank without progress posts.

    Attributes:
        number: number of the post of this rank.
        waited_s: seconds for which its main thread has waited for others without progress.
        diagnosis: its position, without stacks.
    """

    number: int
    waited_s: float
    diagnosis: Diagnosis


@contextlib.contextmanager
def watched(world: World, end: Callable[[Exception], None], lost: LostRanks | None = None) -> Iterator[None]:
    """Watch the progress of this rank in the context; the main rank reports hangs of all ranks.

    Args:
        world: all ranks of the launch, with a store.
        end: ends this process with an error, while its main thread is blocked.
        lost: lost ranks, for which this process does not wait; None if the launcher starts no process again.
    """
    over = threading.Event()
    checks = [Watch(world).look] if lost is None else [lost.check, Watch(world).look]
    threads = [
        threading.Thread(target=_watch, args=(check, over, end), name="fabricx-watch", daemon=True) for check in checks
    ]
    for thread in threads:
        thread.start()
    try:
        yield
        if lost is not None:
            lost.leave()
    finally:
        over.set()
        if lost is not None:
            lost.close()
        for thread in threads:
            thread.join(JOIN_S)


def _watch(
    check: Callable[[], str | Exception | None], over: threading.Event, end: Callable[[Exception], None]
) -> None:  # fmt: skip
    """Call a check each `LOOK_S`: it returns a report to print, or an error that ends this process."""
    with contextlib.suppress(dist.DistError):  # the store has ended with the run
        while not over.wait(LOOK_S):
            report = check()
            if isinstance(report, Exception):
                end(report)
            elif report:
                print(report, file=sys.stderr, flush=True)


@final
class Watch:
    """This rank's progress and, on the main rank, the posts of all ranks.

    Args:
        world: all ranks, with a store.
        clock: returns seconds.
    """

    def __init__(self, world: World, clock: Callable[[], float] = time.monotonic) -> None:
        assert world.store is not None
        self._world, self._store, self._clock = world, world.store, clock
        self._reached, self._since = heartbeat.reached(), clock()
        self._waits_since: float | None = None
        self._longest = 0.0  # longest completed pause between two batches, in seconds
        self._posts, self._posted = 0, -POST_S
        self._reported_s = 0.0  # length of the pause in the newest report
        self._seen: dict[int, tuple[Post, float]] = {}  # newest post of each rank, and when it was read first
        self._asked: dict[int, int] = {}  # numbers of the posts in the newest comparison
        self._deadlock = DeadlockDetector()

    def look(self) -> str | Exception:
        """Post this rank's position after a pause; return a report of the main rank, "" without, or a deadlock."""
        now, reached = self._clock(), heartbeat.reached()
        if reached != self._reached:
            if self._reached:
                self._longest = max(self._longest, now - self._since)
            self._reached, self._since, self._waits_since, self._reported_s = reached, now, None, 0.0
        if not heartbeat.waits():
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = now
        if now - self._since < deadlock.AFTER_S:
            return ""
        if now - self._posted >= POST_S:
            self._posts, self._posted = self._posts + 1, now
            waited_s = 0.0 if self._waits_since is None else now - self._waits_since
            post = Post(self._posts, waited_s, heartbeat.diagnosis())
            self._store.set(self._key(self._world.rank), packed(post))
        return self._compared(now) if self._world.main_rank else ""

    def _compared(self, now: float) -> str | Exception:
        answers = self._answers(now)
        posts = {rank: self._seen[rank][0] for rank, answer in answers.items() if answer is not None}
        newer = all(post.number > self._asked.get(rank, 0) for rank, post in posts.items())
        if len(posts) == self._world.size and newer and self._deadlock.due(min(p.waited_s for p in posts.values())):
            self._asked = {rank: post.number for rank, post in posts.items()}
            if self._deadlock.found(answers):
                return RanksDisagree(explanation(answers))
        pause = now - self._since
        if not self._reached or pause < max(learned_limit(self._longest), 2 * self._reported_s):
            return ""
        self._reported_s = pause
        places = [(f"rank {rank}", post.waited_s > 0, post.diagnosis.where) for rank, post in sorted(posts.items())]
        return f"{pause_report(pause, self._longest, places)}\n{explain(answers)}"

    def _answers(self, now: float) -> dict[int, Diagnosis | None]:
        """Return the position of each rank; None for a rank that posts nothing."""
        for rank in range(self._world.size):
            if self._store.check([self._key(rank)]):
                post = unpacked(self._store.get(self._key(rank)))
                if rank not in self._seen or self._seen[rank][0].number != post.number:
                    self._seen[rank] = post, now
        fresh = {rank: post for rank, (post, read) in self._seen.items() if now - read < STALE_S}
        return {rank: fresh[rank].diagnosis if rank in fresh else None for rank in range(self._world.size)}

    def _key(self, rank: int) -> str:
        return self._world.key(f"hang/{rank}")


def packed(post: Post) -> str:
    """Return a post as JSON, without the stacks.

    Args:
        post: of this rank.
    """
    answer = post.diagnosis
    return json.dumps(
        {
            "number": post.number, "waited_s": post.waited_s, "where": answer.where, "pending": answer.pending,
            "done": answer.done, "cpu_s": answer.cpu_s,
            "groups": [[group.ranks, group.name, list(group.begun.items()), group.pending] for group in answer.groups],
            "begun": [[kind, route, number] for (kind, route), number in answer.transfers.begun.items()],
            "awaited": answer.transfers.awaited,
        }
    )  # fmt: skip


def unpacked(text: bytes) -> Post:
    """Return a post from JSON.

    Args:
        text: result of `packed`.
    """
    content: dict[str, Any] = json.loads(text)
    groups = tuple(
        GroupTrace(tuple(ranks), name, dict(begun), tuple(pending))
        for ranks, name, begun, pending in content["groups"]
    )  # fmt: skip
    begun = {(kind, Route(*route)): number for kind, route, number in content["begun"]}
    awaited = content["awaited"]
    transfers = TransferTrace(begun, None if awaited is None else (awaited[0], Route(*awaited[1]), awaited[2]))
    where, pending, done = (printable(content[name]) for name in ("where", "pending", "done"))
    diagnosis = Diagnosis(where, pending, done, "", groups, transfers, content["cpu_s"])
    return Post(content["number"], content["waited_s"], diagnosis)
