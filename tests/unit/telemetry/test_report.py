"""The page of a run and of a sweep: whole, small, and safe to open."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fabricx.telemetry.command import main
from fabricx.telemetry.report import comparison, load_run, runs_in, write_comparison, write_page
from tests.unit.telemetry.written import EVIL, a_run


class Page(HTMLParser):
    """Parser of a page that fails for references to other hosts and for unclosed elements."""

    VOID = ("meta", "br", "img", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.text = ""
        self.tags: list[str] = []
        self.feed(text)
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            assert not (name in ("src", "href", "xlink:href") and re.match(r"\s*(\w+:|//)", value or "")), (tag, value)
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_has_all_there_is_and_runs_nothing_that_a_run_has_written(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path / "run", seed=3, note=EVIL)
    (run_dir / "checkpoints").mkdir()
    text = write_page(load_run(run_dir)).read_text()
    page = Page(text)
    assert len(text) < 100_000
    assert EVIL not in text
    assert "script" not in page.tags
    for expected in (
        "rank 1 is slow in forward: 9.0 ms against 2.0; it costs 78 % of each step", "done", "DDP on 2 ranks",
        "loss", "samples per second, by rank", "balance/share", "Traceback of it", "config.yaml", "checkpoints",
    ):  # fmt: skip
        assert expected in page.text, expected
    assert page.tags.count("svg") >= 5


def test_a_long_run_still_has_a_small_page(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path / "run", steps=20_000)
    text = write_page(load_run(run_dir)).read_text()
    Page(text)
    assert len(text) < 300_000


def test_a_page_of_a_run_that_has_just_begun_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "telemetry"
    folder.mkdir()
    (folder / "worker0-1-a.jsonl").write_text('{"kind": "start", "at": 1, "mono": 0, "rank": 0, "size": 1}\n{"ki')
    text = Page(write_page(load_run(tmp_path)).read_text()).text
    assert "no step is done yet" in text
    assert "the last line is incomplete" in text


def test_runs_of_a_sweep_are_compared_by_what_differs(tmp_path: Path) -> None:
    a_run(tmp_path / "0", loss=0.5, module={"lr": 0.1}, seed=1)
    a_run(tmp_path / "1", loss=0.25, module={"lr": 0.01}, seed=1)
    (tmp_path / "notes").mkdir()
    runs = [load_run(run) for run in runs_in(tmp_path)]
    header, rows = comparison(runs)
    assert header == ["run", "module.lr", "loss", "state"]
    assert rows == [["0", "0.1", "0.01", "done"], ["1", "0.01", "0.005", "done"]]
    page = Page(write_comparison(tmp_path, runs).read_text())
    assert page.tags.count("polyline") == 2
    for name in ("0", "1"):  # started from Python: arguments of the trainer and the module
        (tmp_path / name / "config.yaml").rename(tmp_path / name / "arguments.yaml")
    assert comparison(runs) == (header, rows)


def test_a_page_stays_small_whatever_a_run_has_done(tmp_path: Path) -> None:
    folder = tmp_path / "telemetry"
    folder.mkdir()
    text = "x" * 5_000
    for rank in range(64):
        records: list[dict[str, Any]] = [
            {"kind": "start", "at": 0.0, "mono": 0.0, "rank": rank, "size": 64, "host": "h", "strategy": "DDP"},
            {"kind": "steps", "at": 9.0, "mono": 9.0, "rank": rank, "steps": list(range(1, 2001)), "each": 1,
             "since": 1.0, "ends_us": list(range(2000)), "samples": [8] * 2000, "us": {"forward": [2_000] * 2000}},
            *({"kind": "log", "at": 3.0, "rank": rank, "level": "WARNING", "name": "own", "text": f"{rank} {n} {text}"}
              for n in range(20)),
        ]  # fmt: skip
        if rank == 0:
            records += [
                {
                    "kind": "metrics",
                    "at": 2.0,
                    "rank": 0,
                    "step": n,
                    "values": {f"m{m}": n * 1.234567 for m in range(60)},
                }
                for n in range(300)
            ]
            gauges = {f"balance/{name}_{rank}": 0.123456 for name in ("share", "wait") for rank in range(64)}
            records += [{"kind": "gauges", "at": 2.0, "rank": 0, "step": n, "values": gauges} for n in range(300)]
            records += [
                {"kind": "event", "at": 3.0, "rank": 0, "name": "hang", "text": f"{n}\n{text}", "step": n}
                for n in range(500)
            ]
        lines = [json.dumps({"run": "a", **record}) + "\n" for record in records]
        (folder / f"worker{rank}-1-a.jsonl").write_text("".join(lines))
    page = write_page(load_run(tmp_path)).read_text()
    Page(page)
    assert len(page) < 1_000_000


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


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_in_every_field_stays_text(tmp_path: Path, text: str, capfd: pytest.CaptureFixture[str]) -> None:
    sweep = tmp_path / "sweep"
    runs = [a_hostile_run(sweep / f"{number}{text.replace('/', ':')}", text) for number in (1, 2)]
    runs.append(a_hostile_run(sweep / text.replace("/", ":"), text))
    plain = Page(write_page(load_run(a_run(tmp_path / "plain", seed=3))).read_text())
    for page in (
        *(write_page(load_run(run)) for run in runs),
        write_comparison(sweep, [load_run(run) for run in runs]),
    ):
        seen = Page(page.read_text())
        assert set(seen.tags) <= {*plain.tags, "a", "details", "summary", "pre", "circle"}
        assert "a-secret-value" not in page.read_text()
        assert ("api_key" in seen.text) is (page.parent != sweep)  # a comparison contains only differences
    assert [main(command, [str(runs[0])]) for command in ("report", "status")] == [0, 0]
    assert main("report", [str(sweep)]) == 0
    shown = "".join(capfd.readouterr())
    assert not set(shown) & set("\x1b\x07\x9b")
    assert "a-secret-value" not in shown


def test_a_configuration_that_is_no_yaml_does_not_end_the_report(tmp_path: Path) -> None:
    for number, text in enumerate([b"a: [", b"- 1", b"\xff\xfe", b"!!python/object/apply:os.abort []", b"[" * 5000]):
        run_dir = a_run(tmp_path / str(number))
        (run_dir / "config.yaml").write_bytes(text)
        Page(write_page(load_run(run_dir)).read_text())
        assert comparison([load_run(run_dir)])[1][0][0] == str(number)


def test_links_in_a_run_of_another_user_lead_a_reader_neither_to_read_nor_to_overwrite_own_files(
    tmp_path: Path,
) -> None:
    private = tmp_path / "private"
    private.write_text("private: of-the-reader")
    run_dir = a_run(tmp_path / "run")
    for name in ("config.yaml", "report.html"):
        (run_dir / name).symlink_to(private)
    (run_dir / "telemetry" / "worker7-1-a.jsonl").symlink_to(private)
    os.mkfifo(run_dir / "versions.json")
    page = write_page(load_run(run_dir))
    assert "of-the-reader" not in page.read_text()
    assert not page.is_symlink()
    assert private.read_text() == "private: of-the-reader"
    assert sorted(path.name for path in run_dir.iterdir() if path.name.startswith(".")) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link to another user")
def test_a_folder_to_which_another_users_link_leads_is_not_read(tmp_path: Path) -> None:
    private = a_run(tmp_path / "own")
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    for name, user in (("mine", 0), ("theirs", 65534)):
        (sweep / name).symlink_to(private)
        os.lchown(sweep / name, user, user)
    assert [path.name for path in runs_in(sweep)] == ["mine"]
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "telemetry").symlink_to(private / "telemetry")
    assert load_run(theirs).run.steps > 0
    os.lchown(theirs / "telemetry", 65534, 65534)
    assert load_run(theirs).run.steps == 0


def test_a_configuration_that_names_a_part_again_and_again_does_not_fill_the_memory(tmp_path: Path) -> None:
    levels = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 40))
    runs = [a_run(tmp_path / name) for name in ("a", "b")]
    for run_dir in runs:
        (run_dir / "config.yaml").write_text(f"a0: &a0 {run_dir.name}\n{levels}\n")
    assert comparison([load_run(run_dir) for run_dir in runs])[0][0] == "run"
