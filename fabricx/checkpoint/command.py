"""`fabricx checkpoint`: list, verify, export and import checkpoints."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Final

from fabricx.checkpoint.files import MARKER, is_committed, oldest_first, read_manifest, verify, written
from fabricx.checkpoint.hyperparameters import plain
from fabricx.checkpoint.storage import as_path, is_local
from fabricx.checkpoint.unread import is_unread, names_in
from fabricx.errors import CheckpointError
from fabricx.redaction import masked, printable

_FILES: Final = (".ckpt", ".pt", ".pth")  # extensions of files that may be checkpoints


def main(arguments: list[str]) -> int:
    """Run a subcommand; returns the exit code.

    Args:
        arguments: arguments of the command line, after `fabricx checkpoint`.
    """
    parser = argparse.ArgumentParser(
        prog="fabricx checkpoint", description="list, verify, export and import checkpoints"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="ls|verify|export|import")
    for name, help in (
        ("ls", "list the complete checkpoints in a folder and its subfolders"),
        ("verify", "compare every file's size and checksum with the manifest"),
        ("export", "write the plain weights into one safetensors file"),
    ):
        command = commands.add_parser(name, help=help, description=help)
        command.add_argument("folder", type=as_path, help="a checkpoint, or a folder such as a run's; may be a URL")
        if name == "export":
            command.add_argument("target", type=Path, nargs="?", help="output file; by default beside the checkpoint")
    help = "write the weights and hyperparameters of Lightning, torch or safetensors as a checkpoint of fabricx"
    command = commands.add_parser("import", help=help, description=help)
    command.add_argument("source", type=as_path, help="a .ckpt, .pt or .safetensors file, an index, or a folder")
    command.add_argument("target", type=as_path, help="folder to create")
    command.add_argument("--strip-prefix", default="", help="prefix to remove from names; others are left out")
    command.add_argument("--add-prefix", default="", help="prefix to add to names")
    options = parser.parse_args(arguments)
    if options.command == "import":
        return _import(options.source, options.target, options.strip_prefix, options.add_prefix)
    checkpoints = find(options.folder)
    if not checkpoints:
        print(f"error: there is no complete checkpoint at {options.folder}", file=sys.stderr)
        return 1
    if options.command == "ls":
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(table(checkpoints, width))
        return 0
    if options.command == "verify":
        return _verify(checkpoints)
    return _export(checkpoints, options.target)


def find(folder: Path) -> list[Path]:
    """Return the complete checkpoints at a folder and in its subfolders, oldest first, without symbolic links.

    Args:
        folder: a checkpoint, or a folder with checkpoints.
    """
    if is_committed(folder):
        return [folder]
    checkpoints = [marker.parent for marker in folder.rglob(MARKER)]
    checkpoints += [file for file in folder.rglob("*") if file.suffix in _FILES and file.is_file()]
    checkpoints = [path for path in checkpoints if is_committed(path) and not path.is_symlink()]
    return oldest_first(checkpoints)


def table(checkpoints: list[Path], width: int | None = None) -> str:
    """Format checkpoints as a table with a line per checkpoint; where it is too wide, with a line per folder, too.

    Args:
        checkpoints: complete checkpoints.
        width: columns of the terminal; None for no limit.
    """
    text = _rows(checkpoints, full=True)
    if width is None or max(map(len, text.splitlines())) <= width:
        return text
    folders = dict.fromkeys(path.parent for path in checkpoints)
    by_folder = {folder: [path for path in checkpoints if path.parent == folder] for folder in folders}
    return "\n\n".join(f"{folder}\n{_rows(paths, full=False)}" for folder, paths in by_folder.items())


def _rows(checkpoints: list[Path], *, full: bool) -> str:
    rows: list[tuple[str, ...]] = [("step", "epoch", "ranks", "strategy", "MiB", "written", "checkpoint")]
    for path in checkpoints:
        when = f"{written(path).astimezone():%Y-%m-%d %H:%M:%S}"
        try:
            m = read_manifest(path)
        except CheckpointError as error:
            rows.append(("?", "?", "?", "?", "?", when, f"{path if full else path.name}  ({error})"))
            continue
        size = sum(listed["bytes"] for listed in m["files"].values()) / 2**20
        shown = (printable(str(m.get(key, ""))) for key in ("step", "epoch", "world_size", "strategy"))
        rows.append((*shown, f"{size:.1f}", when, str(path if full else path.name)))
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


def _import(source: Path, target: Path, strip: str, add: str) -> int:
    from fabricx.checkpoint.foreign import is_foreign, read_foreign, renamed
    from fabricx.checkpoint.writer import save

    try:
        if target.exists():
            raise CheckpointError(f"{target} exists already: choose another folder, or delete it first")
        if not is_foreign(source):
            raise CheckpointError(
                f"{source} is neither a file of Lightning, torch or safetensors nor a folder with weights: pass the "
                "file or the folder that the other program has saved; checkpoints of fabricx need no import"
            )
        foreign = read_foreign(source)
        names = list(foreign.weights)
        foreign.weights, foreign.others = renamed(foreign.weights, strip, add), {}
        if not foreign.weights:
            raise CheckpointError(f"no name in {source} begins with {strip!r}: {', '.join(names[:3])}, ...")
        without = len(names) - len(foreign.weights)
        unread = {name: set(names_in(value)) for name, value in (foreign.hparams | foreign.weights).items()}
        foreign.weights = {name: value for name, value in foreign.weights.items() if not unread[name]}
        foreign.hparams = {name: value for name, value in foreign.hparams.items() if not unread[name]}
        state = foreign.state()
        state["hparams"] = masked(plain(foreign.hparams))
        manifest = {
            "step": foreign.step, "epoch": foreign.epoch, "world_size": 1, "ranks": 0, "strategy": foreign.source,
            "weights_only": True, "hparams": state["hparams"], "imported": state["imported"],
        }  # fmt: skip
        save(target, state, manifest)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    left = f"; {without} without the prefix were omitted" if without else ""
    objects = [f"{name} ({', '.join(sorted(classes))})" for name, classes in unread.items() if classes]
    if objects:
        left += f"; omitted objects, which are not read: {', '.join(objects)}"
    print(f"{len(foreign.weights)} tensors, {len(foreign.hparams)} hyperparameters: {target}{left}")
    return 0


def _export(checkpoints: list[Path], target: Path | None) -> int:
    if len(checkpoints) > 1:
        print(
            f"error: there are several checkpoints; pass the path of one of them:\n{table(checkpoints)}",
            file=sys.stderr,
        )
        return 1
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from fabricx.checkpoint.reader import load, weights_of

    [path] = checkpoints
    # Beside a local checkpoint; for a URL, in the current folder.
    target = target or (path if is_local(path) else Path(path.name)).with_suffix(".safetensors")
    try:
        weights = weights_of(load(path), path)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    others = [name for name, weight in weights.items() if is_unread(weight) or not isinstance(weight, torch.Tensor)]
    weights = {name: weight for name, weight in weights.items() if name not in others}
    if unknown := [name for name, weight in weights.items() if weight.dtype == torch.complex128]:
        print(
            f"error: safetensors has no complex128, which is the type of {', '.join(unknown)}: load the checkpoint "
            "with load_from_checkpoint, and save another form of these weights, such as torch.view_as_real",
            file=sys.stderr,
        )
        return 1
    try:
        save_file(weights, target, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        print(f"error: {target} can't be written: {error}", file=sys.stderr)
        return 1
    left = f"; omitted states that are no tensors: {', '.join(others)}" if others else ""
    print(f"{len(weights)} tensors: {target}{left}")
    return 0
