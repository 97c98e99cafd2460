"""Each lease is used once by each server, for deaths of any process at any time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fabricx import by_value
from fabricx.parameter_server.server.journal import HEADER, Journal
from fabricx.parameter_server.server.server import Server
from tests.soak import seeds
from tests.unit.parameter_server.faulty import Faulty
from tests.unit.parameter_server.server.test_server import begin

SCHEDULES = seeds(short=8, full=96)

MODES: dict[str, dict[str, Any]] = {
    "arrival": {"aggregate": False},
    "a bound by version": {"aggregate": False, "max_staleness": 1, "bound": "version"},
    "a bound by clock": {"aggregate": False, "max_staleness": 1, "bound": "clock"},
    "whole batches": {"aggregate": True, "max_staleness": 1},
    "one server": {"aggregate": False, "servers": 1},
    "too old ones are dropped": {"aggregate": False, "servers": 1, "max_staleness": 1, "bound": "version",
                                 "on_stale": "drop"},
    "backup workers": {"backup": 1, "servers": 1},
    "three servers": {"aggregate": False, "servers": 3},
    "compressed weights": {"aggregate": False, "pull_compression": "bf16"},
    "rounds": {"aggregate": False, "every": 3},
    "rounds with compressed weights": {"aggregate": False, "every": 2, "pull_compression": "bf16"},
}  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES)
def test_each_lease_is_applied_to_the_weights_once(mode: str, tmp_path: Path) -> None:
    for seed in SCHEDULES:
        folder = tmp_path / str(seed)
        folder.mkdir()
        run = Faulty(seed, folder, **MODES[mode])
        for values in run.run():
            times = (values > 0).float() if run.settings.backup else values  # these updates are means
            assert torch.equal(times, torch.ones_like(times)), (seed, run.log, values)
        server = run.servers[0]
        assert server.trained == 2 * run.leases
        if run.settings.orders_updates:
            assert max(server.counts.staleness) <= (run.settings.max_staleness or 0), (seed, run.log)


def test_a_disconnected_worker_does_not_hold_the_turn_indefinitely(tmp_path: Path) -> None:
    """Its link ended during its computation: its lease was assigned to another worker, and more leases started."""
    assert Faulty(42, tmp_path, **MODES["a bound by version"]).run()


def test_an_incomplete_record_is_ignored(tmp_path: Path) -> None:
    """The server dies within a record, and again after a shorter record, where a header seems to follow."""
    begun, _ = begin(workers=2, aggregate=False, snapshot_every=10)
    paths, empty = [tmp_path / "0", tmp_path / "1"], torch.empty(0)

    def restarted() -> tuple[Journal, Server]:
        journal, server = Journal(paths), Server(2)
        journal.replay(server)
        return journal, server

    journal, server = restarted()
    server.handle(0, begun, empty, empty)
    journal.snapshot_if_due(server, begun)
    shorter = HEADER.size + len(by_value.dumps(("left", 1)))
    with paths[1].open("r+b") as file:
        file.seek(paths[1].stat().st_size + shorter)
        file.write(HEADER.pack(1, 8, 0) + bytes(8))  # of the vector of a record that has no header yet
    for _ in range(2):
        journal.close()
        journal, server = restarted()
        journal.record_left(1)
    journal.close()
    assert server.state.departed == {1}
