"""Write telemetry for TensorBoard, as separate TensorBoard runs next to the user's metrics.

TensorBoard has a colour per run and sorts tags by name. Each rank is therefore a run, `telemetry/rank_N`, with equal
tags, and all tags begin with "~", which sorts after letters: the user's metrics come first. Of many ranks, the first
have such a run, and the whole run has the number of the slowest rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, final

from fabricx.telemetry.diagnosis import straggler_scores
from fabricx.telemetry.events import FOLDER
from fabricx.telemetry.reader import Record
from fabricx.telemetry.run import WAITING, Rank, Row, Run, joined

MOST_RANKS: Final = 64  # ranks with scalars of their own: each has an open file
RANKS: Final = "~ranks"  # groups of tags
TRAINING: Final = "~training"
RECOVERY: Final = "~recovery"
SERVERS: Final = "~servers"
_METRICS: Final = {
    "loss": ["Multiline", [r"^(?!~).*[Ll]oss"]],
    "other metrics": ["Multiline", [r"^(?!~|epoch$)(?!.*[Ll]oss)"]],
}
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
        self._writers: dict[int | None, Any] = {}  # by rank; None: the whole run
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
        if rows:
            self._write_rows(rows)
        self._write_events(self._run.events[self._events :])
        for writer in self._writers.values():
            writer.flush()

    def skip(self) -> None:
        """Mark the present state as written: an earlier attempt of the run wrote it."""
        for rank in self._run.present:
            self._new_rows(rank)
        self._events = len(self._run.events)
        self._gauges = {name: max(values, default=-1) for name, values in self._run.gauges.items()}

    def close(self) -> None:
        """Write the remaining steps and events."""
        self.write()
        for writer in self._writers.values():
            writer.close()

    @property
    def _whole(self) -> Any:
        """Return the writer of the whole run."""
        if None not in self._writers:
            self._writers[None] = _writer(self._folder)
            self._writers[None].add_custom_scalars(self._layout())
        return self._writers[None]

    def _of_rank(self, rank: int) -> Any:
        """Return the writer of a rank; a single rank needs no run of its own."""
        if self._run.size == 1 and rank == 0 and rank not in self._writers:
            return self._whole
        if rank not in self._writers:
            self._writers[rank] = _writer(self._folder / f"rank_{rank}")
        return self._writers[rank]

    def _layout(self) -> dict[str, dict[str, list[Any]]]:
        """Return the layout of the page of custom scalars: chart and pattern of its tags, by category and title."""
        attributes = [rank.attributes for rank in self._run.present]
        by_rank = dict(_BY_RANK)
        if any(str(rank.get("device", "")).startswith("cuda") for rank in attributes):
            by_rank["device memory, MiB"] = "device_mib"
        layout: dict[str, dict[str, list[Any]]] = {
            "metrics": dict(_METRICS),
            "training": {
                "learning rate": ["Multiline", [rf"^{TRAINING}/learning_rate"]],
                "gradient norm": ["Multiline", [rf"^{TRAINING}/gradient_norm$"]],
            },
            "ranks": {title: ["Multiline", [rf"^{RANKS}/{tag}$"]] for title, tag in by_rank.items()},
        }
        if any(rank.get("servers") for rank in attributes):
            tags = {"messages that wait": "queue", "staleness of gradients": "staleness"}
            layout["servers"] = {title: ["Multiline", [rf"^{SERVERS}/{tag}_\d+$"]] for title, tag in tags.items()}
        return layout

    def _new_rows(self, rank: Rank) -> list[Row]:
        shown = self._shown.get(rank.rank, 0.0)
        rows = [row for row in rank.rows if row.at > shown]
        if rows:
            self._shown[rank.rank] = rows[-1].at
        return rows

    def _write_rows(self, rows: dict[int, Row]) -> None:
        step = max(row.step for row in rows.values())
        add = self._whole.add_scalar
        speeds = {rank: row.samples / max(1e-9, row.steps * row.step_s) for rank, row in rows.items()}
        samples = sum(row.samples for row in rows.values())
        add(f"{TRAINING}/step_ms", 1e3 * max(row.step_s for row in rows.values()), step)
        add(f"{TRAINING}/samples_per_s", sum(speeds.values()), step)
        add(f"{TRAINING}/samples_per_s_per_device", sum(speeds.values()) / len(speeds), step)
        scores = straggler_scores(list(rows.values()))
        if len(rows) > MOST_RANKS:
            add(f"{RANKS}/straggler", max(scores), step)
            add(f"{RANKS}/slowest_rank", [*rows][scores.index(max(scores))], step)
        for (rank, row), score in zip(rows.items(), scores, strict=True):
            now = self._run.ranks[rank].now
            scalars = {
                "busy_ms": 1e3 * row.busy_s, "wait_ms": 1e3 * row.mean(*WAITING), "data_ms": 1e3 * row.mean("data"),
                "samples_per_s": speeds[rank], "share": row.samples / max(1, samples),
                "straggler": score,
            }  # fmt: skip
            scalars |= {name: now[name] for name in ("memory_mib", "device_mib", "cpu_cores") if name in now}
            if rank >= MOST_RANKS:
                continue
            writer = self._of_rank(rank)
            for name, value in scalars.items():
                writer.add_scalar(f"{RANKS}/{name}", value, step)
        self._write_gauges()

    def _write_gauges(self) -> None:
        for name, values in self._run.gauges.items():
            if name == "epoch":
                continue
            server = name.startswith("server_")
            tag = f"{SERVERS}/{name.removeprefix('server_')}" if server else f"{TRAINING}/{name}"
            new = [step for step in values if step > self._gauges.get(name, -1)]
            for step in new:
                self._whole.add_scalar(tag, values[step], step)
            self._gauges[name] = max(new, default=self._gauges.get(name, -1))

    def _write_events(self, events: list[Record]) -> None:
        for event in events:
            step = event.get("step", self._run.steps)
            self._whole.add_text(f"events/{event['name']}", event["text"], step)
            self._recovery["steps_again"] += float(event.get("steps_again", 0.0))
            self._recovery["downtime_s"] += float(event.get("silent_s", 0.0))
            if event["name"] == "recovery" and "seconds" in event:
                self._recovery["restarts"] += 1.0
                self._recovery["downtime_s"] += float(event["seconds"])
                for name, value in self._recovery.items():
                    self._whole.add_scalar(f"{RECOVERY}/{name}", value, step)
        self._events += len(events)


def _writer(folder: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(log_dir=str(folder))
