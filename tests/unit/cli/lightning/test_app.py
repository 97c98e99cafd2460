"""Command lines and files become runs."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.callbacks import LearningRateMonitor, ModelCheckpoint, Timer
from fabricx.cli.lightning.app import LightningCLI
from fabricx.cli.lightning.objects import instantiate_class
from fabricx.cli.lightning.saving import SaveConfigCallback
from fabricx.config import recorded_configuration
from fabricx.testing import QUIET, TinyModule, tiny_data

OPTIONS = [f"--trainer.{name}={str(value).lower()}" for name, value in QUIET.items()]


class Net(TinyModule):
    def __init__(self, width: int = 2, activation: nn.Module | None = None, half: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.width, self.activation = width, activation

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.25)


class Wider(Net):
    def __init__(self, extra: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.extra = extra


class Data(fx.DataModule):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(tiny_data(8), batch_size=self.batch_size)

    test_dataloader = train_dataloader


def _cli(*words: str, model: Any = Net, kind: type[LightningCLI] = LightningCLI, **options: Any) -> LightningCLI:
    return kind(model, Data, args=[*words], **{"save_config_callback": None, **options})


def _fit(folder: Path, *words: str, **options: Any) -> LightningCLI:
    where = [f"--trainer.default_root_dir={folder}", "--trainer.max_epochs=1"]
    return _cli("fit", *OPTIONS, *where, *words, **options)


@pytest.fixture(autouse=True)
def _no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["program"])


def test_a_subcommand_trains_with_the_options_and_calls_the_methods_around_it(tmp_path: Path) -> None:
    calls = []

    class RecordsCalls(LightningCLI):
        def before_instantiate_classes(self) -> None:
            calls.append("before classes")

        def after_instantiate_classes(self) -> None:
            calls.append("after classes")

        def before_fit(self) -> None:
            calls.append("before fit")

        def after_fit(self) -> None:
            calls.append(f"after {self.trainer.global_step} steps")

    cli = _fit(tmp_path, "--model.width=3", "--data.batch_size=2", kind=RecordsCalls)
    assert calls == ["before classes", "after classes", "before fit", "after 4 steps"]
    assert (cli.model.width, cli.datamodule.batch_size, cli.subcommand) == (3, 2, "fit")

    plain = TinyModule(lr=0.25)
    fx.Trainer(**QUIET, max_epochs=1, default_root_dir=tmp_path).fit(plain, Data(2))
    torch.testing.assert_close(cli.model.layer.weight, plain.layer.weight, rtol=0, atol=0)


def test_a_method_of_the_cli_class_replaces_the_trainers_method(tmp_path: Path) -> None:
    class CustomCLI(LightningCLI):
        def fit(self, model: Any, datamodule: Any, ckpt_path: Any, weights_only: Any) -> None:
            self.given = type(model), type(datamodule), ckpt_path, weights_only

        @staticmethod
        def subcommands() -> dict[str, set[str]]:
            return {"fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"}}

    assert _fit(tmp_path, kind=CustomCLI).given == (Net, Data, None, None)  # type: ignore[attr-defined]
    with pytest.raises(SystemExit):
        _cli("test", kind=CustomCLI)


def test_the_optimizer_of_the_command_line_replaces_the_modules(tmp_path: Path) -> None:
    words = ["--optimizer=Adam", "--optimizer.lr=0.5", "--lr_scheduler=ReduceLROnPlateau", "--lr_scheduler.monitor=x"]
    with pytest.warns(UserWarning, match="`Net.configure_optimizers` will be overridden by `LightningCLI"):
        cli = _cli(*words, run=False)
    configured = cli.model.configure_optimizers()
    assert isinstance(configured["optimizer"], torch.optim.Adam)
    assert configured["lr_scheduler"]["monitor"] == "x"

    with pytest.warns(UserWarning, match="overridden"):
        trained = _fit(tmp_path, "--optimizer=SGD", "--optimizer.lr=0.125", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=1")  # fmt: skip # noqa: E501
    plain = TinyModule(lr=0.125)
    fx.Trainer(**QUIET, max_epochs=1, default_root_dir=tmp_path).fit(plain, Data())
    torch.testing.assert_close(trained.model.layer.weight, plain.layer.weight, rtol=0, atol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _cli(run=False).model.configure_optimizers().defaults["lr"] == 0.25
        assert _cli(run=False, auto_configure_optimizers=False).model.configure_optimizers().defaults["lr"] == 0.25


def test_a_linked_optimizer_is_an_argument_of_the_module() -> None:
    class Linked(fx.Module):
        def __init__(self, optim: dict[str, Any], other: Callable[[Any], Optimizer] = torch.optim.Adam) -> None:
            super().__init__()
            self.optim, self.other = optim, other

    class Links(LightningCLI):
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.add_optimizer_args(torch.optim.SGD, nested_key="optim", link_to="model.optim")

    cli = _cli("--optim.lr=0.5", "--model.other=torch.optim.Adagrad", kind=Links, model=Linked, run=False)
    assert cli.model.optim["class_path"].endswith("SGD")
    assert instantiate_class(nn.Linear(1, 1).parameters(), cli.model.optim).defaults["lr"] == 0.5
    assert isinstance(cli.model.other(nn.Linear(1, 1).parameters()), torch.optim.Adagrad)


def test_several_optimizers_with_automatic_optimization_are_refused() -> None:
    class Two(LightningCLI):
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.add_optimizer_args(torch.optim.SGD, nested_key="one")
            parser.add_optimizer_args(torch.optim.SGD, nested_key="two")

    with pytest.raises(ValueError, match=r"at most one optimizer .* got \['one', 'two', 'lr_scheduler'\]"):
        _cli("--one.lr=1", "--two.lr=1", kind=Two, run=False)


def test_callbacks_of_options_defaults_and_the_command_line_are_all_added() -> None:
    class More(LightningCLI):
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.add_lightning_class_args(ModelCheckpoint, "best")
            parser.set_defaults({"best.monitor": "loss"})

    timer = {"class_path": "fabricx.pytorch.callbacks.Timer", "init_args": {"interval": "epoch"}}
    cli = _cli(
        "--trainer.callbacks=LearningRateMonitor", "--best.save_top_k=2", kind=More, run=False,
        trainer_defaults={"callbacks": timer, "max_epochs": 7}, save_config_callback=SaveConfigCallback,
    )  # fmt: skip
    callbacks = [callback for callback in cli.trainer.callbacks if type(callback).__module__ != "x"]
    assert [type(callback) for callback in callbacks][:3] == [LearningRateMonitor, Timer, SaveConfigCallback]
    best = callbacks[-1]
    assert isinstance(best, ModelCheckpoint)
    assert (best.monitor, best.save_top_k, cli.trainer.max_epochs) == ("loss", 2, 7)
    assert cli.instantiate_trainer(max_epochs=8).max_epochs == 8


def test_a_seed_is_set_before_the_objects_are_created(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    drawn = [_cli(*words, run=False) and torch.rand(1).item() for words in ([], ["--seed_everything=0"], ["--seed_everything=7"])]  # fmt: skip # noqa: E501
    assert drawn[0] == drawn[1] != drawn[2]
    assert _cli("--seed_everything=true", run=False).config.seed_everything == 7  # of the run before
    assert _cli("--seed_everything=false", run=False).config.seed_everything is False


def test_command_lines_and_arguments_of_the_program_are_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["program", "--model.width=5"])
    with pytest.warns(UserWarning, match="ignores the command line"):
        assert _cli("--model.width=6", run=False).model.width == 6
    assert LightningCLI(Net, Data, save_config_callback=None, run=False).model.width == 5
    with pytest.warns(UserWarning, match="ignores the command line"):
        cli = LightningCLI(Net, Data, save_config_callback=None, run=False, args={"model": {"width": 8}})
    assert cli.model.width == 8


def test_builders_of_trainers_and_modules_have_options() -> None:
    def build_trainer(max_steps: int, callbacks: list[Any] | None = None) -> fx.Trainer:
        return fx.Trainer(max_steps=max_steps, callbacks=callbacks, **QUIET)

    def build_net(size: int) -> Net:
        return Net(width=size)

    cli = _cli("--trainer.max_steps=3", "--model.size=9", model=build_net, trainer_class=build_trainer, run=False)
    assert (cli.trainer.max_steps, cli.model.width) == (3, 9)


class _SavesAll(LightningCLI):
    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.link_arguments("model.width", "model.half", compute_fn=lambda width: width // 2)


def _saved(folder: Path, *words: str, **options: Any) -> Path:
    quiet = [word for word in OPTIONS if "checkpointing" not in word]
    where = [f"--trainer.default_root_dir={folder}", "--trainer.max_epochs=1"]
    cli = _cli("fit", *quiet, *where, *words, save_config_callback=SaveConfigCallback, **options)
    assert cli.trainer.log_dir is not None
    config = yaml.safe_load((Path(cli.trainer.log_dir) / "config.yaml").read_text())
    assert config["trainer"]["max_epochs"] == 1
    return next(Path(cli.trainer.log_dir).rglob("*.ckpt"))


def test_a_checkpoint_sets_the_options_of_the_module(tmp_path: Path) -> None:
    path = _saved(tmp_path, "--model.width=6", kind=_SavesAll)
    cli = _cli("test", f"--ckpt_path={path}", *OPTIONS, kind=_SavesAll)
    assert (cli.model.width, cli.model.hparams.half) == (6, 3)
    loaded = Net.load_from_checkpoint(path)
    assert (loaded.width, loaded.hparams.half) == (6, 3)
    with pytest.raises(SystemExit):  # a class without these arguments
        _cli("test", f"--ckpt_path={path}", *OPTIONS, model=TinyModule)


def test_nested_classes_of_a_checkpoint_are_created_if_it_is_trusted(tmp_path: Path) -> None:
    words = ["--model=Wider", "--model.width=6", "--model.activation=torch.nn.LeakyReLU", "--model.activation.negative_slope=0.5"]  # fmt: skip # noqa: E501
    path = _saved(tmp_path, *words, subclass_mode_model=True)
    with pytest.raises(fx.errors.CheckpointError, match=r"create: torch.nn.LeakyReLU.* weights_only=False"):
        Net.load_from_checkpoint(path)
    loaded: Any = Net.load_from_checkpoint(path, weights_only=False)
    assert type(loaded) is Wider
    assert (loaded.width, loaded.extra, loaded.activation.negative_slope) == (6, True, 0.5)
    passed: Any = Wider.load_from_checkpoint(path, activation=None)
    assert passed.activation is None

    options = {"subclass_mode_model": True}
    with pytest.raises(fx.errors.CheckpointError, match="--weights_only=false"):
        _cli("test", "--model=Net", f"--ckpt_path={path}", *OPTIONS, **options)
    trusted = _cli("test", "--model=Net", f"--ckpt_path={path}", "--weights_only=false", *OPTIONS, **options)
    assert type(trusted.model) is Wider
    known = _cli("test", *words[:1], *words[2:3], f"--ckpt_path={path}", *OPTIONS, **options)  # names the class
    assert (known.model.width, known.model.activation.negative_slope) == (6, 0.5)


def test_a_missing_package_is_an_error_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    for name in [name for name in sys.modules if name.startswith("fabricx.cli.lightning")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r"pip install 'fabricx\[cli\]'"):
        importlib.import_module("fabricx.cli.lightning.app")


def test_a_run_is_resumed_by_its_program(tmp_path: Path) -> None:
    run = _saved(tmp_path).parent.parent
    with pytest.raises(ValueError, match=r"of a program with LightningCLI: .* fit --config=.*config.yaml --ckpt_path="):
        recorded_configuration(run)
