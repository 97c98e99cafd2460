"""The configuration consists of constructor arguments, and creates the objects of these constructors."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml

import fabricx as fx
from fabricx import plugins
from fabricx.callbacks import EarlyStopping
from fabricx.config import TrainerConfig, build, configuration_of
from fabricx.demo.digits import DigitsClassifier
from fabricx.strategies import DDP

CONF = Path(__file__).parents[2] / "conf"
GIVEN: dict[str, Any] = {
    "trainer": {"max_epochs": 1},
    "module": {"_target_": "fabricx.demo.digits.DigitsClassifier", "hidden": 8},
    "data": {"_target_": "fabricx.demo.digits.DigitsData"},
    "strategy": {"name": "ddp", "bucket_mib": 5.0},
    "callbacks": {"early_stopping": {"monitor": "val_loss"}, "ema": None},
    "logger": {},
}


def test_the_trainer_group_has_the_trainers_arguments_and_defaults() -> None:
    own_groups = {"self", "strategy", "launcher", "callbacks", "logger"}
    signature = inspect.signature(fx.Trainer).parameters.items()  # as notebooks and editors show it
    expected = {name: parameter.default for name, parameter in signature if name not in own_groups}
    assert {field.name: field.default for field in dataclasses.fields(TrainerConfig)} == expected


@pytest.mark.parametrize("path", sorted((CONF / "strategy").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_strategys_file_has_its_arguments_and_defaults(path: Path) -> None:
    options = yaml.safe_load(path.read_text())
    name = options.pop("name")
    if name != "auto":
        signature = inspect.signature(plugins.find("strategies", name)).parameters.items()
        assert options == {key: parameter.default for key, parameter in signature}


def test_a_configuration_becomes_objects() -> None:
    trainer, module, data = build(GIVEN)
    assert isinstance(trainer.strategy, DDP)
    assert trainer.strategy.bucket_mib == 5.0
    assert isinstance(module, DigitsClassifier)
    assert isinstance(data, fx.DataModule)
    assert any(isinstance(callback, EarlyStopping) for callback in trainer.callbacks)
    assert trainer.loggers == []


@pytest.mark.parametrize("saves", [True, False])
def test_disabled_checkpoints_exclude_the_default_callback_group(saves: bool) -> None:
    callbacks = {"model_checkpoint": {"save_top_k": 1}, "early_stopping": {"monitor": "val_loss"}}
    switch = {} if saves else {"enable_checkpointing": False}
    trainer, _, _ = build({**GIVEN, "trainer": {**GIVEN["trainer"], **switch}, "callbacks": callbacks})
    assert (trainer.checkpoint_callback is not None) is saves
    assert any(isinstance(callback, EarlyStopping) for callback in trainer.callbacks)


@pytest.mark.parametrize(
    ("group", "node", "message"),
    [
        ("module", {"_target_": "fabricx.demo.digits.DigitsClassifier", "hiden": 1}, "Did you mean 'hidden'"),
        ("module", {}, "module is not set: choose a module"),
        ("module", {"_target_": "nowhere.Net"}, "nowhere.Net can't be imported"),
        ("strategy", {"name": "ddp", "bucket_mb": 1}, "Did you mean 'bucket_mib'"),
        ("callbacks", {"early_stoping": {}}, "Did you mean 'early_stopping'"),
        ("callbacks", {"ema": {"decy": 1}}, "Did you mean 'decay'"),
        ("module", {**GIVEN["module"], "lr": "fast"}, "module.lr='fast' is of type str, and DigitsClassifier"),
        ("strategy", {"name": "ddp", "bucket_mib": "big"}, "strategy.bucket_mib='big'"),
        ("callbacks", {"ema": {"decay": "slow"}}, "callbacks.ema.decay='slow'"),
        ("logger", {"mine": {"_target_": "fabricx.loggers.CSVLogger", "version": [3]}}, r"logger.mine.version=\[3\]"),
    ],
)
def test_a_wrong_key_or_value_is_an_error_that_names_it(group: str, node: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, LookupError), match=message):
        build({**GIVEN, group: node})


def test_a_resumed_run_reads_numbers_as_the_command_does(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"module": {"lr": 0.1, "sizes": [1], "name": "a"}}))
    config = configuration_of(tmp_path, ["module.lr=1e-3", "module.sizes=[2, 3]", "module.name=b"])
    assert config["module"] == {"lr": 0.001, "sizes": [2, 3], "name": "b"}
