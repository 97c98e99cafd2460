"""A function under Hydra: composed configuration, messages about mistakes, and folders of failed jobs."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig

from fabricx import plugins
from fabricx.cli.hydra_app import _new_stamp, _place, run_app
from fabricx.cli.main import _command, _demonstration
from fabricx.config import plain, recorded_configuration


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

    output = explained(["-m", "seed=a,2,b"], halves)
    assert [line for line in output.splitlines() if line.startswith("job")] == [
        "job 0 of the sweep (seed=a) failed", "job 2 of the sweep (seed=b) failed",
    ]  # fmt: skip
    [sweep] = (own_folder / "multirun").iterdir()
    assert sorted(folder.name for folder in sweep.iterdir() if folder.is_dir()) == ["1"]


def test_an_error_of_the_users_code_keeps_its_traceback_without_those_of_libraries(
    explained: Callable[..., str],
) -> None:
    def fails(cfg: Any) -> None:
        raise RuntimeError("mine")

    output = explained([], fails)
    assert "in fails" in output
    assert output.rstrip().endswith("RuntimeError: mine")
    assert "site-packages" not in output


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


@pytest.mark.parametrize(("options", "parent"), [([], "runs"), (["trainer.default_root_dir=there"], "there/runs")])
def test_the_folder_of_a_run_is_in_that_of_the_trainer(own_folder: Path, options: list[str], parent: str) -> None:
    folders: list[Path] = []
    run_app(lambda cfg: folders.append(Path(HydraConfig.get().runtime.output_dir)), options, None, "config")
    assert folders[0].parent == own_folder / parent


def test_no_line_of_pythons_standard_library_is_named_as_the_users_line() -> None:
    @contextlib.contextmanager
    def refusing() -> Iterator[None]:
        raise ValueError("no")
        yield

    with pytest.raises(ValueError, match="no") as caught:
        refusing().__enter__()
    assert "contextlib.py" not in _place(caught.value)
    assert "test_hydra_app.py" in _place(caught.value)


def test_a_checkpoint_instead_of_a_run_folder_is_an_error_with_both_commands(own_folder: Path) -> None:
    write(own_folder, {"runs/a/config.yaml": "seed: 1", "runs/a/checkpoints/b.ckpt": "", "c.ckpt": ""})
    with pytest.raises(ValueError, match=r"resume runs/a\n.*fabricx fit ckpt_path=runs/a/checkpoints/b.ckpt"):
        recorded_configuration(Path("runs/a/checkpoints/b.ckpt"))
    with pytest.raises(ValueError, match=r"c.ckpt is not the folder of a run\n  to begin a run with it"):
        recorded_configuration(Path("c.ckpt"))


@pytest.mark.parametrize("flag", ["--config-path", "-cp"])
def test_the_folder_of_the_main_configuration_is_relative_to_the_current_folder(
    flag: str, own_folder: Path, explained: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    write(own_folder, {"conf/config.yaml": "defaults: [fabricx, _self_]\nseed: 5"})
    options = [flag, "conf"]
    assert _demonstration(options) == []
    run_app(lambda cfg: print(cfg.seed), options, None, "config")
    assert capsys.readouterr().out == "5\n"
    assert f"--config-path {own_folder / 'no'}: the folder does not exist" in explained([f"{flag}={own_folder / 'no'}"])


def test_a_printed_command_can_be_copied_into_a_shell() -> None:
    assert shlex.split(_command("fabricx", "report", "my runs/lr=0.1 (a)"))[1:] == ["report", "my runs/lr=0.1 (a)"]


def test_launches_of_two_containers_have_different_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getppid", lambda: 1)
    names = []
    for host in ("a", "b", "a"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        names.append(_new_stamp(restarts=True))
    assert names[0] == names[2] != names[1]
