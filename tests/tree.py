"""The files and packages of the project, for tests of the whole tree."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
LINKED = ("strategies", "callbacks", "conf")  # real folders at the top, imported as fabricx.strategies, ...
HIDDEN = {"__pycache__", "build", "dist", "runs", "multirun"}


def files(folder: Path, pattern: str) -> list[Path]:
    """Return the files of a folder that belong to the project; links aren't followed."""
    paths = (path for path in folder.rglob(pattern) if path.is_file())
    return sorted(
        path
        for path in paths
        if not any(part in HIDDEN or part.startswith(".") for part in path.relative_to(ROOT).parts)
        and not any(parent.is_symlink() for parent in path.parents)
        and not any(part.endswith(".egg-info") for part in path.parts)
    )


def package_folders() -> dict[str, Path]:
    """Return the folder of each package, by its import name."""
    folders = {}
    for top in (ROOT / "fabricx", *(ROOT / name for name in LINKED)):
        for init in files(top, "__init__.py"):
            inside = ".".join(init.parent.relative_to(ROOT).parts)
            folders[inside if top.name == "fabricx" else f"fabricx.{inside}"] = init.parent
    return folders


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def python(program: str, cwd: Path, path: Path | str = "") -> str:
    """Run a program that imports fabricx from `path`; return its output."""
    ended = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=cwd, env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
