"""Storage of checkpoints: a local folder, or any URL that fsspec supports."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from fabricx.scratch import private_folder

Place = str | os.PathLike[str]


def as_path(location: Place) -> Path:
    """Return a path object; for a URL a `UPath` of universal_pathlib, which has the same methods.

    >>> as_path("file:///tmp/saved")
    PosixPath('/tmp/saved')
    >>> as_path("memory://saved") / "last.ckpt"
    MemoryPath('/saved/last.ckpt', protocol='memory')

    Args:
        location: local path or URL.

    Raises:
        ValueError: the URL's scheme is unknown, or its package is not installed.
    """
    text = str(location)
    if "://" not in text:
        return Path(text)
    from upath import UPath

    try:
        _find_class(text.partition("://")[0])
        path: Any = UPath(text)
        kind = path.fs.protocol  # raises if the scheme is unknown or its package is missing
    except (ImportError, ValueError) as error:
        raise ValueError(f"{text!r}: {error}") from None
    return Path(path.path) if "file" in kind else cast(Path, path)


@functools.cache
def _find_class(scheme: str) -> None:
    """Let universal_pathlib find the class of a scheme without its warning about file systems of users."""
    from upath import UPath

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="UPath .* filesystem not explicitly implemented")
        UPath(f"{scheme}://")  # the library keeps the class


def is_local(path: Path) -> bool:
    """Return whether a path is local, so that it supports links, renaming and fsync.

    Args:
        path: result of `as_path`.
    """
    return isinstance(path, Path)


def discard(path: Path) -> None:
    """Delete a file, a link, or a folder and its content; errors are ignored.

    Args:
        path: result of `as_path`.
    """
    if path.is_symlink() or path.is_file():
        with contextlib.suppress(OSError):
            path.unlink()
    elif is_local(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            cast(Any, path).rmdir(recursive=True)


@contextlib.contextmanager
def local_copy(file: Path) -> Iterator[Path]:
    """Yield a local path of a file; a remote file is downloaded to a temporary folder.

    Args:
        file: local or remote.
    """
    if is_local(file):
        yield file
        return
    with private_folder() as folder:
        fetched = Path(folder) / file.name
        cast(Any, file).fs.get_file(cast(Any, file).path, str(fetched))
        yield fetched


def open_seekable(file: Path) -> IO[bytes]:
    """Open a file for reading bytes at any position; one of a web server without ranges is downloaded.

    Args:
        file: local or remote.
    """
    opened = cast(IO[bytes], file.open("rb"))
    if is_local(file):
        return opened
    try:
        opened.seek(1)
        opened.read(1)
        opened.seek(0)
    except (OSError, ValueError):  # of fsspec
        opened.close()
        copy = cast(IO[bytes], tempfile.TemporaryFile())  # noqa: SIM115
        with file.open("rb") as stream:
            shutil.copyfileobj(stream, copy)
        copy.seek(0)
        return copy
    return opened


@contextlib.contextmanager
def as_file(source: Place | IO[bytes]) -> Iterator[Place]:
    """Yield the path of a file; the content of an open file is copied to a temporary folder.

    Args:
        source: a path, or a file that is open for reading bytes.
    """
    if isinstance(source, (str, os.PathLike)):
        yield source
        return
    with private_folder() as folder:
        file = Path(folder) / "open-file.ckpt"
        with file.open("wb") as copy:
            shutil.copyfileobj(source, copy)
        yield file
