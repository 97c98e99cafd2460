"""Lightning's names of the Trainer in runs, and the successors of its former names."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import fabricx as fx
from fabricx.callbacks import EarlyStopping, ModelCheckpoint
from fabricx.core.callback import Callback
from fabricx.core.state import RunningStage, TrainerFn
from fabricx.loggers import CSVLogger
from fabricx.testing import QUIET, TinyModule, tiny_loader
from fabricx.trainer.names import _SUCCESSORS


class Evaluated(TinyModule):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("t", 1.0)

    def setup(self, stage: str) -> None:
        assert self.trainer.evaluating is (stage in ("validate", "test"))


class Reads(Callback):
    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        assert trainer.lightning_module is trainer.model is module
        assert trainer.strategy.lightning_module is trainer.strategy.model is module
        assert trainer.strategy.root_device == module.device == torch.device("cpu")
        trainer.strategy.barrier("a name")
        self.seen = {
            "fn": trainer.state.fn, "stage": trainer.state.stage, "status": trainer.state.status,
            "evaluating": trainer.evaluating, "val": trainer.num_val_batches, "sanity": trainer.num_sanity_val_batches,
            "loaders": trainer.val_dataloaders, "validates": trainer.enable_validation,
        }  # fmt: skip


class FailsInSetup(Evaluated):
    def setup(self, stage: str) -> None:
        raise RuntimeError("mine")

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


class ReadsErrors(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[str | None, str]] = []

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.seen.append((trainer.state.stage, trainer.state.status))


def test_hooks_read_the_stage_of_an_error_in_setup(quiet: dict[str, Any]) -> None:
    reads = ReadsErrors()
    trainer = fx.Trainer(max_epochs=1, callbacks=[reads], **quiet)
    for run in (trainer.fit, trainer.validate, trainer.test):
        with pytest.raises(RuntimeError, match="mine"):
            run(FailsInSetup(), tiny_loader())
        assert trainer.state.stage is None
    assert reads.seen == [("train", "interrupted"), ("validate", "interrupted"), ("test", "interrupted")]


def test_hooks_and_scripts_read_lightnings_names(quiet: dict[str, Any]) -> None:
    reads, module, loader = Reads(), Evaluated(), tiny_loader()
    trainer = fx.Trainer(max_epochs=1, num_sanity_val_steps=1, callbacks=[reads], **quiet)
    assert (trainer.model, trainer.state.fn, trainer.state.finished, trainer.ckpt_path) == (None, None, False, None)
    trainer.fit(module, loader, loader)
    batches = len(loader)
    assert reads.seen == {
        "fn": "fit", "stage": "validate", "status": "running", "evaluating": True, "val": [batches], "sanity": [1],
        "loaders": loader, "validates": True,
    }  # fmt: skip
    assert (trainer.state.fn, trainer.state.stage, trainer.state.finished) == (TrainerFn.FITTING, None, True)
    assert trainer.lr_scheduler_configs == []
    assert (trainer.num_devices, trainer.num_nodes, trainer.node_rank, trainer.device_ids) == (1, 1, 0, [0])
    assert (trainer.received_sigterm, trainer.scaler) == (False, None)
    assert trainer.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}
    trainer.test(module, [loader, tiny_loader()], verbose=False)
    assert trainer.num_test_batches == [batches, batches]
    assert trainer.test_dataloaders[0] is loader
    assert trainer.val_dataloaders is None
    trainer.predict(module, loader)
    assert (trainer.num_predict_batches, trainer.num_val_batches) == ([batches], [batches])
    assert trainer.predict_dataloaders is loader
    assert trainer.state.fn == "predict"


def test_callbacks_are_found_by_their_role() -> None:
    stops, saves = [EarlyStopping("a"), EarlyStopping("b")], [ModelCheckpoint(), ModelCheckpoint(monitor="loss")]
    trainer = fx.Trainer(callbacks=[*stops, *saves], logger=False, enable_model_summary=False)
    assert trainer.early_stopping_callbacks == stops
    assert trainer.checkpoint_callbacks == saves
    assert trainer.checkpoint_callback is saves[0]
    assert type(trainer.progress_bar_callback).__name__ == "ProgressBar"


def test_the_module_is_accepted_by_both_names_and_arguments_in_lightnings_order(tmp_path: Any) -> None:
    module, loader = Evaluated(), tiny_loader()
    trainer = fx.Trainer(max_epochs=1, default_root_dir=tmp_path, **QUIET)
    trainer.fit(model=module, train_dataloaders=loader)
    path = trainer.save_checkpoint(tmp_path / "a.ckpt", False, None)
    with pytest.raises(TypeError, match=r"storage_options=...\) is not supported"):
        trainer.save_checkpoint(tmp_path / "b.ckpt", storage_options={"key": 1})  # type: ignore[arg-type]
    for result in (
        trainer.test(module=module, dataloaders=loader), trainer.test(model=module, dataloaders=loader),
        trainer.test(module, loader, path, False), trainer.test(module, loader, None, False, None, True),
    ):  # fmt: skip
        assert result == [{"t": 1.0}]
    assert trainer.validate(module, loader, path, False)
    assert len(trainer.predict(module, loader, None, None, path)) == len(loader)
    assert trainer.ckpt_path == path
    trainer.validate(module, loader, ckpt_path=str(path))
    assert trainer.ckpt_path == str(path)  # comparable with `best_model_path`
    with pytest.raises(ValueError, match="two names of one argument"):
        trainer.fit(module, loader, module=module)
    with pytest.raises(ValueError, match=r"trainer.fit\(\) has no module"):
        trainer.fit()
    with pytest.raises(ValueError, match="third argument is ckpt_path: pass datamodule=DataModule"):
        trainer.test(module, None, fx.DataModule())
    for call in (trainer.fit, trainer.validate, trainer.test, trainer.predict):
        call(module, loader, weights_only=False)
    trainer.ckpt_path = tmp_path / "missing.ckpt"  # of all following calls
    with pytest.raises(ValueError, match=r"missing.ckpt"):
        trainer.test(module, loader)
    assert (trainer.state.status, trainer.state.stopped) == ("interrupted", True)


@pytest.mark.parametrize("name", _SUCCESSORS)
def test_an_attribute_of_other_trainers_names_its_successor(name: str) -> None:
    trainer: Any = fx.Trainer(**QUIET)
    with pytest.raises(AttributeError, match=f"has no attribute '{name}': ."):
        getattr(trainer, name)
    assert not hasattr(trainer, name)


def test_other_missing_attributes_are_errors_as_before() -> None:
    trainer: Any = fx.Trainer(**QUIET)
    with pytest.raises(AttributeError, match="Did you mean 'callback_metrics'"):
        trainer.callback_metric  # noqa: B018
    with pytest.raises(AttributeError, match=r"private to Lightning: trainer\.callbacks"):
        trainer._callback_connector  # noqa: B018
    assert pickle.loads(pickle.dumps(trainer)).max_epochs == trainer.max_epochs


def test_new_tensors_have_the_dtype_of_the_weights() -> None:
    with fx.Trainer(precision="bf16-true", **QUIET).init_module(empty_init=True):
        assert torch.nn.Linear(1, 1).weight.dtype == torch.bfloat16
    assert torch.nn.Linear(1, 1).weight.dtype == torch.float32


def test_stages_have_lightnings_names() -> None:
    assert [stage.dataloader_prefix for stage in RunningStage] == ["train", "val", "val", "test", "predict"]
    assert [stage for stage in RunningStage if stage.evaluating] == ["sanity_check", "validate", "test"]


def test_a_strategy_moves_a_batch_by_the_methods_of_the_module(quiet: dict[str, Any]) -> None:
    class Moves(TinyModule):
        def on_train_start(self) -> None:
            self.moved = self.trainer.strategy.batch_to_device([torch.ones(1)])

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [*batch, dataloader_idx] if len(batch) == 1 else batch

    trainer, module = fx.Trainer(max_epochs=1, **quiet), Moves()
    assert torch.equal(trainer.strategy.batch_to_device(torch.ones(1)), torch.ones(1))
    trainer.fit(module, tiny_loader())
    assert module.moved == [torch.ones(1), 0]


def test_the_name_of_a_profiler_has_its_methods() -> None:
    profiler = fx.Trainer(**QUIET).profiler
    assert profiler == ""
    profiler.start("mine")
    profiler.stop("mine")
    with fx.Trainer(profiler="simple", **QUIET).profiler.profile("mine"):
        pass


@pytest.mark.parametrize("name", ["add_argparse_args", "from_argparse_args", "parse_argparser"])
def test_former_methods_of_the_class_name_the_remedy(name: str) -> None:
    assert not hasattr(fx.Trainer, name)
    with pytest.raises(AttributeError, match=f"'{name}': add the arguments to your parser"):
        getattr(fx.Trainer, name)


def test_loggers_are_assigned_between_two_runs(quiet: dict[str, Any]) -> None:
    class Assigns(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            with pytest.raises(RuntimeError, match="the loggers of a run are open"):
                trainer.logger = None

    first, second = CSVLogger(), CSVLogger()
    trainer = fx.Trainer(max_steps=1, callbacks=Assigns(), **quiet)
    trainer.logger = first
    assert trainer.loggers == [first]
    trainer.fit(TinyModule(), tiny_loader())
    trainer.loggers = [first, second]
    assert trainer.logger is first
    trainer.logger = None
    assert (trainer.logger, trainer.loggers) == (None, [])
    with pytest.raises(ValueError, match="is not a logger"):
        trainer.logger = 3
