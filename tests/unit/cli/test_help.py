"""The help: groups with choices, and keys with values and the explanations of docstrings."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from fabricx.cli.help import explained_argument
from fabricx.cli.hydra_app import run_app
from fabricx.cli.main import COMMANDS, HELP, main

NET = """
class Net:
    '''A net.

    Args:
        width: neurons of
            a layer.
    '''
    def __init__(self, width=3): ...

class Kept:
    '''A base.

    Args:
        pace: steps in
            a second.
    '''

class Wide(Kept):
    '''A class.

    Args:
        pace: see `Kept`; 0 for none.
        kind: see `Nothing`.
    '''

class Wider(Wide): ...

raise RuntimeError("not imported for the help")
"""


def test_keys_are_listed_with_explanations_without_importing_classes(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own_folder / "netfile.py").write_text(NET)
    choices = ["strategy=ddp", "logger=csv", "launcher=slurm"]
    arguments = ["-h", "module=custom", "module._target_=netfile.Net", "module.width=5", *choices]
    run_app(print, arguments, None, "config", "mine [KEY=VALUE]")
    output = capsys.readouterr().out
    assert output.startswith("mine [KEY=VALUE]\n\nGroups: GROUP=CHOICE\n")
    assert "  experiment: charlm, digits\n" in output
    assert "  module.width=5\n      neurons of a layer.\n" in output
    assert "  trainer.accumulate_grad_batches=1\n      batches of each rank for a weight update.\n" in output
    assert "  seed=0\n      seed of all" in output
    lines = output.splitlines()
    assert max(map(len, lines)) <= 80
    unexplained = [
        key
        for key, after in itertools.pairwise(lines)
        if key.startswith(("  trainer.", "  strategy.", "  launcher.", "  callbacks."))
        and not after.startswith("      ")
    ]
    assert sorted(unexplained) == ["  launcher.name=slurm", "  strategy.name=ddp"]
    assert not (own_folder / "runs").exists()


def test_references_in_a_docstring_are_explained(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (own_folder / "netfile.py").write_text(NET)
    for target in ("Wide", "Gone"):
        options = ["+module.pace=1", "+module.kind=2"]
        run_app(print, ["-h", "module=custom", f"module._target_=netfile.{target}", *options], None, "config", "mine")
        output = capsys.readouterr().out
        assert ("  module.pace=1\n      steps in a second; 0 for none.\n" in output) is (target == "Wide")
        assert ("  module.kind=2\n      see `Nothing`.\n" in output) is (target == "Wide")
    assert explained_argument("netfile.Wider", "pace", bases=True) == "see `Kept`; 0 for none"
    run_app(print, ["-h", "strategy=async_sgd"], None, "config", "mine")
    output = capsys.readouterr().out
    assert "  strategy.compression_keep=0.01\n      fraction of the elements" in output
    assert "see `ServerOptions`" not in output


@pytest.mark.parametrize("command", ["doctor", "scale", "resume", "simulate"])
def test_a_command_without_a_configuration_prints_its_help(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fabricx", command, "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert capsys.readouterr().out.startswith(f"fabricx {command}")


def test_the_list_of_commands_is_complete_and_fits_a_terminal() -> None:
    lines = HELP.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("  fabricx ")][: len(COMMANDS)] == [*COMMANDS]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
        (PermissionError(13, "Permission denied", "locked/run"), 1, "error: locked/run: Permission denied\n"),
    ],
)
def test_ctrl_c_and_an_unreadable_file_end_a_command_without_a_traceback(
    error: BaseException, status: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(arguments: list[str]) -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["fabricx", "scale", "runs/x", "2"])
    monkeypatch.setattr("fabricx.cli.main._scale", fails)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == status
    assert capsys.readouterr().err == message


def test_doctor_refuses_arguments(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["fabricx", "doctor", "runs"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert "takes no arguments, but got: runs" in capsys.readouterr().err
