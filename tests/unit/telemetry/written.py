"""Records of a run, as its processes write them, and a parser of pages."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
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


class Page(HTMLParser):
    """Parser of a page that fails for references to other hosts and for unclosed elements."""

    VOID = ("meta", "br", "img", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.text = ""
        self.tags: list[str] = []
        self.policy = ""
        self.scripts: list[str] = []
        self.data: dict[str, Any] = {}
        self.feed(text)
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            if tag == "meta" and (value or "").startswith("default-src"):
                self.policy = value or ""
            assert not (name in ("src", "href", "xlink:href") and re.match(r"\s*(\w+:|//)", value or "")), (tag, value)
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack[-1:] not in (["script"], ["style"]):
            self.text += data
        elif data.startswith("{"):
            self.data = json.loads(data)
        elif self.stack[-1] == "script":
            self.scripts.append(data)


HOSTILE = (
    EVIL, "'\"><img src=x onerror=alert(1)>", "</pre></summary></title><svg onload=alert(1)>",
    "</script><script>alert(1)</script>", "javascript:alert(1)", "{{ 7 * 7 }}{% for a in b %}", "<!-- ", "]]>",
    "\x1b]0;title\x07\x1b[2J\x9b1m[/red][link=http://a]",
    "&lt;script&gt;", "x' onmouseover='alert(1)",
)  # fmt: skip


def a_hostile_run(run_dir: Path, text: str) -> Path:
    """Write records, a configuration and files with `text` in every text field."""
    folder = run_dir / "telemetry"
    folder.mkdir(parents=True)
    known = dict.fromkeys(("host", "strategy", "device", "precision", "pid"), text)
    records: list[dict[str, Any]] = [
        {"kind": "start", "at": 1.0, "mono": 0.0, "rank": 0, "size": 3, **known},
        {"kind": "now", "at": 2.0, "rank": 0, "memory_mib": 3.0, "still_s": 4.0, "waits": 1, "where": text},
        *({"kind": "metrics", "at": 2.0, "rank": 0, "step": n, "values": {text: 1.0 / n}} for n in (1, 2, 3)),
        *({"kind": "gauges", "at": 2.0, "rank": 0, "step": n, "values": {text: n, f"{text}_1": n}} for n in (1, 2, 3)),
        {"kind": "event", "at": 3.0, "rank": 0, "name": text, "text": f"{text}\n{text}", "step": 7},
        {"kind": "log", "at": 3.0, "rank": 0, "level": "ERROR", "name": text, "text": text},
        {"kind": "closed", "at": 9.0, "ending": text},
        # fabricx never writes such records
        {"kind": text}, {"kind": "start", "rank": text}, {"kind": "event", "at": text},
        {"kind": "event", "text": [text]},
        {"kind": "event", "name": text, "text": text, "seconds": text}, {"kind": "now", "rank": 0, "still_s": text},
        {"kind": "steps", "rank": 0, "steps": [text], "each": 1, "since": 0, "ends_us": [0], "samples": [text],
         "us": {text: [text]}},
        {"kind": "metrics", "step": 1, "values": {"loss": text}}, {"kind": "gauges", "step": text, "values": {}},
        {"kind": "start", "at": 1.0, "rank": 1, "size": 1 << 60}, {"kind": "known", "rank": 0, "cores": text},
    ]  # fmt: skip
    lines = "".join(json.dumps(record) + "\n" for record in records) + "[" * 100_000 + f"\n{text}\n"
    (folder / "worker0-1-a.jsonl").write_text(lines)
    (folder / f"{text.replace('/', ':')}.jsonl").write_text(f"{text}\n{text}")
    config = {text: text, "seed": run_dir.name, "nested": {text: [text]}, "api_key": "a-secret-value"}
    (run_dir / "config.yaml").write_text(json.dumps(config))
    (run_dir / "command.txt").write_text(f"fabricx fit {text} logger.api_key=a-secret-value")
    (run_dir / "versions.json").write_text(text)
    return run_dir
