"""Records of a run, as its processes write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

EVIL = "<script>alert('here')</script>"


def a_run(run_dir: Path, loss: float = 0.5, steps: int = 50, **config: Any) -> Path:
    folder = run_dir / "telemetry"
    folder.mkdir(parents=True)
    for rank in (0, 1):
        forward = [2_000 if rank == 0 else 9_000] * steps
        wait = [7_000 if rank == 0 else 0] * steps
        records: list[dict[str, Any]] = [
            {"kind": "start", "at": 0.0, "mono": 0.0, "rank": rank, "size": 2, "host": "h", "strategy": "DDP"},
            {"kind": "steps", "at": 9.0, "mono": 9.0, "rank": rank, "steps": list(range(1, steps + 1)), "each": 1,
             "since": 1.0, "ends_us": [n * 9_000 for n in range(steps)], "samples": [8] * steps,
             "us": {"forward": forward, "wait": wait}},
        ]  # fmt: skip
        if rank == 0:
            records += [
                {"kind": "metrics", "at": 2.0, "rank": 0, "step": n, "values": {"loss": loss / n, "epoch": 0.0}}
                for n in range(1, steps + 1)
            ]
            records += [
                {"kind": "gauges", "at": 2.0, "rank": 0, "step": n, "values": {"balance/share_0": 0.6}} for n in (5, 9)
            ]
            text = f"worker 1: {EVIL}\nTraceback of it\n{EVIL}"
            records.append({"kind": "event", "at": 3.0, "rank": 0, "name": "death", "text": text, "step": 7})
            records.append({"kind": "log", "at": 3.0, "rank": 0, "level": "WARNING", "name": "own", "text": EVIL})
        lines = [json.dumps({"run": "a", **record}) + "\n" for record in records]
        (folder / f"worker{rank}-1-a.jsonl").write_text("".join(lines))
    (folder / "launcher-1-a.jsonl").write_text('{"kind": "closed", "at": 9.0, "ending": "success"}\n')
    if config:
        (run_dir / "config.yaml").write_text(json.dumps(config))
    return run_dir
