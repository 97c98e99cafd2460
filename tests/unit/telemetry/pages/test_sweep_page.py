"""The page of a sweep: the best run, metric against values, parallel coordinates."""

from __future__ import annotations

from pathlib import Path

from fabricx.telemetry.pages.sweep_page import axis_of, parallel, scatters, write_comparison
from fabricx.telemetry.report import load_run, runs_in
from fabricx.telemetry.sweep import Sweep, sweep_of
from tests.unit.telemetry.written import Page, a_run


def a_sweep(folder: Path) -> Sweep:
    for number, (loss, lr, name) in enumerate([(0.5, 0.1, "adam"), (0.25, 0.001, "sgd"), (0.75, 0.01, "sgd")]):
        a_run(folder / str(number), loss=loss, module={"lr": lr, "optimizer": name}, monitor="loss", mode="min")
    return sweep_of([load_run(run) for run in runs_in(folder)])


def test_the_page_names_the_best_run_and_links_all_charts_of_a_run(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path)
    text = write_comparison(tmp_path, [entry.loaded for entry in sweep.entries]).read_text()
    page = Page(text)
    assert "Best by loss (lowest last value): loss = 0.005 with lr=0.001, optimizer=sgd, run 1" in page.text
    assert text.count('data-run="1"') == 1 + 2 + 1  # row of the table, a point for each value, a line
    [chart] = page.data["charts"]
    assert [series["n"] for series in chart["series"]] == [entry.label for entry in sweep.entries]
    assert [series.get("best", 0) for series in chart["series"]] == [0, 1, 0]


def test_each_value_has_a_chart_with_a_point_for_each_run(tmp_path: Path) -> None:
    pictures = scatters(a_sweep(tmp_path))
    assert [picture["title"] for picture in pictures] == ["loss against lr", "loss against optimizer"]
    assert all(picture["svg"].count('class="point') == 3 for picture in pictures)
    assert [tick.text for tick in pictures[1]["x_ticks"]] == ["adam", "sgd"]
    assert [tick.text for tick in pictures[0]["x_ticks"]] == ["0.001", "0.01", "0.1"]


def test_parallel_coordinates_have_a_line_for_each_run_and_the_best_on_top(tmp_path: Path) -> None:
    picture = parallel(a_sweep(tmp_path))
    assert picture is not None
    assert [axis.text for axis in picture["axes"]] == ["lr", "optimizer", "loss"]
    lines = [line for line in picture["svg"].split("<path ") if 'class="path' in line]
    assert len(lines) == 3
    assert " best" in lines[-1]


def test_an_axis_is_logarithmic_for_values_of_different_magnitude() -> None:
    assert [round(position or 0.0, 3) for position in axis_of(["0.1", "0.001", "0.01"]).places] == [1.0, 0.0, 0.5]
    assert axis_of(["10", "20", None]).places == [0.0, 1.0, None]
    assert axis_of(["True", "False"]).places == [1.0, 0.0]
    assert axis_of(["3", "3"]).places == [0.5, 0.5]
    many = axis_of([f"name {n}" for n in range(100)])
    assert len(many.ticks) <= 12


def test_runs_without_results_are_compared_without_charts(tmp_path: Path) -> None:
    for name in ("a", "b"):
        folder = tmp_path / name / "telemetry"
        folder.mkdir(parents=True)
        (folder / "worker0-1-a.jsonl").write_text('{"kind": "start", "at": 1, "mono": 0, "rank": 0, "size": 1}\n')
    page = Page(write_comparison(tmp_path, [load_run(run) for run in runs_in(tmp_path)]).read_text())
    assert "No metric to rank the runs by" in page.text


def test_few_runs_with_many_differences_have_a_column_each(tmp_path: Path) -> None:
    for number in range(3):
        a_run(tmp_path / str(number), module={f"value_{n}": n * number for n in range(1, 20)})
    text = write_comparison(tmp_path, [load_run(run) for run in runs_in(tmp_path)]).read_text()
    table = text[text.index("<tbody>") : text.index("</tbody>")]
    assert table.count("<tr>") == 19 + 2  # each value, the loss and the state
    assert table.count('data-label="2"') == 19 + 2
    Page(text)
