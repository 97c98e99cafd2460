"""The profiler's table of times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fabricx as fx
from fabricx.callbacks.profiler import Profiler, table
from fabricx.loggers import CSVLogger
from fabricx.testing import QUIET, TinyModule, tiny_loader


def test_parts_of_the_table_sum_to_its_last_row() -> None:
    lines = table([({"forward": 0.3, "data": 0.1}, 100), ({"forward": 0.4, "backward": 0.2}, 50)]).splitlines()
    rows = [[float(cell) for cell in line.removesuffix(" %").split()[-3:]] for line in lines[1:]]
    assert [sum(column) for column in zip(*rows[:-1], strict=True)] == pytest.approx(rows[-1])
    assert rows[-1] == [4.0, 12.0, 100.0]


def test_a_run_without_a_step_has_a_table() -> None:
    assert table([({}, 0)]).splitlines()[-1].split() == ["all", "0.000", "0.0", "%"]


def test_the_table_is_printed_at_the_end_of_a_run(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {**QUIET, "logger": CSVLogger(), "enable_telemetry": True}
    fx.Trainer(max_steps=2, callbacks=[Profiler()], default_root_dir=own_folder, **options).fit(
        TinyModule(), tiny_loader()
    )
    assert "ms of a step" in capsys.readouterr().out


@pytest.mark.parametrize("options", [{"enable_telemetry": False}, {"logger": False}])
def test_a_run_without_records_prints_that_it_has_no_table(own_folder: Path, options: dict[str, Any]) -> None:
    arguments = {**QUIET, "logger": CSVLogger(), "enable_telemetry": True, **options}
    with pytest.warns(UserWarning, match="nothing is recorded in this run, so no table is printed"):
        fx.Trainer(max_steps=2, callbacks=[Profiler()], default_root_dir=own_folder, **arguments).fit(
            TinyModule(), tiny_loader()
        )
