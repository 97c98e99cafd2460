"""Modules that a program has loaded from files outside of the import path."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final, final

_SCRIPTS: Final = ("__main__", "__mp_main__")


def module_files() -> dict[str, str]:
    """Return the file of each module that other processes cannot import by name.

    Programs load plugins and configurations in this way, with `importlib.util.spec_from_file_location`.
    """
    path = {os.path.abspath(entry) for entry in sys.path}
    files: dict[str, str] = {}
    # Modules of packages are left alone: in a forked process, each module that is looked at copies a page of memory.
    for name in [name for name in tuple(sys.modules) if "." not in name and name not in _SCRIPTS]:
        # `getattr(module, ...)` would start lazy imports, and another thread may remove a module.
        file = getattr(sys.modules.get(name), "__dict__", {}).get("__file__")
        if not isinstance(file, str) or not file.endswith(".py"):
            continue
        folder, base = os.path.split(os.path.abspath(file).removesuffix(f"{os.sep}__init__.py"))
        if folder not in path or base.removesuffix(".py") != name:
            files[name] = os.path.abspath(file)
    return files


def find_in_files(files: Mapping[str, str]) -> ModuleFiles:
    """Import modules of the parent process from their files, in this process and its children.

    Args:
        files: result of `module_files` in the parent process.
    """
    finder = ModuleFiles(files)
    sys.meta_path.insert(0, finder)
    return finder


@final
class ModuleFiles(MetaPathFinder):
    """Import finder for modules of the parent process; a process that unpickles it has installed it.

    Args:
        files: result of `module_files` in the parent process.
    """

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = files

    def __reduce__(self) -> tuple[Any, ...]:
        return find_in_files, (self._files,)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec; None if it is not in `files`.

        Args:
            fullname: name of the module.
            path, target: unused.
        """
        file = self._files.get(fullname)
        if file is None:
            return None
        folders = [os.path.dirname(file)] if os.path.basename(file) == "__init__.py" else None
        return importlib.util.spec_from_file_location(fullname, file, submodule_search_locations=folders)
