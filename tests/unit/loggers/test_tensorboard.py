from __future__ import annotations

import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fabricx.core.logger import Ending
from fabricx.loggers import TensorBoardLogger
from fabricx.loggers.tensorboard import flatten


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = [path for path in folder.glob("events.out.tfevents.*") if path.suffix != ".hparams"]
    assert len(files) == 1  # TensorBoard would otherwise ignore a part
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def session(folder: Path) -> tuple[Any, Any, Any]:
    from tensorboard.plugins.hparams import plugin_data_pb2

    contents = events(folder).summary_metadata
    tags = ("experiment", "session_start_info", "session_end_info")
    parse = plugin_data_pb2.HParamsPluginData.FromString
    data = [parse(contents[f"_hparams_/{tag}"].plugin_data.content) for tag in tags]
    return data[0].experiment, data[1].session_start_info, data[2].session_end_info


def test_scalars_are_written_directly_into_the_folder_of_the_run(tmp_path: Path) -> None:
    logger = TensorBoardLogger()
    logger.open(tmp_path)
    logger.log_metrics({"loss": 0.5}, step=10)
    logger.log_metrics({"loss": 0.25}, step=20)
    logger.close()
    assert logger.log_dir == str(tmp_path)
    assert [(event.step, event.value) for event in events(tmp_path).Scalars("loss")] == [(10, 0.5), (20, 0.25)]


def test_several_values_of_a_name_are_in_one_chart(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, version="a")
    logger.log_metrics({"loss": {"train": 0.5, "val": 0.25}}, step=10)  # type: ignore[dict-item]
    logger.close()
    assert events(tmp_path / "a" / "loss_val").Scalars("loss")[0].value == 0.25


def test_arguments_are_equal_to_lightnings(tmp_path: Path) -> None:
    logger = TensorBoardLogger(
        tmp_path, "net", 3, default_hp_metric=False, prefix="first", sub_dir="part", flush_secs=10
    )  # fmt: skip
    logger.open(tmp_path / "run")
    logger.log_metrics({"loss": 0.5}, step=10)
    logger.close()
    assert events(tmp_path / "net" / "version_3" / "part").Tags()["scalars"] == ["first-loss"]


