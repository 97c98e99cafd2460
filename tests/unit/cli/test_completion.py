"""Completion of commands, groups, choices and keys."""

from __future__ import annotations

import pytest

from fabricx.cli.completion import main

COMMANDS = ("fit", "test", "resume", "report")


@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("fabricx re", "resume report"),
        ("fabricx fit strategy=d", "strategy=ddp"),
        ("fabricx test trainer.max_e", "trainer.max_epochs="),
        ("fabricx fit experiment=digits mod", "mode= module. module="),
        ("fabricx resume tr", ""),
    ],
)
def test_a_command_line_is_completed(
    line: str, completions: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    main(["-sc", "query=bash"], COMMANDS, ("fit", "test"))
    assert sorted(capsys.readouterr().out.split()) == sorted(completions.split())


@pytest.mark.parametrize("arguments", [["-sc", "install=bash"], ["fit", "-sc", "install=bash"]])
def test_the_script_for_the_shell_is_printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(arguments, COMMANDS, ("fit", "test"))
    assert "complete -o nospace" in capsys.readouterr().out
