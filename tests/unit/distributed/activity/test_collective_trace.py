"""Collectives recorded by torch's flight recorder."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from fabricx.distributed.activity import collective_trace
from fabricx.distributed.activity.collective_trace import GroupTrace, Route, TransferTrace


def entry(number: int, name: str, *, retired: bool = True, group: str = "0", p2p: bool = False) -> dict[str, Any]:
    return {
        "profiling_name": name, "collective_seq_id": number, "retired": retired, "is_p2p": p2p,
        "process_group": [group, ""],
    }  # fmt: skip


ENTRIES = [
    entry(1, "gloo:barrier"), entry(2, "gloo:all_reduce", retired=False), entry(9, "gloo:send", p2p=True),
    entry(3, "nccl:all_reduce", retired=False, group="1"), entry(4, "gloo:broadcast", group="2"),
]  # fmt: skip


def test_the_first_pending_and_the_last_complete_collective_are_named() -> None:
    assert collective_trace.ends(ENTRIES) == ("all_reduce #2", "broadcast #4")
    assert collective_trace.ends([]) == ("", "")


def test_collectives_of_gloo_are_listed_by_group_except_destroyed_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resolve(name: str) -> str:
        if name == "2":
            raise RuntimeError("no such group")
        return name

    monkeypatch.setattr(collective_trace._c10d, "_resolve_process_group", resolve)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, int(group) + 1])
    assert collective_trace.by_group(ENTRIES) == (GroupTrace((0, 1), "0", {1: "barrier", 2: "all_reduce"}, (2,)),)


def test_no_collective_is_recorded_without_a_group() -> None:
    assert collective_trace.by_group(collective_trace.recorded(0)) == ()


def test_transfers_are_counted_by_route_until_a_new_group() -> None:
    route = Route(0, 1, "forward", 2)
    collective_trace.forget_transfers()
    assert [collective_trace.begins("send", route) for _ in range(2)] == [1, 2]
    assert collective_trace.begins("receive", route) == 1
    collective_trace.awaits(("send", route, 2))
    trace = collective_trace.transfers()
    collective_trace.awaits(None)
    collective_trace.forget_transfers()
    assert trace.begun == {("send", route): 2, ("receive", route): 1}
    assert trace.awaited == ("send", route, 2)
    assert collective_trace.transfers() == TransferTrace()
