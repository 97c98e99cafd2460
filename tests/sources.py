"""The syntax trees of the source, for all tests that read it: a process parses each file once."""

from __future__ import annotations

import ast
import functools
import gc
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
FOLDERS: Final = ("fabricx", "callbacks", "strategies")  # real folders of the repository: links aren't followed


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """Return the tree of each file of the package."""
    return {path: parsed(path) for folder in FOLDERS for path in _python_files(ROOT / folder)}


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return the tree of a file."""
    tracked = gc.isenabled()
    gc.disable()  # collections would repeatedly traverse all trees
    try:
        return ast.parse(path.read_text())
    finally:
        if tracked:
            gc.enable()


def _python_files(folder: Path) -> list[Path]:
    paths = [path for path in folder.rglob("*.py") if not path.is_symlink()]
    return sorted(path for path in paths if not any(parent.is_symlink() for parent in path.parents))
