"""The page of a run: complete, small, and safe to open."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fabricx.telemetry.command import main
from fabricx.telemetry.pages.run_page import write_page
from fabricx.telemetry.pages.sweep_page import write_comparison
from fabricx.telemetry.report import load_run
from tests.unit.telemetry.written import EVIL, HOSTILE, Page, a_hostile_run, a_run


def test_a_page_has_all_sections_and_executes_no_text_of_a_run(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path / "run", seed=3, note=EVIL)
    (run_dir / "checkpoints").mkdir()
    text = write_page(load_run(run_dir)).read_text()
    page = Page(text)
    assert len(text) < 200_000
    assert EVIL not in text
    assert page.tags.count("script") == 3  # the data, the library, the charts
    for expected in (
        "rank 1 is slow in forward: 9.0 ms against 2.0; it costs 78 % of each step", "done", "DDP on 2 ranks",
        "loss", "samples per second, by rank", "balance/share", "Traceback of it", "config.yaml", "checkpoints",
    ):  # fmt: skip
        assert expected in page.text, expected
    assert page.tags.count("svg") >= 5
    assert [len(chart["series"]) for chart in page.data["charts"]] == [1, 2, 2, 2, 1]  # nothing waits for data
    assert [lane["rank"] for lane in page.data["lanes"]] == [0, 1]


def test_a_long_run_still_has_a_small_page(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path / "run", steps=20_000)
    text = write_page(load_run(run_dir)).read_text()
    Page(text)
    assert len(text) < 300_000


def test_the_page_of_a_run_that_has_just_started_states_this(tmp_path: Path) -> None:
    folder = tmp_path / "telemetry"
    folder.mkdir()
    (folder / "worker0-1-a.jsonl").write_text('{"kind": "start", "at": 1, "mono": 0, "rank": 0, "size": 1}\n{"ki')
    text = Page(write_page(load_run(tmp_path)).read_text()).text
    assert "no step is done yet" in text
    assert "the last line is incomplete" in text


def test_a_page_stays_small_for_any_run(tmp_path: Path) -> None:
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
        assert set(seen.tags) <= {*plain.tags, "a", "details", "summary", "pre", "circle", "code"}
        assert "a-secret-value" not in page.read_text()
        assert ("api_key" in seen.text) is (page.parent != sweep)  # a comparison contains only differences
    assert [main(command, [str(runs[0])]) for command in ("report", "status")] == [0, 0]
    assert main("report", [str(sweep)]) == 0
    shown = "".join(capfd.readouterr())
    assert not set(shown) & set("\x1b\x07\x9b")
    assert "a-secret-value" not in shown


def test_links_in_a_run_of_another_user_cause_no_reads_or_writes_of_the_readers_files(
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


def test_the_times_of_a_page_sum_to_the_stated_wall_clock(tmp_path: Path) -> None:
    page = Page(write_page(load_run(a_run(tmp_path))).read_text())
    assert (
        "The activities of each rank add up to the 9.0 s from the first to the newest record of the run." in page.text
    )
    ends = page.data["ends"]["time"]
    for lane in page.data["lanes"]:
        seconds = lane["w"] * sum(count for count, *_ in lane["cells"])
        assert ends[1] <= seconds < ends[1] + lane["w"]
        assert all(99 <= sum(shares[1::2]) <= 101 for _, *shares in lane["cells"])


def test_events_are_marked_and_named_by_paths_within_the_run(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path / "my run")
    where = "/elsewhere/before/it was moved/my run/checkpoints"  # the folder was moved
    events: list[dict[str, Any]] = [
        *({"name": "checkpoint", "text": f"/at/my run/checkpoints/{n}.ckpt is complete", "step": n} for n in range(60)),
        {"name": "checkpoint", "text": f"the checkpoint {where[:10]}/my run/checkpoints/a.ckpt was lost", "step": 60},
        {"name": "recovery", "text": "2 workers continue", "step": 61, "seconds": 2.0, "steps_again": 3},
        {"name": "rebalance", "text": "shares", "step": 62},
    ]
    lines = [json.dumps({"kind": "event", "at": 5.0 + n / 100, "rank": 0, **event}) for n, event in enumerate(events)]
    with open(run_dir / "telemetry" / "worker0-1-a.jsonl", "a") as file:
        file.write("\n".join(lines) + "\n")
    page = Page(write_page(load_run(run_dir)).read_text())
    assert "60 times, the last: checkpoints/59.ckpt is complete" in page.text
    assert "the checkpoint checkpoints/a.ckpt was lost" in page.text
    assert "/at/" not in page.text
    marks = page.data["marks"]
    assert {mark["kind"] for mark in marks} == {"failure", "recovery", "checkpoint", "other"}
    [recovery] = [mark for mark in marks if mark["kind"] == "recovery"]
    assert recovery["step"] == 61
    failures = [mark["time"] for mark in marks if mark["kind"] == "failure"]
    assert recovery["time"] - 2.0 == pytest.approx(max(failures))  # the recovery began with a failure
    assert len(marks) <= 70


def test_the_page_of_a_diverged_run_states_the_divergence(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path)
    values = [{"kind": "metrics", "at": 3.0, "step": n, "values": {"loss": "nan"}} for n in range(51, 60)]
    with open(run_dir / "telemetry" / "worker0-1-a.jsonl", "a") as file:
        file.writelines(json.dumps({**record, "rank": 0}) + "\n" for record in values)
    page = Page(write_page(load_run(run_dir)).read_text())
    assert "9 not finite (NaN or infinite), the first at step 51" in page.text
    [loss] = page.data["charts"][0]["series"]
    assert loss["bad"] == list(range(51, 60))
    assert loss["x"][-1] == 50


def test_each_cell_of_a_table_has_a_label_for_narrow_screens(tmp_path: Path) -> None:
    text = write_page(load_run(a_run(tmp_path))).read_text()
    body = text[text.index("<body>") :]
    cells = [cell.partition(">")[0] for cell in body.split("<td")[1:]]
    assert cells
    assert all("data-label=" in cell or "wide" in cell for cell in cells)
    assert "overflow-x: auto; }" not in text  # nothing is truncated
