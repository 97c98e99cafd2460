from __future__ import annotations

import csv
import pickle
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

import fabricx as fx
from fabricx.core.logger import Silent
from fabricx.lightning import adapt_logger
from fabricx.pytorch.modules import lookup
from fabricx.testing import QUIET, TinyModule, tiny_loader


class CustomLogger(Logger):
    """A logger of the user, which also has a method with the name, but not the arguments, of a method of fabricx."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    @property
    def name(self) -> str:
        return "mine"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.seen.append(("metrics", sorted(metrics), step))

    def log_hyperparams(self, params: Any, *args: Any, **options: Any) -> None:
        self.seen.append(("hyperparameters", dict(params)))

    def log_text(self, key: str, columns: list[str], data: list[Any]) -> None:
        self.seen.append(("table", key, columns, data))

    def finalize(self, status: str) -> None:
        self.seen.append(status)


def fit(logger: Any, **options: Any) -> fx.Trainer:
    trainer = fx.Trainer(max_epochs=1, log_every_n_steps=1, **{**QUIET, "logger": logger, **options})
    trainer.fit(TinyModule(), tiny_loader())
    return trainer


def test_a_csv_logger_writes_each_step_to_its_own_folder(tmp_path):
    logger = CSVLogger(tmp_path, name="here")
    trainer = fit(logger)
    assert trainer.logger is logger
    assert isinstance(logger, CSVLogger)
    assert trainer.log_dir == str(tmp_path / "here" / "version_0")
    with open(tmp_path / "here" / "version_0" / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows if row.get("loss")][-1] == trainer.global_step


def test_a_tensorboard_logger_has_events(tmp_path):
    fit(TensorBoardLogger(tmp_path, name="board"))
    assert list((tmp_path / "board" / "version_0").glob("events.*"))


def test_a_users_logger_receives_metrics_and_the_status_and_keeps_its_methods():
    logger = CustomLogger()
    fit(logger)
    kinds = [entry if isinstance(entry, str) else entry[0] for entry in logger.seen]
    assert "metrics" in kinds
    assert kinds[-1] == "success"
    assert "table" not in kinds
    logger.log_text(key="name", columns=["a"], data=[[1]])
    assert logger.seen[-1] == ("table", "name", ["a"], [[1]])


def test_no_writer_is_created_without_logged_values(tmp_path):
    logger = adapt_logger(CSVLogger(tmp_path, name="here"))
    assert isinstance(logger.experiment, Silent)
    assert isinstance(pickle.loads(pickle.dumps(logger)), CSVLogger)
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize("logger", [3, CSVLogger])
def test_other_objects_are_refused(logger):
    with pytest.raises(ValueError, match="is not a logger"):
        fx.Trainer(**{**QUIET, "logger": logger})


@pytest.mark.parametrize("base", [CustomLogger, lookup("loggers.logger", "DummyLogger")])
def test_a_loggers_log_graph_is_called_with_the_module_alone(base: Any) -> None:
    class Draws(base):
        models: list[Any] = []

        def log_graph(self, model: Any) -> None:
            self.models.append(type(model).__name__)

    fit(Draws())
    assert Draws.models == ["TinyModule"]


def test_a_dummy_logger_accepts_all_calls() -> None:
    logger: Any = lookup("loggers.logger", "DummyLogger")()
    fx.Trainer(**{**QUIET, "logger": logger, "max_steps": 1}).fit(TinyModule(), tiny_loader())
    logger.log_hyperparams({"lr": 0.1}, of="any")
    logger.log_metrics("any", of="argument")
    logger.experiment.add_image("image", None)
    assert isinstance(fx.Trainer(fast_dev_run=True).logger, type(logger))


@pytest.mark.parametrize("base", [Logger, CSVLogger, lookup("loggers", "Logger"), lookup("loggers", "CSVLogger")])
def test_a_logger_is_notified_of_each_complete_checkpoint(base, tmp_path):
    class Uploads(base):
        name, version = "uploads", "1"
        log_metrics = log_hyperparams = log_graph = lambda self, *args, **options: None

        def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
            saved.append(checkpoint_callback.best_model_path)
            assert checkpoint_callback.monitor is None
            with open(saved[-1], "rb"):
                pass

    class Net(TinyModule):
        single_file_checkpoints = True

    saved: list[str] = []
    logger = Uploads(tmp_path) if "CSV" in base.__name__ else Uploads()
    saver = fx.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1)
    options = {**QUIET, "logger": logger, "enable_checkpointing": True, "callbacks": [saver]}
    fx.Trainer(max_epochs=2, **options).fit(Net(), tiny_loader(8, 4))
    assert [path.removeprefix(f"{tmp_path}/") for path in saved] == ["epoch=0-step=2.ckpt", "epoch=1-step=4.ckpt"]


@pytest.mark.parametrize("base", [Logger, lookup("loggers", "Logger")], ids=["lightning", "fabricx"])
def test_a_logger_saves_after_each_row(base: Any) -> None:
    class Saves(CustomLogger if base is Logger else base):  # type: ignore[misc]
        def __init__(self) -> None:
            self.rows, self.saved = 0, []
            super().__init__()

        name, version = "saves", 0

        def log_hyperparams(self, params: Any, *args: Any, **options: Any) -> None: ...

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.rows += 1

        def save(self) -> None:
            self.saved.append(self.rows)

        def finalize(self, status: str) -> None: ...

    logger = Saves()
    fit(logger)
    assert logger.rows > 1
    assert logger.saved[: logger.rows] == list(range(1, logger.rows + 1))
