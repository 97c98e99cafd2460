"""A function under Hydra: composed configuration, messages about mistakes, and folders of failed jobs."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from fabricx import plugins
from fabricx.cli.hydra_app import run_app
from fabricx.config import plain


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_an_unknown_choice_of_an_optional_group_is_an_error(
    own_folder: Path, explained: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    write(own_folder, {"conf/local/a.yaml": "x: 1", "conf/train.yaml": "defaults: [fabricx, optional local: null]"})
    options = ["--config-dir", "conf", "--config-name", "train"]
    assert "local=b: there is no such local.\n  known: a" in explained([*options, "local=b"])
    run_app(lambda cfg: print(cfg.local.x), [*options, "local=a"], None, "config")
    assert capsys.readouterr().out == "1\n"


def test_each_failed_job_of_a_sweep_is_named(own_folder: Path, explained: Callable[..., str]) -> None:
    def halves(cfg: Any) -> float:
        if isinstance(cfg.seed, str):
            raise ValueError("no number")
        return float(cfg.seed) / 2

    said = explained(["-m", "seed=a,2,b"], halves)
    assert [line for line in said.splitlines() if line.startswith("job")] == [
        "job 0 of the sweep (seed=a) failed", "job 2 of the sweep (seed=b) failed",
    ]  # fmt: skip
    [sweep] = (own_folder / "multirun").iterdir()
    assert sorted(folder.name for folder in sweep.iterdir() if folder.is_dir()) == ["1"]


def test_an_error_of_the_users_code_keeps_its_traceback_without_those_of_libraries(
    explained: Callable[..., str],
) -> None:
    def fails(cfg: Any) -> None:
        raise RuntimeError("mine")

    said = explained([], fails)
    assert "in fails" in said
    assert said.rstrip().endswith("RuntimeError: mine")
    assert "site-packages" not in said


@pytest.mark.parametrize("name", ["HYDRA_FULL_ERROR", "FABRICX_TRACEBACK"])
def test_all_frames_are_shown_on_request(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(cfg: Any) -> None:
        raise RuntimeError("mine")

    monkeypatch.setenv(name, "1")
    with pytest.raises(RuntimeError, match="mine"):
        run_app(fails, [], None, "config")


def test_plugins_of_other_packages_are_choices_of_their_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry_points(group: str) -> list[metadata.EntryPoint]:
        return [metadata.EntryPoint("theirs", "nowhere:Theirs", group)]

    def compose(*arguments: str) -> Any:
        composed: list[Any] = []
        run_app(lambda cfg: composed.append(plain(cfg)), list(arguments), None, "config")
        return composed[0]

    monkeypatch.setattr(plugins.metadata, "entry_points", entry_points)
    chosen = compose("strategy=theirs", "callbacks=theirs", "logger=theirs", "strategy.every=3", "callbacks.theirs.a=1")
    assert chosen["strategy"] == {"name": "theirs", "every": 3}
    assert chosen["callbacks"]["theirs"] == {"a": 1}
    assert "model_checkpoint" in chosen["callbacks"]
    assert chosen["logger"] == {"theirs": {}}
