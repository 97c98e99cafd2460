"""Strategies, loggers and callbacks from names, flags and objects."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import ListConfig, OmegaConf

import fabricx as fx
from fabricx.callbacks import LearningRateMonitor, ModelCheckpoint, ProgressBar
from fabricx.callbacks.model_checkpoint import Checkpoint
from fabricx.core.logger import Adapted
from fabricx.core.strategy_parts import Elastic, KeepsLocalState
from fabricx.loggers import CSVLogger, TensorBoardLogger
from fabricx.strategies import DDP, FSDP, Reproducible, Single
from fabricx.trainer.factory import choose_callbacks, choose_loggers, choose_strategy


@pytest.mark.parametrize(
    ("strategy", "devices", "nodes", "chosen"),
    [
        ("auto", 1, 1, Single), ("auto", 2, 1, DDP), ("auto", 1, 2, DDP), ("ddp", 1, 1, DDP), ("fsdp", 2, 1, FSDP),
        ("fabricx.strategies.fsdp.FSDP", 2, 1, FSDP),
    ],
)  # fmt: skip
def test_a_strategy_is_chosen_by_name_or_by_the_number_of_ranks(
    strategy: str, devices: int, nodes: int, chosen: type
) -> None:
    assert type(choose_strategy(strategy, devices, nodes)) is chosen


class Apart(fx.Strategy):
    """Weights differ by rank."""

    traits = fx.Traits(synchronous=False)


def test_weights_that_differ_by_rank_need_a_method_that_makes_them_equal() -> None:
    with pytest.raises(ValueError, match=r"Apart declares synchronous=False, so weights differ .* has no synchronize"):
        choose_strategy(Apart(), 2, 1)
    choose_strategy(type("Joined", (Apart,), {"synchronize": lambda self, copies=None, ends=False: None})(), 2, 1)


@pytest.mark.parametrize("strategy", ["auto", "ddp", "single"])
@pytest.mark.parametrize("devices", [1, 3])
def test_elastic_determinism_replaces_averaging_strategies(strategy: str, devices: int) -> None:
    assert type(choose_strategy(strategy, devices, 1, reproducible=True)) is Reproducible
    with pytest.raises(ValueError, match="set strategy to 'auto' or 'ddp', instead of FSDP"):
        choose_strategy("fsdp", devices, 1, reproducible=True)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("single", r"supports 1 rank, but devices=2 and num_nodes=1 require 2; set strategy='ddp', or devices=1"),
        (DDP, "is not a fabricx.Strategy"),
        ("fabricx.core.callback.Callback", "is not a fabricx.Strategy"),
    ],
)
def test_an_unsuitable_strategy_for_the_number_of_ranks_is_an_error(strategy: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_strategy(strategy, 2, 1)


class FourMethods:
    def open(self, run_dir: Any) -> None: ...
    def log_metrics(self, metrics: Any, step: int) -> None: ...
    def log_hyperparams(self, params: Any, metrics: Any = None) -> None: ...
    def close(self) -> None: ...


def test_loggers_are_flags_objects_and_lists() -> None:
    custom, csv = FourMethods(), CSVLogger()
    assert [type(logger) for logger in choose_loggers(True)] == [TensorBoardLogger]
    assert choose_loggers(False) == choose_loggers(None) == choose_loggers([]) == []
    for listed in (
        (csv, custom),
        OmegaConf.create([csv, custom], flags={"allow_objects": True}),
    ):  # Hydra's instantiate
        first, second = choose_loggers(listed)
        assert first is csv
        assert isinstance(second, Adapted)


@pytest.mark.parametrize("wrong", [CSVLogger, FourMethods, "csv", object()])
def test_objects_that_are_not_loggers_are_an_error_that_names_the_methods(wrong: Any) -> None:
    with pytest.raises(
        ValueError,
        match="with the methods open, log_metrics, log_hyperparams and close",
    ):
        choose_loggers([wrong])


DEFAULTS = {"model_checkpoint": {}, "progress_bar": {"refresh_rate": 3}}


def test_defaults_are_added_unless_the_user_has_such_a_callback() -> None:
    custom = ProgressBar()
    assert [type(callback) for callback in choose_callbacks(None, DEFAULTS)] == [
        ProgressBar, ModelCheckpoint,
    ]  # fmt: skip
    chosen = choose_callbacks([custom, "learning_rate_monitor"], {"progress_bar": {}})
    assert chosen[0] is custom
    assert [type(callback) for callback in chosen[1:]] == [LearningRateMonitor]
    assert choose_callbacks(ListConfig([custom], flags={"allow_objects": True}), {}) == [custom]


def test_checkpoint_callbacks_are_last_and_a_users_class_replaces_the_default() -> None:
    class Several(Checkpoint):
        def __init__(self) -> None:
            self.parts = [ModelCheckpoint(), ModelCheckpoint(monitor="loss")]

    class Bar(fx.Callback):
        trainer_role = "progress_bar"

    several, bar = Several(), Bar()
    assert choose_callbacks([several, bar, custom := LearningRateMonitor()], DEFAULTS) == [bar, custom, several]
    trainer = fx.Trainer(callbacks=[several], enable_progress_bar=False, logger=False)
    assert trainer.checkpoint_callbacks == [several]


def test_objects_that_are_not_callbacks_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"contains 3, which is not a fabricx.Callback"):
        choose_callbacks([3], {})
    with pytest.raises(ValueError, match=r"not a fabricx.Callback: pass it as logger="):
        choose_callbacks([fx.loggers.CSVLogger()], {})
    with pytest.raises(LookupError, match="Did you mean 'early_stopping'"):
        choose_callbacks("early_stoping", {})


def test_an_elastic_strategy_must_declare_how_it_continues_with_other_ranks() -> None:
    class Grows(fx.Strategy):
        traits = fx.Traits(elastic=True)

    with pytest.raises(ValueError, match=r"inherit fabricx\.core\.strategy_parts\.Elastic and implement"):
        choose_strategy(Grows(), 2, 1)


@pytest.mark.parametrize(
    ("part", "message"), [(Elastic, "implement world_changed"), (KeepsLocalState, "implement local_state_dict")]
)
def test_methods_without_a_default_have_to_be_implemented(part: type, message: str) -> None:
    made = type("Mine", (fx.Strategy, part), {})
    with pytest.raises(ValueError, match=f"Mine inherits {part.__name__}: {message}"):
        choose_strategy(made(), 2, 1)
