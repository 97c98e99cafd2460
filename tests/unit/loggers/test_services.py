"""Common behaviour of the loggers of tracking services."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from fabricx.core.logger import Ending, Silent
from fabricx.loggers.services import ServiceLogger, Uploads, require


class Service(ServiceLogger):
    def __init__(self, run: Any = None) -> None:
        super().__init__(run)
        self.calls: list[str] = []

    def _start(self, run_dir: Path) -> Any:
        self.calls.append(f"start {run_dir.name}")
        return {"open": True}

    def _end(self, run: Any, status: Ending) -> None:
        self.calls.append(f"end {status}")

    def log_metrics(self, metrics: Any, step: int) -> None: ...


def test_a_missing_client_is_an_error_with_the_command() -> None:
    with pytest.raises(ModuleNotFoundError, match="or pip install package"):
        require("Logger", "no_such_client", "package", "extra")


def test_the_run_is_open_for_the_user_before_and_after_a_fit_and_closed_for_a_worker(tmp_path: Path) -> None:
    logger = Service()
    assert logger.experiment == {"open": True}
    sent = pickle.loads(pickle.dumps(logger))
    assert logger.calls[1:] == ["end success"]
    assert isinstance(sent.experiment, Silent)  # on a rank that does not log
    sent.open(tmp_path)
    sent.open(tmp_path)
    assert sent.experiment == {"open": True}
    sent.close("failed")
    assert sent.calls[2:] == [f"start {tmp_path.name}", "end failed"]
    vars(logger).update(sent.for_caller())
    assert logger.experiment == {"open": True}
    assert logger.calls[2:] == [f"start {tmp_path.name}"]
    logger.close()


def test_a_run_passed_by_the_user_is_not_ended(tmp_path: Path) -> None:
    run = {"of": "user"}
    logger = Service(run)
    logger.open(tmp_path)
    logger.close()
    assert logger.experiment is run
    assert logger.calls == []


def test_a_launched_rank_that_does_not_log_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert isinstance(Service().experiment, Silent)


def test_checkpoints_are_uploaded_once() -> None:
    every, last, none = Uploads("all"), Uploads(True), Uploads(False)
    assert every.after_save(["a"]) == ["a"]
    assert every.after_save(["a", "b"]) == ["b"]
    assert every.at_end() == []
    assert last.after_save(["a"]) == last.after_save(["b"]) == []
    assert last.at_end() == ["b"]
    none.after_save(["a"])
    assert none.at_end() == []


def test_a_checkpoint_that_replaces_another_of_its_name_is_uploaded(tmp_path: Path) -> None:
    uploads, last = Uploads("all"), tmp_path / "last.ckpt"
    last.write_text("1")
    assert uploads.after_save([str(last)]) == [str(last)]
    os.utime(last, (1, 1))
    assert uploads.after_save([str(last)]) == [str(last)]
    assert uploads.after_save([str(last)]) == []
