"""Records how a run was made: command line, versions, commit of the user's project."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from fabricx.redaction import masked, masked_command

_PACKAGES = ("fabricx", "torch", "lightning-utilities", "hydra-core", "tensorboard", "numpy")


def write(run_dir: Path, config: Mapping[str, Any] | None) -> None:
    """Write `command.txt`, `versions.json` and, where there is a configuration, `config.yaml`; what is there stays.

    Secrets are masked: the files have the modes that the user's umask says, so that others may read them.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    if not (run_dir / "command.txt").exists():
        (run_dir / "command.txt").write_text(masked_command(sys.orig_argv) + "\n")  # Hydra changes sys.argv
    if not (run_dir / "versions.json").exists():
        (run_dir / "versions.json").write_text(
            json.dumps({**versions(), "git": git_commit(Path.cwd())}, indent=2) + "\n"
        )
    if config is not None:
        (run_dir / "config.yaml").write_text(_yaml(masked(config)))


def mask_file(file: Path) -> None:
    """Mask the secrets of a file in YAML, such as those that Hydra writes; one that has none stays as it is."""
    import yaml  # type: ignore[import-untyped]

    data = yaml.safe_load(file.read_text())
    if (shown := masked(data)) != data:
        file.write_text(yaml.safe_dump(shown, sort_keys=False))


def write_arguments(run_dir: Path, made_of: Mapping[str, Any]) -> None:
    """Write `arguments.yaml` if there is no configuration: what a run was made with in Python."""
    target = run_dir / "arguments.yaml"
    if not (run_dir / "config.yaml").exists() and not target.exists():
        target.write_text(_yaml(masked(made_of)))


def _yaml(data: Mapping[str, Any]) -> str:
    import yaml  # type: ignore[import-untyped]

    text: str = yaml.safe_dump(dict(data), sort_keys=False)
    return text


def versions() -> dict[str, str | None]:
    """Return the versions of python, the system, and the packages that decide numbers."""
    found: dict[str, str | None] = {"python": platform.python_version(), "system": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def git_commit(folder: Path) -> str | None:
    """Return the commit of the project in a folder, marked where files are changed; None outside of git."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return described.stdout.strip() or None if described.returncode == 0 else None
