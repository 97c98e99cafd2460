"""Modules from files outside of the import path are imported from these files by other processes."""

from __future__ import annotations

import importlib.util
import pickle
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fabricx.launch.module_files import ModuleFiles, module_files


def load(monkeypatch: pytest.MonkeyPatch, name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_modules_with_another_name_and_packages_in_other_folders_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plugin.py").write_text("class Net: ...\n")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "inner.py").write_text("value = 3\n")
    load(monkeypatch, "of_a_file", tmp_path / "plugin.py")
    load(monkeypatch, "pack", tmp_path / "pack" / "__init__.py")
    files = module_files()
    assert files["of_a_file"] == str(tmp_path / "plugin.py")
    assert files["pack"] == str(tmp_path / "pack" / "__init__.py")
    assert not {"os", "pytest", "torch", "__main__"} & files.keys()
    for name in ("of_a_file", "pack"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    pickle.loads(pickle.dumps(ModuleFiles(files)))  # as in the preparation data of a child process
    assert importlib.import_module("of_a_file").Net.__module__ == "of_a_file"
    assert importlib.import_module("pack.inner").value == 3
    monkeypatch.delitem(sys.modules, "pack.inner")


def test_a_module_in_a_folder_of_the_import_path_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "on_the_path.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("on_the_path")
    assert "on_the_path" not in module_files()
    monkeypatch.delitem(sys.modules, "on_the_path")
