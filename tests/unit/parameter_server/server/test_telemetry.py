"""Telemetry of a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from fabricx.parameter_server.server.telemetry import ServerTelemetry
from fabricx.parameter_server.wire.messages import Counts
from fabricx.telemetry import events
from fabricx.telemetry.reader import Files


def test_a_server_reports_the_counts_since_its_last_report(tmp_path: Path) -> None:
    telemetry = ServerTelemetry(tmp_path, 2, traces=True)
    telemetry.write(Counts(1, 0, {0: 3, 1: 1}, 0, 8, 4))
    telemetry.applied(0, 1.0)
    telemetry.applied(1, 1.5)
    telemetry.applied(0, 2.0)
    telemetry.write(Counts(3, 0, {0: 3, 1: 1, 4: 2}, 0, 10, 7))
    telemetry.write(Counts(3, 0, {0: 3, 1: 1, 4: 2}, 0, 10, 7))  # no messages yet
    telemetry.end()
    first, second, applied = Files(tmp_path).new()
    assert (first["queue"], first["staleness"]) == (0.5, 0.25)
    assert (second["queue"], second["staleness"], second["messages"]) == (1.5, 4.0, 2)
    assert [entry[:3] for entry in applied["applied"]] == [[0, 1, 1.0], [1, 1, 1.5], [0, 2, 2.0]]
    assert {first["who"], second["who"], applied["who"]} == {"server2"}


def test_a_rejoined_worker_counts_from_1(tmp_path: Path) -> None:
    telemetry = ServerTelemetry(tmp_path, 0, traces=True)
    telemetry.applied(0, 1.0)
    telemetry.joined(0)
    telemetry.applied(0, 2.0)
    telemetry.write(Counts(messages=1))
    telemetry.end()
    [applied] = [record for record in Files(tmp_path).new() if record["kind"] == "applied"]
    assert [entry[1] for entry in applied["applied"]] == [1, 1]


def test_a_server_without_disk_space_for_records_continues_to_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*anything: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(events.os, "open", full)
    with pytest.warns(UserWarning, match="the records of a server will be missing"):
        telemetry = ServerTelemetry(tmp_path, 0, traces=True)
    telemetry.applied(0, 1.0)
    telemetry.write(Counts(messages=1))
    telemetry.end()
