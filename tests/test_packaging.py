"""Packaging: pyproject.toml, links, and the installed wheel."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.tree import LINKED, PYPROJECT, ROOT, SETUPTOOLS, files, package_folders, python, short


def test_pyproject_lists_every_package_of_the_tree():
    assert sorted(SETUPTOOLS["packages"]) == sorted(package_folders())


def test_the_version_is_equal_in_all_files():
    version = PYPROJECT["project"]["version"]
    assert f'__version__ = "{version}"' in (ROOT / "fabricx" / "__init__.py").read_text()
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_folders_at_the_top_are_mapped_to_the_names_they_are_imported_under():
    assert SETUPTOOLS["package-dir"] == {f"fabricx.{name}": name for name in LINKED}


@pytest.mark.parametrize("name", LINKED)
def test_links_are_relative(name):
    assert os.readlink(ROOT / "fabricx" / name) == f"../{name}"


@pytest.mark.parametrize("name", LINKED)
def test_a_folder_at_the_top_refuses_to_be_imported_by_its_own_name(name, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    with pytest.raises(ImportError, match=f"import this package as fabricx.{name}, not {name}"):
        importlib.import_module(name)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Build a source archive from a copy of the tree, a wheel from this archive, and install it in a fresh environment.

    Returns the package folder of the environment, which has no dependencies.
    """
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("fabricx", *LINKED):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    python(f"from setuptools import build_meta; build_meta.build_sdist({str(out)!r})", cwd=tree)
    [archive] = out.glob("*.tar.gz")
    shutil.unpack_archive(archive, tree / "unpacked", filter="data")
    [unpacked] = (tree / "unpacked").iterdir()
    python(f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})", cwd=unpacked)
    [path] = out.glob("*.whl")
    fresh = out / "fresh"
    venv.create(fresh, with_pip=False)
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", fresh / "bin" / "python", "install", "--quiet", "--no-index",
         "--no-deps", "--no-compile", "--disable-pip-version-check", "--root-user-action=ignore", path],
        check=True, timeout=100,
    )  # fmt: skip
    [site] = (fresh / "lib").glob("python*/site-packages")
    return site


def test_the_wheel_contains_every_module_and_every_configuration_file(wheel):
    expected = set()
    for name, folder in package_folders().items():
        for kind in ("*.py", "*.j2", "*.js", "*.csv.gz", "*-LICENSE.txt"):
            expected |= {f"{name.replace('.', '/')}/{path.name}" for path in folder.glob(kind)}
    expected |= {f"fabricx/{short(path)}" for path in files(ROOT / "conf", "*.yaml")}
    expected.add("fabricx/py.typed")
    packed = {path.relative_to(wheel).as_posix() for path in wheel.rglob("*") if path.is_file()}
    assert {name for name in packed if ".dist-info/" not in name} == expected


def test_the_wheel_has_a_single_top_level_package(wheel):
    # a project's own `callbacks/` must never shadow fabricx's
    assert {path.name for path in wheel.iterdir() if path.suffix != ".dist-info"} == {"fabricx"}


def test_an_installed_wheel_finds_its_plugins(wheel, tmp_path):
    program = (
        "import fabricx, importlib.resources as r; from fabricx import plugins\n"
        "from fabricx.strategies import DDP; from fabricx.callbacks import EarlyStopping\n"
        "assert plugins.find('strategies', 'ddp') is DDP\n"
        "assert (r.files('fabricx.conf') / 'strategy' / 'ddp.yaml').is_file()\n"
        "print(fabricx.__file__)"
    )
    (wheel / "dependencies.pth").write_text(sysconfig.get_path("purelib"))  # without the .pth files of that folder
    bin = wheel.parents[2] / "bin"
    for command, output in (
        ([bin / "python", "-P", "-c", program], str(wheel / "fabricx" / "__init__.py")),
        ([bin / "fabricx", "--version"], f"fabricx {PYPROJECT['project']['version']}"),
    ):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        ended = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True
        )
        assert ended.stdout == f"{output}\n"


def test_a_folder_named_fabricx_beside_a_script_does_not_shadow_the_package(tmp_path):
    (tmp_path / "fabricx" / "tests").mkdir(parents=True)  # like a clone
    (tmp_path / "script.py").write_text("import fabricx.plugins; print(fabricx.plugins.__name__)")
    ended = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=100, check=False)
    assert ended.stdout == "fabricx.plugins\n", ended.stderr + "\ninstall it with make, which asks for a plain path"
