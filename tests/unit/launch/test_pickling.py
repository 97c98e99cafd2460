"""A script that workers can't import is refused before any is started."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fabricx.errors import NotPicklable
from fabricx.launch.pickling import check_script


class Mine:
    __module__ = "__main__"


def test_a_module_of_a_prompt_is_refused_and_that_of_a_file_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    check_script(Path)  # defined in a file
    with pytest.raises(NotPicklable, match="Mine is used in a session without a file"):
        check_script(Mine)
    main.__file__ = "<stdin>"
    with pytest.raises(NotPicklable, match=r"<stdin>.*which the worker processes can't import"):
        check_script(Path)
    script = tmp_path / "script.py"
    script.touch()
    main.__file__ = str(script)
    check_script(Mine)


def test_a_worker_that_imports_the_script_starts_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(RuntimeError, match='put the code of the script under `if __name__ == "__main__":`'):
        check_script(Path)
