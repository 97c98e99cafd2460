"""The configuration in the folder of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from fabricx.cli.lightning.parser import LightningArgumentParser
from fabricx.cli.lightning.saving import SaveConfigCallback


def _callback(lr: float = 0.1, cls: type[SaveConfigCallback] = SaveConfigCallback, **options: Any) -> Any:
    parser = LightningArgumentParser()
    parser.add_argument("--lr", type=float)
    return cls(parser, parser.parse_args([f"--lr={lr}"]), **options)


def _trainer(folder: Path, main: bool = True) -> Any:
    return SimpleNamespace(log_dir=str(folder), is_global_zero=main)


def test_the_configuration_is_written_once_by_the_main_rank(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    _callback().setup(_trainer(folder, main=False), None, "fit")
    assert not folder.exists()
    callback = _callback(config_filename="name.yaml")
    callback.setup(_trainer(folder), None, "fit")
    assert yaml.safe_load((folder / "name.yaml").read_text()) == {"lr": 0.1}
    callback.setup(_trainer(tmp_path / "second"), None, "test")
    assert not (tmp_path / "second").exists()


def test_an_existing_configuration_is_replaced_only_on_request(tmp_path: Path) -> None:
    for _ in range(2):  # such as a rank that was replaced
        _callback().setup(_trainer(tmp_path), None, "fit")
    with pytest.raises(RuntimeError, match=r"config.yaml exists, with another configuration: .*'overwrite': True"):
        _callback(0.2).setup(_trainer(tmp_path), None, "fit")
    _callback(0.2, overwrite=True, multifile=True).setup(_trainer(tmp_path), None, "fit")
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {"lr": 0.2}


def test_a_class_may_save_the_configuration_in_another_folder(tmp_path: Path) -> None:
    seen = []

    class Elsewhere(SaveConfigCallback):
        def save_config(self, trainer: Any, pl_module: Any, stage: str) -> None:
            seen.append((self.config.lr, stage))

    _callback(cls=Elsewhere, save_to_log_dir=False).setup(_trainer(tmp_path), None, "fit")
    assert seen == [(0.1, "fit")]
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="writes nothing: derive a class with a method save_config"):
        _callback(save_to_log_dir=False)
