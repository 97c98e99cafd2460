"""Options of the Trainer, in whole runs; the tests of each module that reads an option have more."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

import pytest
import torch

import fabricx as fx
from fabricx.callbacks import ModelCheckpoint
from fabricx.core.callback import Callback
from fabricx.testing import QUIET, TinyModule, tiny_loader
from tests.unit.trainer.counting import Counts, fitted


def test_fast_dev_run_runs_each_stage_for_a_few_batches() -> None:
    module, trainer = fitted(fast_dev_run=3, max_epochs=50)
    assert module.counts() == {"train": 3, "validation": 3, "test": 0, "predict": 0}
    trainer.test(module, tiny_loader(), verbose=False)
    assert module.counts()["test"] == 3
    assert (trainer.global_step, trainer.loggers, trainer.checkpoint_callback) == (3, [], None)


def test_under_fast_dev_run_the_loggers_accept_all_calls_and_write_nothing(tmp_path: Any) -> None:
    class Draws(TinyModule):
        def on_train_start(self) -> None:
            self.logger.experiment.add_image("samples", torch.zeros(3))
            self.logger.experiment["params"]["lr"] = 0.1
            self.logger.log_metrics({"a": 1.0})
            self.logger.log_image(key="samples", images=[])

    options: dict[str, Any] = {**QUIET, "default_root_dir": tmp_path}
    trainer = fx.Trainer(fast_dev_run=True, **{**options, "logger": True})
    trainer.fit(Draws(), tiny_loader())
    assert (len(trainer.loggers), list(tmp_path.iterdir())) == (1, [])


def test_a_folder_that_cannot_be_created_names_the_argument(tmp_path: Any) -> None:
    (tmp_path / "file").write_text("")
    options: dict[str, Any] = {**QUIET, "default_root_dir": tmp_path / "file", "enable_checkpointing": True}
    with pytest.raises(NotADirectoryError, match="set default_root_dir to a writable folder"):
        fx.Trainer(max_epochs=1, **options).fit(TinyModule(), tiny_loader())


def test_the_folder_of_a_run_is_set_before_it_starts(tmp_path: Any) -> None:
    options: dict[str, Any] = {**QUIET, "default_root_dir": tmp_path, "enable_checkpointing": True}
    trainer = fx.Trainer(max_epochs=1, **options)
    before = trainer.log_dir
    assert before == trainer.log_dir
    assert list(tmp_path.iterdir()) == []
    trainer.fit(TinyModule(), tiny_loader())
    assert before == trainer.log_dir == str(trainer.run_dir)
    assert trainer.checkpoint_callback.dirpath == f"{before}/checkpoints"


@pytest.mark.parametrize(
    ("options", "steps"),
    [({}, 2), ({"min_steps": 3}, 3), ({"min_epochs": 1}, 4), ({"min_epochs": 1, "min_steps": 6}, 6)],
)
def test_a_run_is_not_stopped_before_min_steps_and_min_epochs(
    options: dict[str, Any], steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fitted(Counts(stop_at=2), max_epochs=5, **options)[1].global_step == steps
    reported = "a stop was requested after 2 steps, and training continues until" in capsys.readouterr().out
    assert reported is bool(options)


class _Switches(Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.anomaly, self.deterministic = torch.is_anomaly_enabled(), torch.are_deterministic_algorithms_enabled()


def test_global_flags_of_torch_are_set_only_during_the_run() -> None:
    switches = _Switches()
    fitted(detect_anomaly=True, deterministic=True, callbacks=[switches])
    assert switches.anomaly
    assert switches.deterministic
    assert not torch.is_anomaly_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    with torch.backends.cudnn.flags(benchmark=True), torch.autograd.set_detect_anomaly(True):
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            fitted(detect_anomaly=True, deterministic=True, benchmark=False)
            assert torch.backends.cudnn.benchmark  # those of the program
            assert torch.is_anomaly_enabled()
            assert torch.are_deterministic_algorithms_enabled()
            assert torch.is_deterministic_algorithms_warn_only_enabled()
        finally:
            torch.use_deterministic_algorithms(False)


def test_a_compiled_module_trains_to_the_same_weights() -> None:
    compiled, _ = fitted(compile={"backend": "eager"})
    assert torch.equal(compiled.layer.weight, fitted()[0].layer.weight)
    assert list(compiled.state_dict()) == ["layer.weight", "layer.bias"]


def test_max_time_ends_a_run_without_other_limits() -> None:
    trainer = fx.Trainer(max_time={"milliseconds": 50}, **QUIET)
    trainer.fit(TinyModule(), tiny_loader())
    assert trainer.global_step > 0
    assert not trainer.interrupted


def test_predictions_have_the_order_of_the_data_set() -> None:
    whole = torch.cat(fx.Trainer(**QUIET).predict(Counts(), tiny_loader(shuffle=True)))
    assert torch.equal(whole, torch.cat([batch[0] for batch in tiny_loader()]))


def test_a_closed_output_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `python train.py | head -1`: the output is closed."""
    reading, writing = os.pipe()
    os.close(reading)
    with io.TextIOWrapper(io.FileIO(writing, "w"), write_through=True) as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        with pytest.raises(BrokenPipeError):
            print("text")
        fx.Trainer(enable_progress_bar=False, logger=False).print("text")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_run_that_an_exception_ended_was_interrupted(error: type[BaseException], quiet: dict[str, Any]) -> None:
    class Fails(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if failing:
                raise error
            return super().training_step(batch, batch_idx)

        def on_exception(self, exception: BaseException) -> None:
            self.seen = self.trainer.interrupted

    trainer, failing, module = fx.Trainer(max_steps=1, **quiet), True, Fails()
    with pytest.raises(error):
        trainer.fit(module, tiny_loader())
    assert module.seen
    assert trainer.interrupted
    failing = False
    trainer.fit(Fails(), tiny_loader())
    assert not trainer.interrupted


def test_under_fast_dev_run_checkpoint_callbacks_exist_and_save_nothing(tmp_path: Any) -> None:
    options = {**QUIET, "enable_checkpointing": True, "default_root_dir": tmp_path, "fast_dev_run": 2}
    saver = fx.callbacks.ModelCheckpoint(tmp_path / "saved", save_last=True, every_n_train_steps=1)
    for callbacks in ([], [saver, fx.callbacks.EarlyStopping("is_not_logged")]):
        trainer = fx.Trainer(**{**options, "callbacks": callbacks})
        trainer.fit(TinyModule(), tiny_loader(8, 4), tiny_loader(4, 4))
        assert (trainer.checkpoint_callback.best_model_path, trainer.global_step) == ("", 2)  # scripts read it
        assert not list(tmp_path.iterdir())
    assert trainer.checkpoint_callback is saver
    assert repr(trainer.val_check_batch) == "2"
    assert fx.Trainer(**{**options, "enable_checkpointing": False}).checkpoint_callback is None


def test_a_keyboard_interrupt_of_a_hook_ends_the_program_as_in_lightning() -> None:
    class Stops(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyboardInterrupt

    trainer = fx.Trainer(max_epochs=1, **QUIET)
    for caught in (SystemExit, KeyboardInterrupt):
        with pytest.raises(caught) as error:
            trainer.fit(Stops(), tiny_loader())
        assert trainer.interrupted
        assert error.value.code == 130  # type: ignore[union-attr]


def test_an_interrupt_keeps_its_arguments_and_a_class_of_the_user_stays_as_it_is() -> None:
    class OwnInterrupt(KeyboardInterrupt): ...

    class Stops(TinyModule):
        def __init__(self, error: BaseException) -> None:
            super().__init__()
            self.error = error

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise self.error

    for raised in (OwnInterrupt("now"), KeyboardInterrupt("now")):
        with pytest.raises(type(raised)) as error:
            fx.Trainer(max_epochs=1, **QUIET).fit(Stops(raised), tiny_loader())
        assert error.value.args == ("now",)


def test_a_test_without_a_model_reports_that_it_uses_the_best_checkpoint(own_folder: Any) -> None:
    trainer = fx.Trainer(max_epochs=1, callbacks=[ModelCheckpoint(own_folder)], **QUIET)
    trainer.fit(TinyModule(), tiny_loader())
    with pytest.warns(UserWarning, match=r"trainer.test\(\) without a model uses the best checkpoint"):
        trainer.test(dataloaders=tiny_loader(), verbose=False)
    assert trainer.ckpt_path == trainer.checkpoint_callback.best_model_path
