"""Collectives that this process has begun, as torch's flight recorder has them, and its transfers to single ranks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

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


class Route(NamedTuple):
    """Messages between two ranks that are received in the order in which they are sent.

    Attributes:
        source, to: ranks of the run.
        channel, tag: kind of the messages.
    """

    source: int
    to: int
    channel: str
    tag: int


@dataclass(frozen=True)
class TransferTrace:
    """Transfers of a process to and from other ranks.

    Attributes:
        begun: number of sends and receives that have begun, by ("send" or "receive", route).
        awaited: "send" or "receive", route, and number of the transfer that the main thread waits for, counted from 1;
            None if it waits for none.
    """

    begun: Mapping[tuple[str, Route], int] = field(default_factory=dict)
    awaited: tuple[str, Route, int] | None = None


_BEGUN: Final[dict[tuple[str, Route], int]] = {}
_AWAITED: Final[list[tuple[str, Route, int] | None]] = [None]


def forget_transfers() -> None:
    """Count transfers anew: all ranks call it before they begin transfers in a new group."""
    _BEGUN.clear()


def begins(kind: Literal["send", "receive"], route: Route) -> int:
    """Count a transfer, and return its number.

    Args:
        kind: "send" or "receive".
        route: of the message.
    """
    number = _BEGUN.get((kind, route), 0) + 1
    _BEGUN[kind, route] = number
    return number


def awaits(transfer: tuple[str, Route, int] | None) -> None:
    """Record the transfer that the main thread is about to wait for; None when the wait has ended.

    Args:
        transfer: "send" or "receive", route and number.
    """
    _AWAITED[0] = transfer


def transfers() -> TransferTrace:
    """Return the transfers of this process."""
    return TransferTrace(dict(_BEGUN), _AWAITED[0])


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


def by_group(entries: list[dict[str, Any]], *, waits_outside: bool = False) -> tuple[GroupTrace, ...]:
    """Return the collectives of gloo by process group, without groups that exist no longer.

    Other backends return from a collective before it is complete, so that a pending collective blocks nothing.

    Args:
        entries: result of `recorded`.
        waits_outside: the main thread waits outside of torch, so that none of its collectives counts as pending.
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
            traces.append(GroupTrace(ranks, name, begun, () if waits_outside else pending))
    return tuple(traces)


def _operation(entry: dict[str, Any]) -> str:
    name: str = entry["profiling_name"]
    return name.rpartition(":")[2]
