"""Report of a hang: the positions of waiting ranks, and of the ranks for which they wait."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from fabricx.distributed.activity.heartbeat import Diagnosis, informative_frame


def explain(diagnoses: Mapping[int, Diagnosis | None]) -> str:
    """Return a sentence with the pending collective or the position of each rank; equal ranks are combined.

    Args:
        diagnoses: diagnoses by rank; None for a rank that doesn't answer.

    >>> ahead = Diagnosis("", "all_reduce #119", "all_reduce #118", "")
    >>> behind = Diagnosis("", "broadcast #118", "all_reduce #117", "")
    >>> explain({0: ahead, 1: ahead, 2: behind})
    'rank 2 waits in broadcast #118, the others in all_reduce #119'
    """
    at = {rank: _state(diagnosis) for rank, diagnosis in sorted(diagnoses.items())}
    if not at:
        return "no rank could be asked"
    usual, many = Counter(at.values()).most_common(1)[0]
    odd: dict[str, list[int]] = {}
    for rank, state in at.items():
        if state != usual or many == 1:
            odd.setdefault(state, []).append(rank)
    clauses = [f"{_ranks(ranks)} {state}" for state, ranks in odd.items()]
    if many == 1:
        return ", ".join(clauses)
    if not clauses:
        return f"all ranks are alike: rank {min(at)} {usual}"
    same_verb = usual.startswith("waits in ") and any("waits in" in clause for clause in clauses)
    return ", ".join(
        [*clauses, f"the others {usual.removeprefix('waits ') if same_verb else usual.replace('waits', 'wait')}"]
    )


def from_dump(text: str) -> Diagnosis | None:
    """Return the diagnosis of an unresponsive or crashed process from its `faulthandler` dump; None without a stack.

    It describes the thread that received the signal or, if that thread runs no Python code, the main thread.

    Args:
        text: the dump.

    >>> from_dump('Current thread 0x1 (most recent call first):\\n  File "a.py", line 7 in f\\n').where
    'a.py:7 in f'
    """
    _, current, stack = text.partition("Current thread")
    frames = re.findall(r'File "(.+?)", line (\d+) in (\S+)', stack if current else text.rpartition("Thread 0x")[2])
    if not frames:
        return None
    at = frames[informative_frame([file for file, _, _ in frames])]
    return Diagnosis("{}:{} in {}".format(*at), "", "", text)


def _state(diagnosis: Diagnosis | None) -> str:
    if diagnosis is None:
        return "doesn't answer"
    if diagnosis.pending:
        return f"waits in {diagnosis.pending}"
    after = f", after {diagnosis.done}" if diagnosis.done else ""
    return f"is at {diagnosis.where}{after}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"
