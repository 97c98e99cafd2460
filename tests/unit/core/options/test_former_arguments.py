"""Arguments as Lightning's users pass them: former names and their successors, None as default, barebones."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest

import fabricx as fx
from fabricx.core.options import former_arguments
from fabricx.core.options.former_arguments import _BARE, FORMER_ARGUMENTS, former_strategy
from fabricx.core.options.trainer_options import TrainerOptions
from fabricx.testing import TinyModule, tiny_loader

PARAMETERS = list(inspect.signature(TrainerOptions.__init__).parameters.values())[1:]
OBJECTS = {"logger", "callbacks"}  # created anew for each Trainer


@pytest.mark.parametrize("name", FORMER_ARGUMENTS)
def test_a_former_argument_names_its_successor(name: str) -> None:
    with pytest.raises(TypeError, match=f"Trainer has no argument '{name}': ."):
        fx.Trainer(**{name: 1})  # type: ignore[arg-type]


def test_successors_are_arguments_of_the_trainer() -> None:
    known = {parameter.name for parameter in PARAMETERS}
    assert not known & set(FORMER_ARGUMENTS)
    for text in FORMER_ARGUMENTS.values():
        words = text.removeprefix("set ").partition("=")[0].split()
        assert not text.startswith("set ") or words[0] in (*known, "it", "the"), text


def test_none_is_the_default_of_every_argument() -> None:
    with_none: Any = fx.Trainer(**{parameter.name: None for parameter in PARAMETERS})  # type: ignore[arg-type]
    default: Any = fx.Trainer()
    for name in vars(TrainerOptions()):
        if name != "check_val_every_n_epoch":
            assert getattr(with_none, name) == getattr(default, name), name
    assert with_none.check_val_every_n_epoch is None
    assert [type(part) for part in with_none.loggers + with_none.callbacks] == [
        type(part) for part in default.loggers + default.callbacks
    ]


def test_one_is_explained_for_batches_and_for_fractions(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(former_arguments._LOG, "info", lambda text, *values: logged.append(text % values))
    fx.Trainer(limit_train_batches=1, limit_val_batches=1.0, overfit_batches=None, val_check_interval=1)
    fx.Trainer(limit_train_batches=2, fast_dev_run=True, limit_val_batches=0.5)
    assert logged == [
        "`Trainer(limit_train_batches=1)` was configured so 1 batch of each loader is used",
        "`Trainer(limit_val_batches=1.0)` was configured so 100% of the batches of each loader are used",
        "`Trainer(val_check_interval=1)` was configured so validation will run after each training batch",
    ]
    assert fx.Trainer(fast_dev_run=1).fast_dev_run is True


def test_plugins_are_replaced_by_other_arguments() -> None:
    assert fx.Trainer(plugins=[]).precision == "32-true"
    with pytest.raises(ValueError, match=r"precision plugins are Trainer\(precision=\.\.\.\)"):
        fx.Trainer(plugins=[object()])


def test_barebones_trains_without_features_that_cost_time(tmp_path: Any) -> None:
    class Logs(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", 1.0, prog_bar=True)
            self.log_dict({"other": 2.0})
            return super().training_step(batch, batch_idx)

    trainer = fx.Trainer(barebones=True, max_epochs=1, default_root_dir=tmp_path)
    with pytest.warns(UserWarning, match=r"barebones=True\): self.log has no effect"):
        trainer.fit(Logs(), tiny_loader(), tiny_loader())
    assert trainer.global_step == len(tiny_loader())
    assert (trainer.callbacks, trainer.loggers, trainer.callback_metrics) == ([], [], {})
    assert (trainer.num_sanity_val_steps, trainer.log_every_n_steps, trainer.enable_telemetry) == (0, 0, False)
    assert not [*tmp_path.rglob("*.ckpt"), *tmp_path.rglob("telemetry")]


@pytest.mark.parametrize("name", _BARE)
def test_barebones_refuses_features_that_cost_time(name: str) -> None:
    value = {"profiler": "simple", "log_every_n_steps": 5, "num_sanity_val_steps": 1}.get(name, True)
    with pytest.raises(ValueError, match=f"Trainer\\(barebones=True, {name}={value!r}\\): barebones turns off"):
        fx.Trainer(barebones=True, **{name: value})
    assert fx.Trainer(barebones=True, **{name: _BARE[name]}).barebones


def test_lightnings_accelerators_and_profilers_are_accepted_by_class() -> None:
    def of_class(name: str) -> Any:
        return type(name, (), {})()

    assert fx.Trainer(accelerator=of_class("CPUAccelerator")).accelerator == "cpu"
    assert fx.Trainer(profiler=of_class("SimpleProfiler")).profiler == "simple"
    assert fx.Trainer(profiler=of_class("PassThroughProfiler")).profiler == ""
    for name in ("tpu", "hpu", "ipu"):
        with pytest.raises(ValueError, match=f"accelerator='{name}' is unknown. fabricx runs on CPUs, CUDA and MPS"):
            fx.Trainer(accelerator=name)
    for profiler in ("pytorch", of_class("PyTorchProfiler")):
        with pytest.raises(ValueError, match=r"adds torch's operators of these steps"):
            fx.Trainer(profiler=profiler)
    with pytest.raises(ValueError, match='profiler="simple" prints a table'):
        fx.Trainer(profiler="advanced")


@pytest.mark.parametrize("precision", [16, "16", "bf16", 32, "32", 64, "bf16-mixed", "16-true"])
def test_precisions_of_lightning_are_accepted(precision: Any) -> None:
    assert fx.Trainer(precision=precision).precision in (
        "16-mixed", "bf16-mixed", "32-true", "64-true", "16-true",
    )  # fmt: skip


def test_only_strategies_of_lightning_have_a_successor() -> None:
    assert former_strategy("deepspeed_stage_3_offload") == former_strategy("deepspeed")
    assert former_strategy("my_strategy") is None
    assert former_strategy("dpx") is None


def test_hyperparameters_are_logged_unless_disabled(tmp_path: Any) -> None:
    class Keeps(fx.Logger):
        params: Any = None

        def open(self, run_dir: Any) -> None: ...

        def close(self, status: Any = "success") -> None: ...

        def log_metrics(self, metrics: Any, step: int) -> None: ...

        def log_hyperparams(self, params: Any) -> None:
            self.params = params

    loggers = [Keeps(), Keeps()]
    for logger, logs in zip(loggers, (True, False), strict=True):
        trainer = fx.Trainer(
            logger=logger, enable_autolog_hparams=logs, max_epochs=1, default_root_dir=tmp_path,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(TinyModule(lr=0.25), tiny_loader())
    assert loggers[0].params == {"lr": 0.25}
    assert loggers[1].params is None


def test_the_environment_sets_arguments_that_the_caller_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_MAX_STEPS", "7")
    monkeypatch.setenv("PL_TRAINER_PRECISION", "bf16-mixed")
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCH", "3")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fx.Trainer(precision="32-true")
    assert (trainer.max_steps, trainer.precision) == (7, "32-true")
    messages = [str(warning.message) for warning in caught]
    assert [text for text in messages if text.startswith("PL_TRAINER_MAX_EPOCH=3 sets no argument of the Trainer")]
    assert [text for text in messages if "PL_TRAINER_MAX_STEPS sets max_steps=7" in text]
