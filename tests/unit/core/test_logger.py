"""Objects with the four methods of a logger."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fabricx as fx
from fabricx.testing import QUIET, TinyModule, tiny_loader


class Four:
    """Records its calls."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def open(self, run_dir: Path) -> None:
        self.told.append("open")

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.told.append((step, sorted(metrics)))

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self.told.append(dict(params))

    def close(self, status: str) -> None:
        self.told.append(status)


def test_an_object_with_four_methods_receives_all_calls_of_a_logger(tmp_path: Path) -> None:
    four = Four()
    options: dict[str, Any] = {**QUIET, "logger": four, "log_every_n_steps": 2}
    trainer = fx.Trainer(max_epochs=1, default_root_dir=tmp_path, **options)
    trainer.fit(TinyModule(), tiny_loader())
    assert four.told == ["open", {"lr": 0.1}, (2, ["epoch", "loss"]), (4, ["epoch", "loss"]), "success"]
    assert trainer.logger is not None
    assert trainer.logger.experiment is four
    assert trainer.logger.name == "Four"


class Three:
    def open(self, run_dir: Path) -> None:
        pass

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        pass

    def close(self, status: str) -> None:
        pass


@pytest.mark.parametrize("wrong", [Three(), Four, "tensorboard"])
def test_objects_that_are_not_loggers_are_refused_with_the_required_methods(wrong: Any) -> None:
    with pytest.raises(ValueError, match="with the methods open, log_metrics, log_hyperparams and close"):
        fx.Trainer(logger=wrong)
