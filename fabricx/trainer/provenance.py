"""Records the origin of a run: command line, versions, commit of the user's project."""

from __future__ import annotations

import contextlib
import functools
import json
import os
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
    """Write `command.txt` and `versions.json` unless they exist, and `config.yaml` if the run has a configuration.

    Secrets are masked, because other users may be able to read the files, whose modes follow the umask.

    Args:
        run_dir: the run's folder; created if missing.
        config: the configuration, or None.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    if not (run_dir / "command.txt").exists():
        (run_dir / "command.txt").write_text(masked_command(sys.orig_argv) + "\n")  # Hydra changes sys.argv
    if not (run_dir / "versions.json").exists():
        (run_dir / "versions.json").write_text(
            json.dumps({**versions(), "git": git_commit(Path.cwd())}, indent=2) + "\n"
        )
    if config is not None:
        _write_whole(run_dir / "config.yaml", _yaml(masked(config)))


def write_resumed(run_dir: Path, config: Mapping[str, Any]) -> list[Path]:
    """Record that a run is resumed: `config-resumed-1.yaml`, command and versions, beside the records of its start.

    Args:
        run_dir: the run's folder.
        config: the configuration from here on.

    Returns:
        the files.
    """
    number = len(list(run_dir.glob("config-resumed-*.yaml"))) + 1
    texts = {
        f"command-resumed-{number}.txt": masked_command(sys.orig_argv) + "\n",
        f"versions-resumed-{number}.json": json.dumps({**versions(), "git": git_commit(Path.cwd())}, indent=2) + "\n",
        f"config-resumed-{number}.yaml": _yaml(masked(config)),  # last: a later resume reads it
    }
    for name, text in texts.items():
        _write_whole(run_dir / name, text)
    return [run_dir / name for name in texts]


def _write_whole(file: Path, text: str) -> None:
    """Write a file whole, or not at all: a resume would read a part of the settings.

    Raises:
        ValueError: the file can't be written.
    """
    passing = file.with_name(f".{file.name}.new")
    try:
        passing.write_text(text)
        passing.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            passing.unlink(missing_ok=True)
        raise ValueError(
            f"{file} can't be written ({error.strerror}): make room on its disk, or make its folder writable"
        ) from error


def newest_configuration(run_dir: Path) -> Path:
    """Return the file with the configuration of a run since it was resumed last, or at its start.

    Args:
        run_dir: the run's folder.
    """
    resumed = run_dir.glob("config-resumed-*.yaml")
    numbered = {int(file.stem.rpartition("-")[2]): file for file in resumed if file.stem.rpartition("-")[2].isdecimal()}
    return numbered[max(numbered)] if numbered else run_dir / "config.yaml"


def mask_file(file: Path) -> None:
    """Mask the secrets in a YAML file, for example of Hydra; a file without secrets is not written.

    Args:
        file: the file.
    """
    import yaml  # type: ignore[import-untyped]

    data = yaml.safe_load(file.read_text())
    if (shown := masked(data)) != data:
        _write_whole(file, yaml.safe_dump(shown, sort_keys=False))


def write_arguments(run_dir: Path, made_of: Mapping[str, Any]) -> None:
    """Write `arguments.yaml`, the arguments of a run that was created in Python, unless it or `config.yaml` exists.

    Args:
        run_dir: the run's folder.
        made_of: arguments of the trainer, the module and the data module.
    """
    target = run_dir / "arguments.yaml"
    if not (run_dir / "config.yaml").exists() and not target.exists():
        target.write_text(_yaml(masked(made_of)))


def _yaml(data: Mapping[str, Any]) -> str:
    import yaml  # type: ignore[import-untyped]

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # ten times as fast
    text: str = yaml.dump(dict(data), Dumper=dumper, sort_keys=False)
    return text


def versions() -> dict[str, str | None]:
    """Return the versions of Python, the system, and the packages that affect numerical results."""
    installed = {"python": platform.python_version(), "system": platform.platform()}
    return {**installed, **{package: _version(package) for package in _PACKAGES}}


@functools.cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_commit(folder: Path) -> str | None:
    """Return the commit of the project in a folder, with "-dirty" for uncommitted changes; None outside of git.

    Args:
        folder: the folder.
    """
    if "GIT_DIR" not in os.environ and not any((parent / ".git").exists() for parent in (folder, *folder.parents)):
        return None  # without starting git, which takes milliseconds of each run
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
