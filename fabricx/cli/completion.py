"""Completion of the command line in bash and zsh: `eval "$(fabricx -sc install=bash)"`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

FLAGS: Final = ("-sc", "--shell-completion")


def main(arguments: Sequence[str], commands: Sequence[str], stages: Sequence[str]) -> None:
    """Print the script that installs completion, or the completions of the line in `COMP_LINE`.

    Args:
        arguments: command line, without the program; contains a flag of `FLAGS`.
        commands: all commands, which are completed as the first word.
        stages: the commands that take settings, which Hydra completes.
    """
    from fabricx.cli.hydra_app import run_app

    rest = [argument for argument in arguments if argument not in (*FLAGS, *stages)]
    words = os.environ.get("COMP_LINE", "").split(" ")
    if any(argument.startswith("query=") for argument in rest):
        if len(words) <= 2:  # the first word: the command
            print(" ".join(command for command in commands if command.startswith(words[-1])))
            return
        if words[1] not in stages:  # the shell completes the names of files
            return
        os.environ["COMP_LINE"] = " ".join([words[0], *words[2:]])  # Hydra does not support commands
    run_app(lambda cfg: None, [FLAGS[0], *(rest or ["install=bash"])], None, "config")
