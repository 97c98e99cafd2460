"""Log lines of a resumed run are added to the file of the run."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from fabricx.cli.run_log import logging_of_run


def test_lines_are_appended_to_the_log_file_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, library = logging.getLogger(), logging.getLogger("fabricx")
    before = root.level, list(root.handlers), library.level, list(library.handlers), library.propagate
    for text in ("first", "second"):
        with logging_of_run(tmp_path):
            logging.getLogger("mine").info("%s of mine", text)
            logging.getLogger("mine").debug("not shown")
            logging.getLogger("fabricx.cli.main").info("%s of fabricx", text)
    assert (root.level, list(root.handlers), library.level, list(library.handlers), library.propagate) == before
    lines = [line.partition("][")[2] for line in (tmp_path / "fabricx.log").read_text().splitlines()]
    assert lines == [
        f"{name}][INFO] - {text}"
        for count in ("first", "second")
        for name, text in (("mine", f"{count} of mine"), ("fabricx.cli.main", f"{count} of fabricx"))
    ]
    printed = capsys.readouterr().out
    assert "first of mine" in printed
    assert "of fabricx" not in printed
