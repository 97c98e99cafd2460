"""Modules at Lightning's paths, created when they are imported: `fabricx.pytorch.callbacks.early_stopping`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from fabricx.errors import did_you_mean
from fabricx.pytorch.absent import Absent
from fabricx.pytorch.names import FORMER, Names, modules, names_of

ROOT: Final = "fabricx.pytorch"
FABRIC: Final = "fabricx.fabric"  # the same modules as below `fabricx.pytorch.fabric`
_OWN: Final = tuple(f"{ROOT}.{name}" for name in ("absent", "documentation", "modules", "names"))


def lookup(path: str, name: str) -> Any:
    """Return an object by its name in a module of Lightning; an `Absent` for a name that fabricx does not have.

    Args:
        path: path of the module below `lightning.pytorch`; "" for the root.
        name: name of the object, or of a module below.

    Raises:
        ImportError: an earlier version of Lightning had the name; the message has its successor.
        AttributeError: Lightning does not have the name.
    """
    names = names_of(path) or Names()
    if name in names.names:
        module, _, attribute = names.names[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    below = f"{path}.{name}" if path else name
    if names_of(below) is not None:
        return importlib.import_module(f"{ROOT}.{below}")
    if names.source and not name.startswith("_"):
        try:
            return getattr(importlib.import_module(names.source), name)
        except AttributeError:
            pass
        except ImportError as error:
            if name in FORMER or not str(error).startswith("fabricx has no"):  # such as a package that is missing
                raise
            return Absent(name, str(error))
    if name in names.absent:
        text = f"fabricx has no {name} of Lightning: {names.absent[name]}"
        if name in FORMER:
            raise ImportError(text)
        return Absent(name, text)
    module = f"{ROOT}.{path}" if path else ROOT
    raise AttributeError(f"module {module!r} has no attribute {name!r}.{did_you_mean(name, available(path))}")


def available(path: str) -> list[str]:
    """Return the names of a module of Lightning that fabricx has.

    Args:
        path: path of the module below `lightning.pytorch`; "" for the root.
    """
    names = names_of(path) or Names()
    source = list(importlib.import_module(names.source).__all__) if names.source else []
    start = f"{path}." if path else ""
    below = [module.removeprefix(start) for module in modules() if module.startswith(start)]
    return sorted({*names.names, *source, *(module for module in below if "." not in module)})


class _Module(ModuleType):
    """A module whose attributes are looked up at first access."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        path = _path_of(self.__name__)
        if name == "__all__":
            return [known for known in available(path) if names_of(f"{path}.{known}") is None]
        value = lookup(path, name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return available(_path_of(self.__name__))


def _path_of(fullname: str) -> str:
    """Return the path of a module below `lightning.pytorch`; "fabric" and below for those of `lightning.fabric`."""
    if fullname.startswith(f"{FABRIC}."):
        return f"fabric.{fullname.removeprefix(f'{FABRIC}.')}"
    return fullname.removeprefix(f"{ROOT}.")


class _Modules(MetaPathFinder, Loader):
    """Finds and loads the modules at Lightning's paths."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the description of a module at a path of Lightning; None for all other modules.

        Args:
            fullname: name of the module.
            path, target: unused.

        Raises:
            ModuleNotFoundError: fabricx has no module at this path of Lightning.
        """
        if not fullname.startswith((f"{ROOT}.", f"{FABRIC}.")) or fullname in _OWN:
            return None
        below = _path_of(fullname)
        if names_of(below) is None:
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: fabricx has no {below!r} of Lightning.{did_you_mean(below, modules())}"
                "\n  docs/lightning.md lists the names",
                name=fullname,
            )
        return ModuleSpec(fullname, self, is_package=any(name.startswith(f"{below}.") for name in modules()))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty module.

        Args:
            spec: spec of the module.
        """
        return _Module(spec.name, f"Names of `lightning.pytorch.{_path_of(spec.name)}` in fabricx.")

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names are looked up at first access.

        Args:
            module: created.
        """


def install() -> None:
    """Let Python import modules at Lightning's paths below `fabricx.pytorch`."""
    if not any(isinstance(finder, _Modules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Modules())
