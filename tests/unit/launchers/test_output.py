"""The output of the main rank, as the launching process prints it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fabricx.launchers.output import MainOutput


def test_the_output_is_printed_by_whole_lines_and_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "output"
    output = MainOutput(file, without="submitit ")
    output.copy()
    text = "submitit INFO begins\nepoch 1\rperte 0.5 \u2713\nfin".encode()
    for end in range(0, len(text) + 1, 5):
        file.write_bytes(text[:end])
        output.copy()
    file.write_bytes(text)
    output.copy()
    assert capsys.readouterr().out == "epoch 1\rperte 0.5 \u2713\n"
    output.copy(ended=True)
    assert capsys.readouterr().out == "fin"
