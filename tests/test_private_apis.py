"""Every private name of torch and other libraries in the source is listed in `docs/private_apis.md` with a reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.sources import ROOT, trees

TABLE = ROOT / "docs" / "private_apis.md"
OWN = {"_adapted_from", "_replace"}  # set on classes that fabricx creates; a documented method of named tuples
FOREIGN_ROOTS = {"torch", "dist", "nn", "c10d", "_c10d", "np", "sys", "random", "multiprocessing"}


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a file defines, including attributes of its own objects."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_foreach"))


def used(tree: ast.Module, own_names: set[str]) -> Iterator[str]:
    """Yield the private names of other libraries that a file uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root = ast.unparse(node).split(".")[0]
            if root in FOREIGN_ROOTS or node.attr not in own_names:
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(("fabricx", "tests")):
            for name in [*(node.module or "").split("."), *(alias.name for alias in node.names)]:
                if is_private(name) and node.module != "__future__":
                    yield name


def test_the_table_lists_exactly_the_private_names_of_other_libraries() -> None:
    files = {str(path.relative_to(ROOT)): tree for path, tree in trees().items()}
    assert len(files) > 200
    own_names = OWN | {name for tree in files.values() for name in defined(tree)}
    used_names = {(file, name) for file, tree in files.items() for name in used(tree, own_names)}
    listed: set[tuple[str, str]] = set()
    for row in re.findall(r"^\| `[^\n]*$", TABLE.read_text(), re.MULTILINE):
        files, names, reason = (cell.strip() for cell in row.strip("|").split("|"))
        assert len(reason) > 15, row
        listed |= {(file, name) for file in re.findall(r"`(.*?)`", files) for name in re.findall(r"`(\w+)`", names)}
    missing, outdated = sorted(used_names - listed), sorted(listed - used_names)
    assert not missing, f"use a public API, or give the reason in docs/private_apis.md: {missing}"
    assert not outdated, f"delete these from docs/private_apis.md: {outdated}"
