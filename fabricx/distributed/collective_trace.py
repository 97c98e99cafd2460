"""Collectives that this process has begun, as torch's flight recorder has them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

NEWEST: Final = 64  # number of collectives of each group in a trace
_c10d: Any = distributed_c10d


@dataclass(frozen=True)
class GroupTrace:
    """Collectives of a process group in one of its processes.

    Attributes:
        ranks: ranks of the group.
        name: name of the group, equal in its processes.
        begun: newest collectives by their number in the group, such as "all_reduce".
        pending: numbers of the collectives that have begun and not ended.
    """

    ranks: tuple[int, ...]
    name: str
    begun: Mapping[int, str]
    pending: tuple[int, ...]


def recorded(since_ns: int) -> list[dict[str, Any]]:
    """Return the collectives that this process has begun, in order; none if torch does not record them.

    Args:
        since_ns: time, in ns since the epoch; earlier collectives are omitted.
    """
    with contextlib.suppress(Exception):  # torch was built without the flight recorder
        dump = torch._C._distributed_c10d._dump_fr_trace_json()  # type: ignore[attr-defined]
        return [entry for entry in json.loads(dump)["entries"] if entry["time_created_ns"] >= since_ns]
    return []


def ends(entries: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the first incomplete and the last complete collective, such as "all_reduce #119"; "" without one.

    Args:
        entries: result of `recorded`.
    """
    names = [(f"{_operation(entry)} #{entry['collective_seq_id']}", entry["retired"]) for entry in entries]
    pending = next((name for name, over in names if not over), "")
    return pending, next((name for name, over in reversed(names) if over), "")


def by_group(entries: list[dict[str, Any]]) -> tuple[GroupTrace, ...]:
    """Return the collectives of gloo by process group, without groups that exist no longer.

    Other backends return from a collective before it is complete, so that a pending collective blocks nothing.

    Args:
        entries: result of `recorded`.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        if entry["profiling_name"].startswith("gloo:") and not entry["is_p2p"]:
            groups.setdefault(entry["process_group"][0], []).append(entry)
    traces = []
    for name, newest in groups.items():
        with contextlib.suppress(Exception):  # the group was destroyed
            ranks = tuple(dist.get_process_group_ranks(_c10d._resolve_process_group(name)))
            begun = {entry["collective_seq_id"]: _operation(entry) for entry in newest[-NEWEST:]}
            pending = tuple(entry["collective_seq_id"] for entry in newest if not entry["retired"])
            traces.append(GroupTrace(ranks, name, begun, pending))
    return tuple(traces)


def _operation(entry: dict[str, Any]) -> str:
    name: str = entry["profiling_name"]
    return name.rpartition(":")[2]
