"""A sentence that names the ranks that wait and the rank that they wait for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from fabricx.distributed.heartbeat import Diagnosis, is_users


def explain(found: Mapping[int, Diagnosis | None]) -> str:
    """Return which ranks wait in which collective, and where those are that they wait for.

    Args:
        found: what each rank has told of itself; None of one that doesn't answer.

    >>> two = Diagnosis("", "all_reduce #119", "all_reduce #118", "")
    >>> one = Diagnosis("", "broadcast #118", "all_reduce #117", "")
    >>> explain({0: two, 1: two, 2: one})
    'rank 2 waits in broadcast #118, the others in all_reduce #119'
    """
    at = {rank: _state(one) for rank, one in sorted(found.items())}
    if not at:
        return "no rank is left to ask"
    usual, many = Counter(at.values()).most_common(1)[0]
    odd: dict[str, list[int]] = {}
    for rank, state in at.items():
        if state != usual or many == 1:
            odd.setdefault(state, []).append(rank)
    told = [f"{_ranks(ranks)} {state}" for state, ranks in odd.items()]
    if many == 1:
        return ", ".join(told)
    if not told:
        return f"all ranks are alike: rank {min(at)} {usual}"
    same_verb = usual.startswith("waits in ") and any("waits in" in one for one in told)
    return ", ".join(
        [*told, f"the others {usual.removeprefix('waits ') if same_verb else usual.replace('waits', 'wait')}"]
    )


def from_dump(text: str) -> Diagnosis | None:
    """Return what a process is at that can't answer itself, from what `faulthandler` has written of it.

    >>> from_dump('Current thread 0x1 (most recent call first):\\n  File "a.py", line 7 in f\\n').where
    'a.py:7 in f'
    """
    _, current, stack = text.partition("Current thread")
    frames = re.findall(r'File "(.+?)", line (\d+) in (\S+)', stack if current else text)
    if not frames:
        return None
    at = next((frame for frame in frames if is_users(frame[0])), frames[0])
    return Diagnosis("{}:{} in {}".format(*at), "", "", text)


def _state(one: Diagnosis | None) -> str:
    if one is None:
        return "doesn't answer"
    if one.pending:
        return f"waits in {one.pending}"
    after = f", after {one.done}" if one.done else ""
    return f"is at {one.where}{after}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"
