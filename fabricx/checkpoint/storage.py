"""Storage of checkpoints: a folder of this machine, or any URL that fsspec supports."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from fabricx.scratch import private_folder

Place = str | os.PathLike[str]


def as_path(place: Place) -> Path:
    """Return the path of a folder or file; for a URL one of universal_pathlib's, which has the same methods.

    >>> as_path("file:///tmp/saved")
    PosixPath('/tmp/saved')
    >>> as_path("memory://saved") / "last.ckpt"
    MemoryPath('/saved/last.ckpt', protocol='memory')

    Raises:
        ValueError: URLs of that kind aren't known, or what reads them isn't installed.
    """
    text = str(place)
    if "://" not in text:
        return Path(text)
    from upath import UPath

    try:
        found: Any = UPath(text)
        kind = found.fs.protocol  # here it turns out whether there is something for it
    except (ImportError, ValueError) as error:
        raise ValueError(f"{text!r}: {error}") from None
    return Path(found.path) if "file" in kind else cast(Path, found)


def is_local(path: Path) -> bool:
    """Return whether a path is of this machine: links, renaming and fsync are to be had."""
    return isinstance(path, Path)


def discard(path: Path) -> None:
    """Delete a folder with all that is in it, as far as that can be done."""
    if is_local(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            cast(Any, path).rmdir(recursive=True)


@contextlib.contextmanager
def at_hand(file: Path) -> Iterator[Path]:
    """Give a file as one of this machine, fetched if need be."""
    if is_local(file):
        yield file
        return
    with private_folder() as folder:
        fetched = Path(folder) / file.name
        cast(Any, file).fs.get_file(cast(Any, file).path, str(fetched))
        yield fetched
