from __future__ import annotations

import csv
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning_utilities.core.rank_zero import rank_zero_only
from omegaconf import OmegaConf

import fabricx as fx
from fabricx.loggers import CSVLogger
from fabricx.testing import QUIET, TinyModule, tiny_loader


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_columns_can_be_added_later(tmp_path: Path) -> None:
    logger = CSVLogger()
    logger.open(tmp_path)
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.log_metrics({"loss": 0.4, "accuracy": 1.0}, step=2)
    logger.log_metrics({"epoch": 1}, step=3)
    assert rows(tmp_path) == [  # also before it is closed
        {"step": "1", "loss": "0.5", "accuracy": "", "epoch": ""},
        {"step": "2", "loss": "0.4", "accuracy": "1.0", "epoch": ""},
        {"step": "3", "loss": "", "accuracy": "", "epoch": "1"},
    ]
    logger.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_a_resumed_run_appends_to_the_file(tmp_path: Path) -> None:
    for step in (1, 2):
        logger = CSVLogger()
        logger.open(tmp_path)
        logger.log_metrics({"loss": 0.5, **({"extra": 1.0} if step == 2 else {})}, step)
        logger.close()
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2"]


def test_names_with_commas_are_kept(tmp_path: Path) -> None:
    logger = CSVLogger()
    logger.open(tmp_path)
    logger.log_metrics({'a, "b"': 1.0}, step=1)
    logger.log_metrics({"c": 1.0}, step=2)
    logger.close()
    assert rows(tmp_path)[0]['a, "b"'] == "1.0"


def test_hyperparameters_are_accumulated(tmp_path: Path) -> None:
    logger = CSVLogger()
    logger.open(tmp_path)
    logger.log_hyperparams({"lr": 0.1, "sizes": (1, 2)})
    logger.log_hyperparams({"data": tmp_path})
    logger.close()
    saved = yaml.safe_load((tmp_path / "hparams.yaml").read_text())
    assert saved == {"lr": 0.1, "sizes": [1, 2], "data": str(tmp_path)}


def test_hyperparameters_of_the_script_are_written_if_it_then_replaces_the_method(tmp_path: Path) -> None:
    logger = CSVLogger()
    logger.log_hyperparams({"lr": 0.1})
    logger.log_hyperparams = lambda *args: None  # type: ignore[method-assign]
    logger.open(tmp_path)
    logger.log_hyperparams({"of": "the run"})
    logger.close()
    assert yaml.safe_load((tmp_path / "hparams.yaml").read_text()) == {"lr": 0.1}


def test_hyperparameters_of_the_script_are_resolved_when_it_logs_them(tmp_path: Path) -> None:
    OmegaConf.register_new_resolver("of_the_script", lambda: 7)
    logger = CSVLogger()
    logger.log_hyperparams(OmegaConf.create({"seed": "${of_the_script:}", "net": {"seed": "${seed}"}}))
    OmegaConf.clear_resolver("of_the_script")  # not in a worker process
    logger.open(tmp_path)
    logger.close()
    assert yaml.safe_load((tmp_path / "hparams.yaml").read_text()) == {"seed": 7, "net": {"seed": 7}}


def test_each_run_has_a_numbered_folder(tmp_path: Path) -> None:
    folders = []
    for _ in range(2):
        logger = CSVLogger(tmp_path / "logs", name="mine")
        logger.open(tmp_path / "run")
        folders.append(logger.log_dir)
        logger.close()
        logger.close()
        logger.close()
    assert folders == [str(tmp_path / "logs" / "mine" / f"version_{number}") for number in range(2)]
    assert not (tmp_path / "run").exists()
    (tmp_path / "logs" / "mine" / "version_0").rename(tmp_path / "logs" / "mine" / "version_6")
    assert CSVLogger(tmp_path / "logs", name="mine").version == 7  # the newest has the largest number


def test_names_have_the_prefix(tmp_path: Path) -> None:
    logger = CSVLogger(prefix="net", flush_logs_every_n_steps=10)
    logger.open(tmp_path)
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.close()
    assert (tmp_path / "metrics.csv").read_text().split() == ["step,net-loss", "1,0.5"]


@pytest.mark.parametrize(("version", "folder"), [(3, "version_3"), ("first", "first"), ("", ".")])
def test_a_version_can_be_set(tmp_path: Path, version: int | str, folder: str) -> None:
    logger = CSVLogger(tmp_path, version=version)
    logger.open(tmp_path / "run")
    logger.close()
    assert logger.log_dir == str(tmp_path / folder)


def test_values_before_the_logger_is_open_are_ignored_on_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger = pickle.loads(pickle.dumps(CSVLogger(tmp_path / "logs")))
    logger.log_hyperparams({"lr": 0.1})
    logger.flush()
    logger.close()
    assert list(tmp_path.iterdir()) == []


def test_a_program_without_a_run_writes_numbers_of_tensors_and_its_hyperparameters(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, version=0)
    logger.log_hyperparams()
    logger.log_hyperparams({"lr": 0.1})
    for _ in range(2):
        assert (tmp_path / "version_0" / "hparams.yaml").read_text() == "lr: 0.1\n"
        logger.save()
    logger.log_metrics({"loss": torch.tensor([0.5]), "epoch": torch.tensor(1.0)}, step=2)  # type: ignore[dict-item]
    assert (tmp_path / "version_0" / "metrics.csv").read_text().split() == ["step,loss,epoch", "2,0.5,1"]


def test_the_experiment_writes_rows_and_hyperparameters_as_lightning_s(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, "mine")
    logger.experiment.log_metrics({"loss": 0.5}, step=3)
    logger.experiment.log_hparams({"lr": 0.1})
    logger.experiment.save()
    assert logger.experiment.hparams == {"lr": 0.1}
    folder = tmp_path / "mine" / "version_0"
    assert rows(folder) == [{"step": "3", "loss": "0.5"}]
    assert yaml.safe_load((folder / "hparams.yaml").read_text()) == {"lr": 0.1}
    logger.close()


def test_the_experiment_belongs_to_the_present_run(tmp_path: Path) -> None:
    logger, folders = CSVLogger(), []
    for _ in range(2):
        options: dict[str, Any] = {**QUIET, "logger": logger, "default_root_dir": tmp_path}
        fx.Trainer(max_steps=1, **options).fit(TinyModule(), tiny_loader())
        assert logger.experiment.log_dir == logger.log_dir
        folders.append(logger.log_dir)
        logger.close()
    assert folders[0] != folders[1]
