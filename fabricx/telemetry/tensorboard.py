"""Write telemetry for TensorBoard, as a separate TensorBoard run next to the user's metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, final

from fabricx.telemetry.diagnosis import straggler_scores
from fabricx.telemetry.events import FOLDER
from fabricx.telemetry.reader import Record
from fabricx.telemetry.run import WAITING, Rank, Row, Run, joined

_BY_RANK: Final = {
    "busy time, ms": "busy_ms", "waiting for others, ms": "wait_ms", "waiting for data, ms": "data_ms",
    "samples per second": "samples_per_s", "share of the samples": "share", "straggler score": "straggler",
    "main memory, MiB": "memory_mib", "CPU cores": "cpu_cores",
}  # fmt: skip


@final
class Board:
    """Write scalars of all ranks by step, as for the user's metrics.

    Args:
        run_dir: the run's folder.
        run: state of the run, read at each `write`.
    """

    def __init__(self, run_dir: Path, run: Run) -> None:
        self._folder, self._run = run_dir / FOLDER, run
        self._writer: Any = None
        self._shown: dict[int, float] = {}  # by rank: end of the newest row that was written
        self._events = 0  # events that were written
        self._gauges: dict[str, int] = {}  # by gauge: newest step that was written
        self._recovery = {"restarts": 0.0, "steps_again": 0.0, "downtime_s": 0.0}

    def write(self) -> None:
        """Write new steps and events, if any."""
        fresh = {rank.rank: self._new_rows(rank) for rank in self._run.present}
        rows = {number: joined(rows) for number, rows in fresh.items() if rows}
        if not rows and len(self._run.events) == self._events:
            return
        self._writer = self._writer or self._opened()
        if rows:
            self._write_rows(rows)
        self._write_events(self._run.events[self._events :])
        self._writer.flush()

    def skip(self) -> None:
        """Mark the present state as written: an earlier attempt of the run wrote it."""
        for rank in self._run.present:
            self._new_rows(rank)
        self._events = len(self._run.events)
        self._gauges = {name: max(values, default=-1) for name, values in self._run.gauges.items()}

    def close(self) -> None:
        """Write the remaining steps and events."""
        self.write()
        if self._writer is not None:
            self._writer.close()

    def _opened(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(log_dir=str(self._folder))
        attributes = [rank.attributes for rank in self._run.present]
        by_rank = dict(_BY_RANK)
        if any(str(rank.get("device", "")).startswith("cuda") for rank in attributes):
            by_rank["device memory, MiB"] = "device_mib"
        layout = {"ranks": {title: ["Multiline", [rf"^{tag}/rank_\d+$"]] for title, tag in by_rank.items()}}
        if any(rank.get("servers") for rank in attributes):
            tags = {"messages that wait": "queue", "staleness of gradients": "staleness"}
            layout["servers"] = {title: ["Multiline", [rf"^server_{tag}_\d+$"]] for title, tag in tags.items()}
        writer.add_custom_scalars(layout)
        return writer

    def _new_rows(self, rank: Rank) -> list[Row]:
        shown = self._shown.get(rank.rank, 0.0)
        rows = [row for row in rank.rows if row.at > shown]
        if rows:
            self._shown[rank.rank] = rows[-1].at
        return rows

    def _write_rows(self, rows: dict[int, Row]) -> None:
        step = max(row.step for row in rows.values())
        add = self._writer.add_scalar
        speeds = {rank: row.samples / max(1e-9, row.steps * row.step_s) for rank, row in rows.items()}
        samples = sum(row.samples for row in rows.values())
        add("step_ms", 1e3 * max(row.step_s for row in rows.values()), step)
        add("samples_per_s/all", sum(speeds.values()), step)
        add("samples_per_s/per_device", sum(speeds.values()) / len(speeds), step)
        for (rank, row), score in zip(rows.items(), straggler_scores(list(rows.values())), strict=True):
            now = self._run.ranks[rank].now
            scalars = {
                "busy_ms": 1e3 * row.busy_s, "wait_ms": 1e3 * row.mean(*WAITING), "data_ms": 1e3 * row.mean("data"),
                "samples_per_s": speeds[rank], "share": row.samples / max(1, samples),
                "straggler": score,
            }  # fmt: skip
            scalars |= {name: now[name] for name in ("memory_mib", "device_mib", "cpu_cores") if name in now}
            for name, value in scalars.items():
                add(f"{name}/rank_{rank}", value, step)
        for name, values in self._run.gauges.items():
            if name == "epoch":
                continue
            new = [step for step in values if step > self._gauges.get(name, -1)]
            for step in new:
                add(name, values[step], step)
            self._gauges[name] = max(new, default=self._gauges.get(name, -1))

    def _write_events(self, events: list[Record]) -> None:
        for event in events:
            step = event.get("step", self._run.steps)
            self._writer.add_text(f"events/{event['name']}", event["text"], step)
            self._recovery["steps_again"] += float(event.get("steps_again", 0.0))
            if event["name"] == "recovery" and "seconds" in event:
                self._recovery["restarts"] += 1.0
                self._recovery["downtime_s"] += float(event["seconds"])
                for name, value in self._recovery.items():
                    self._writer.add_scalar(f"recovery/{name}", value, step)
        self._events += len(events)