def test_hyperparameters_that_were_logged_before_the_run_are_in_its_session(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_hyperparams(Namespace(lr=0.1))
    logger = pickle.loads(pickle.dumps(logger))  # in a worker
    logger.open(tmp_path / "run")
    logger.close()
    _, begin, _ = session(tmp_path / "version_0")
    assert begin.hparams["lr"].number_value == 0.1


@pytest.mark.parametrize(("status", "code"), [("success", 1), ("failed", 2), ("interrupted", 2)])
def test_hyperparameters_are_written_with_final_metrics_and_the_status(
    tmp_path: Path, status: Ending, code: int
) -> None:
    logger = TensorBoardLogger()
    logger.open(tmp_path)
    logger.log_hyperparams({"net": {"width": 8}, "name": "a", "flag": True, "none": None}, {"before": 1.0})
    logger.log_metrics({"loss": 0.5, "epoch": 0.0}, step=10)
    logger.log_metrics({"loss": 0.25, "epoch": 1.0}, step=20)
    logger.close(status)
    experiment, begin, end = session(tmp_path)
    assert begin.hparams["net/width"].number_value == 8
    assert begin.hparams["name"].string_value == "a"
    assert begin.hparams["none"].string_value == "None"
    assert sorted(info.name.tag for info in experiment.metric_infos) == ["before", "loss"]
    assert end.status == code
    assert [event.step for event in events(tmp_path).Scalars("loss")] == [10, 20]  # no point was added
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []  # and no run was added


def test_metrics_of_a_test_after_the_run_are_metrics_of_its_hyperparameters(tmp_path: Path) -> None:
    for metrics, params in (({"loss": 0.5}, {"lr": 0.1}), ({"test_loss": 0.25, "epoch": 0.0}, {}), ({}, {})):
        logger = TensorBoardLogger()
        logger.open(tmp_path)
        if params:
            logger.log_hyperparams(params)
        logger.log_metrics(metrics, step=10)
        logger.close()
    files = sorted(tmp_path.glob("events.out.tfevents.*"))
    [session_file] = [path for path in files if path.suffix == ".hparams"]
    assert files.index(session_file) >= 2  # after the values that it names: TensorBoard reads files in this order
    for path in files:
        if path not in (files[0], session_file):
            path.unlink()
    experiment, begin, end = session(tmp_path)
    assert sorted(info.name.tag for info in experiment.metric_infos) == ["loss", "test_loss"]
    assert begin.hparams["lr"].number_value == 0.1
    assert end.status == 1


def test_a_test_without_a_run_has_no_session(tmp_path: Path) -> None:
    logger = TensorBoardLogger()
    logger.open(tmp_path)
    logger.log_metrics({"test_loss": 0.25}, step=10)
    logger.close()
    assert list(tmp_path.glob("*.hparams")) == []


def test_texts_are_logged(tmp_path: Path) -> None:
    logger = TensorBoardLogger()
    logger.open(tmp_path)
    logger.log_text("config", "lr: 0.1")
    logger.flush()
    logger.close()
    assert "config/text_summary" in events(tmp_path).Tags()["tensors"]


class Noisy(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + torch.randn_like(inputs)


@pytest.mark.parametrize("wanted", [True, False])
def test_the_graph_is_written_on_request(tmp_path: Path, wanted: bool) -> None:
    logger = TensorBoardLogger(log_graph=wanted)
    logger.open(tmp_path)
    module = nn.Sequential(nn.Linear(4, 2), nn.Dropout())
    logger.log_graph(module, torch.zeros(1, 4))
    logger.close()
    assert module.training
    assert events(tmp_path).Tags()["graph"] is wanted


def test_the_graph_of_a_module_with_an_example_needs_no_input(tmp_path: Path) -> None:
    logger = TensorBoardLogger(log_graph=True)
    logger.open(tmp_path)
    module = nn.Linear(4, 2)
    module.example_input_array = torch.zeros(1, 4)
    logger.log_graph(module)
    logger.close()
    assert events(tmp_path).Tags()["graph"]


def test_tracing_a_graph_keeps_modes_and_random_state(tmp_path: Path) -> None:
    logger = TensorBoardLogger(log_graph=True)
    logger.open(tmp_path)
    module, state = nn.Sequential(nn.BatchNorm1d(4).eval(), Noisy()), torch.get_rng_state()
    logger.log_graph(module, torch.zeros(2, 4))
    assert [part.training for part in module.modules()] == [True, False, True]
    assert torch.equal(torch.get_rng_state(), state)
    logger.close()


def test_a_graph_that_cannot_be_traced_is_a_warning(tmp_path: Path) -> None:
    logger = TensorBoardLogger(log_graph=True)
    logger.open(tmp_path)
    with pytest.warns(UserWarning, match="example_input_array"):
        logger.log_graph(nn.Linear(4, 2), None)
    with pytest.warns(UserWarning, match="can't be traced"):
        logger.log_graph(nn.Linear(4, 2), torch.zeros(1, 3))
    logger.close()


def test_it_can_be_opened_again_for_another_run(tmp_path: Path) -> None:
    logger = TensorBoardLogger()
    for name in ("a", "b"):
        logger.open(tmp_path / name)
        logger.open(tmp_path / name)  # a second call does nothing
        logger.log_hyperparams({"lr": 0.1})
        logger.log_metrics({name: 0.5}, step=1)
        logger.close()
    experiment, _, _ = session(tmp_path / "b")
    assert [info.name.tag for info in experiment.metric_infos] == ["b"]


def test_nested_hyperparameters_become_flat() -> None:
    assert flatten({"a": {"b": {"c": 1}}, "d": [1, 2], "e": True}) == {"a/b/c": 1, "d": "[1, 2]", "e": True}


def test_hyperparameters_of_the_board_can_be_read(own_folder: Any) -> None:
    logger = TensorBoardLogger(own_folder)
    logger.log_hyperparams({"lr": 0.1, "net": {"width": 3}})
    assert logger.hparams == {"lr": 0.1, "net": {"width": 3}}
