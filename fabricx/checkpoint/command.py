"""`fabricx checkpoint`: list, verify and export."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fabricx.checkpoint.files import MARKER, is_committed, oldest_first, read_manifest, verify, written
from fabricx.checkpoint.storage import as_path, is_local
from fabricx.errors import CheckpointError
from fabricx.redaction import printable


def main(arguments: list[str]) -> int:
    """Run one of the commands; returns the exit code."""
    parser = argparse.ArgumentParser(prog="fabricx checkpoint", description="look after checkpoints")
    commands = parser.add_subparsers(dest="command", required=True, metavar="ls|verify|export")
    for name, help in (
        ("ls", "list the complete checkpoints in a folder and below"),
        ("verify", "compare every file's size and checksum with what was written"),
        ("export", "write the plain weights into one safetensors file"),
    ):
        command = commands.add_parser(name, help=help, description=help)
        command.add_argument("folder", type=as_path, help="a checkpoint, or a folder such as a run's; may be a URL")
        if name == "export":
            command.add_argument("target", type=Path, nargs="?", help="the file; by default beside the checkpoint")
    given = parser.parse_args(arguments)
    found = find(given.folder)
    if not found:
        print(f"error: there is no complete checkpoint at {given.folder}", file=sys.stderr)
        return 1
    if given.command == "ls":
        print(table(found))
        return 0
    if given.command == "verify":
        return _verify(found)
    return _export(found, given.target)


def find(folder: Path) -> list[Path]:
    """Return the complete checkpoints at a folder and below it, oldest first, without links to them."""
    if is_committed(folder):
        return [folder]
    found = [marker.parent for marker in folder.rglob(MARKER)]
    found = [path for path in found if is_committed(path) and not path.is_symlink()]
    return oldest_first(found)


def table(checkpoints: list[Path]) -> str:
    """Return lines of text, one for each checkpoint."""
    rows: list[tuple[str, ...]] = [("step", "epoch", "ranks", "strategy", "MiB", "written", "checkpoint")]
    for path in checkpoints:
        when = f"{written(path).astimezone():%Y-%m-%d %H:%M:%S}"
        try:
            m = read_manifest(path)
        except CheckpointError as error:
            rows.append(("?", "?", "?", "?", "?", when, f"{path}  ({error})"))
            continue
        size = sum(listed["bytes"] for listed in m["files"].values()) / 2**20
        shown = (printable(str(m.get(key, ""))) for key in ("step", "epoch", "world_size", "strategy"))
        rows.append((*shown, f"{size:.1f}", when, str(path)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return "\n".join(
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    )


def _verify(checkpoints: list[Path]) -> int:
    damaged = 0
    for path in checkpoints:
        try:
            verify(path)
            print(f"whole    {path}")
        except CheckpointError as error:
            damaged += 1
            print(f"DAMAGED  {error}")
    return 1 if damaged else 0


def _export(checkpoints: list[Path], target: Path | None) -> int:
    if len(checkpoints) > 1:
        print(f"error: there are several checkpoints, give one of them\n{table(checkpoints)}", file=sys.stderr)
        return 1
    from safetensors.torch import save_file

    from fabricx.checkpoint.reader import load, weights_of

    [path] = checkpoints
    # Beside a checkpoint of this machine; into the current folder from behind a URL.
    target = target or (path if is_local(path) else Path(path.name)).with_suffix(".safetensors")
    try:
        weights = weights_of(load(path), path)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    save_file(weights, target, metadata={"format": "pt"})
    print(f"{len(weights)} tensors: {target}")
    return 0
