"""Runs of a sweep: differences, and the best run."""

from __future__ import annotations

from pathlib import Path

import pytest

from fabricx.telemetry.report import load_run, runs_in
from fabricx.telemetry.sweep import comparison, sweep_of
from tests.unit.telemetry.written import a_run


def test_runs_of_a_sweep_are_compared_by_their_differences(tmp_path: Path) -> None:
    a_run(tmp_path / "0", loss=0.5, module={"lr": 0.1}, seed=1)
    a_run(tmp_path / "1", loss=0.25, module={"lr": 0.01}, seed=1)
    (tmp_path / "notes").mkdir()
    runs = [load_run(run) for run in runs_in(tmp_path)]
    header, rows = comparison(runs)
    assert header == ["run", "module.lr", "loss", "state"]
    assert rows == [["0", "0.1", "0.01", "done"], ["1", "0.01", "0.005", "done"]]
    for name in ("0", "1"):  # started from Python: arguments of the trainer and the module
        (tmp_path / name / "config.yaml").rename(tmp_path / name / "arguments.yaml")
    assert comparison(runs) == (header, rows)


def test_an_invalid_yaml_configuration_does_not_end_the_report(tmp_path: Path) -> None:
    for number, text in enumerate([b"a: [", b"- 1", b"\xff\xfe", b"!!python/object/apply:os.abort []", b"[" * 5000]):
        run_dir = a_run(tmp_path / str(number))
        (run_dir / "config.yaml").write_bytes(text)
        assert comparison([load_run(run_dir)])[1][0][0] == str(number)


def test_a_configuration_with_nested_aliases_does_not_exhaust_memory(tmp_path: Path) -> None:
    levels = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 40))
    runs = [a_run(tmp_path / name) for name in ("a", "b")]
    for run_dir in runs:
        (run_dir / "config.yaml").write_text(f"a0: &a0 {run_dir.name}\n{levels}\n")
    assert comparison([load_run(run_dir) for run_dir in runs])[0][0] == "run"


@pytest.mark.parametrize(("mode", "best"), [("min", "1"), ("max", "0")])
def test_the_best_run_has_the_best_configured_metric_and_curves_are_named_by_differences(
    tmp_path: Path, mode: str, best: str
) -> None:
    for name, loss, lr in (("0", 0.5, 0.1), ("1", 0.25, 0.01), ("2", float("nan"), 0.001)):
        a_run(tmp_path / name, loss=loss, module={"lr": lr}, default_root_dir=name, monitor="loss", mode=mode)
    sweep = sweep_of([load_run(run) for run in runs_in(tmp_path)])
    assert (sweep.monitor, sweep.mode, sweep.keys) == ("loss", mode, ["module.lr"])
    assert [entry.label for entry in sweep.entries] == ["lr=0.1", "lr=0.01", "lr=0.001"]
    assert sweep.best is not None
    assert sweep.best.loaded.run_dir.name == best


def test_runs_with_equal_values_are_named_by_their_folders(tmp_path: Path) -> None:
    for name, lr in (("a", 0.1), ("b", 0.1), ("c", 0.2)):
        a_run(tmp_path / name, module={"lr": lr})
    sweep = sweep_of([load_run(run) for run in runs_in(tmp_path)])
    assert [entry.label for entry in sweep.entries] == ["a: lr=0.1", "b: lr=0.1", "c: lr=0.2"]
    assert sweep.monitor == "loss"  # without a setting: the lowest loss


def test_values_that_only_some_runs_have_are_in_the_table_and_not_in_the_names(tmp_path: Path) -> None:
    a_run(tmp_path / "0", strategy={"name": "ddp", "bucket_mib": 25.0})
    a_run(tmp_path / "1", strategy={"name": "single"})
    sweep = sweep_of([load_run(run) for run in runs_in(tmp_path)])
    assert sweep.keys == ["strategy.bucket_mib", "strategy.name"]
    assert sweep.varied == ["strategy.name"]
    assert [entry.label for entry in sweep.entries] == ["name=ddp", "name=single"]


def test_runs_of_the_command_and_of_scripts_are_compared_by_values(tmp_path: Path) -> None:
    a_run(tmp_path / "0", module={"lr": 0.1}, trainer={"max_epochs": 3, "precision": "32-true"}, seed=0)
    a_run(tmp_path / "1", module={"lr": 0.1}, trainer={"max_epochs": 4, "precision": "32-true"}, seed=0)
    a_run(tmp_path / "2", module={"lr": 0.2}, trainer={"max_epochs": 4})
    (tmp_path / "2" / "config.yaml").rename(tmp_path / "2" / "arguments.yaml")
    sweep = sweep_of([load_run(run) for run in runs_in(tmp_path)])
    assert sweep.keys == ["module.lr", "trainer.max_epochs"]


def test_a_long_name_of_a_run_ends_with_dots(tmp_path: Path) -> None:
    for name in ("0", "1"):
        a_run(tmp_path / name, module={"note": name * 300})
    for entry in sweep_of([load_run(run) for run in runs_in(tmp_path)]).entries:
        assert len(entry.label) == 160
        assert entry.label.endswith("...")
