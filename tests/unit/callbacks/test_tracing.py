"""Selection of the traced steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fabricx as fx
from fabricx.callbacks import Tracing
from fabricx.testing import QUIET, TinyModule, tiny_loader
from tests.unit.telemetry.test_trace import check_trace

LOGGING: dict[str, Any] = {**QUIET, "enable_checkpointing": True}


def spans(root: Path, **options: Any) -> list[str]:
    trainer = fx.Trainer(max_epochs=1, default_root_dir=root, **{**LOGGING, **options})
    trainer.fit(TinyModule(), tiny_loader(40, 4))
    assert trainer.run_dir is not None
    events = check_trace(trainer.run_dir / "trace.json")
    json.dumps(events)
    return [event["name"] for event in events if event["ph"] == "X" and event["tid"] == 0]


def test_all_traces_all_steps(tmp_path: Path) -> None:
    names = spans(tmp_path, profiler="trace")
    assert names.count("forward") == names.count("optimizer") == 10


def test_only_the_requested_steps_are_traced(tmp_path: Path) -> None:
    names = spans(tmp_path, callbacks=[Tracing(steps=[4, 6])])
    assert names.count("forward") == names.count("optimizer") == 3


@pytest.mark.parametrize("window", [[3], [5, 4], [0, 2]])
@pytest.mark.parametrize("name", ["steps", "operators"])
def test_an_invalid_window_is_refused(name: str, window: list[int]) -> None:
    with pytest.raises(ValueError, match=f"{name}="):
        Tracing(**{name: window})


@pytest.mark.parametrize("options", [{"enable_telemetry": False}, {"enable_checkpointing": False}])
def test_a_run_that_records_nothing_is_refused_before_training(options: dict[str, Any], tmp_path: Path) -> None:
    trainer = fx.Trainer(max_epochs=1, default_root_dir=tmp_path, callbacks=[Tracing()], **{**LOGGING, **options})
    with pytest.raises(ValueError, match="nothing is recorded in this run"):
        trainer.fit(TinyModule(), tiny_loader())
    assert list(tmp_path.iterdir()) == []


def test_a_profiler_of_another_name_is_an_error_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"Did you mean 'simple'"):
        fx.Trainer(profiler="simpel")


def test_the_simple_profiler_prints_a_table_of_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fx.Trainer(max_epochs=1, default_root_dir=tmp_path, profiler="simple", **LOGGING).fit(TinyModule(), tiny_loader())
    shown = capsys.readouterr().out
    assert "ms of a step" in shown
    assert "forward" in shown
    assert "100.0 %" in shown
