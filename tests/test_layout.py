"""Rules for the whole tree: folders, names, sizes, links, and the content of README files."""

from __future__ import annotations

import ast
import doctest
import functools
import graphlib
import importlib
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import parsed
from tests.tree import LINKED, PYPROJECT, ROOT, files, package_folders, python, short

VAGUE_FILE_NAMES = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py", "base.py", "core.py"}
PYTHON = [path for top in ("fabricx", *LINKED) for path in files(ROOT / top, "*.py")]
FOLDERS = sorted({
    *package_folders().values(), ROOT / "examples", ROOT / "examples" / "my_project", ROOT / "tests",
    *(path.parent for path in (ROOT / "tests").glob("*/*.py")),
})  # fmt: skip


# -- folders and words --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", FOLDERS, ids=short)
def test_each_folder_has_a_readme_of_less_than_a_page(folder):
    readme = folder / "README.md"
    assert readme.is_file(), f"{short(folder)} has no README.md: what belongs there, what doesn't, which one when"
    assert 3 <= readme.read_text().count("\n") <= 60


def test_fabricx_has_at_most_eight_files_at_its_top_level():
    beside = [path.name for path in (ROOT / "fabricx").iterdir() if path.is_file() and path.name != "README.md"]
    assert len(beside) <= 8, sorted(beside)


def test_no_file_has_a_vague_name():
    assert [short(path) for path in PYTHON if path.name in VAGUE_FILE_NAMES] == []


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Return the nodes of a file that the tests below read, cached for all tests."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Import, ast.ImportFrom, ast.Attribute)
    return [node for node in ast.walk(parsed(path)) if isinstance(node, kinds)]


def definitions(kind: type[ast.AST] | tuple[type[ast.AST], ...]) -> Iterator[tuple[Path, ast.AST]]:
    for path in PYTHON:
        for node in nodes(path):
            if isinstance(node, kind):
                yield path, node


def test_no_class_has_a_vague_name():
    empty = re.compile(r"^_?Base|Base$|Manager|Helper|Connector|Mixin|Util")
    lightning_names = {"BasePredictionWriter", "BaseFinetuning"}  # names of Lightning
    named = [(short(path), node.name) for path, node in definitions(ast.ClassDef) if node.name not in lightning_names]
    assert [f"{path}: {name}" for path, name in named if empty.search(name)] == []


def test_files_are_small():
    sizes = sorted(path.read_text().count("\n") for path in PYTHON if path.name != "__init__.py")
    assert statistics.median(sizes) <= 160
    assert statistics.quantiles(sizes, n=10)[-1] <= 500


def test_there_are_no_import_cycles_including_type_imports():
    modules = {module_of(path): path for path in PYTHON}
    graph = {name: imported(path, modules) - {name} for name, path in modules.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def module_of(path):
    return "fabricx." + ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("fabricx.").removesuffix(
        ".__init__"
    )


def imported(path, modules):
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in modules else node.module for name in inner.values()}
    return names & modules.keys()


def assigned_by_hooks() -> set[str]:
    """Return the attributes of the trainer that a hook may assign, for example `should_stop`."""
    [protocol] = (n for n in nodes(ROOT / "fabricx/core/trainer.py") if getattr(n, "name", "") == "TrainerProtocol")
    fields = {statement.target.id for statement in protocol.body if isinstance(statement, ast.AnnAssign)}
    return fields | {
        decorator.value.id
        for statement in protocol.body
        for decorator in getattr(statement, "decorator_list", ())
        if isinstance(decorator, ast.Attribute) and decorator.attr == "setter"
    }


def test_only_the_trainers_package_assigns_to_the_trainer_or_the_session():
    """Hooks may assign documented attributes of the trainer; other attributes are changed by methods of their owner."""
    documented = {f"trainer.{name}" for name in assigned_by_hooks()}
    assigned = [
        f"{short(path)}:{node.lineno} {target}"
        for path in PYTHON
        if "trainer" not in path.relative_to(ROOT).parts
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del))
        for target in [re.sub(r"^self\._?", "", ast.unparse(node))]
        if re.match(r"trainer\.|session\.\w+$", target)
        if "callbacks" not in path.relative_to(ROOT).parts or target not in documented
    ]
    assert assigned == []


def lines_of_docstring(node):
    first = node.body[0]
    return first.end_lineno - first.lineno + 1 if ast.get_docstring(node) else 0


def test_functions_fit_a_screen():
    lengths = {
        f"{short(path)}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1 - lines_of_docstring(node)
        for path, node in definitions((ast.FunctionDef, ast.AsyncFunctionDef))
    }
    long = {name: length for name, length in lengths.items() if length > 60}
    assert len(long) <= len(lengths) / 50, long  # nearly all functions
    assert max(lengths.values()) <= 130, long  # the Trainer has many arguments


def test_every_module_has_a_docstring():
    silent = [short(path) for path in PYTHON if not ast.get_docstring(parsed(path))]
    assert silent == []


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(parent: ast.AST, *outer: ast.Module | ast.ClassDef) -> Iterator[tuple[tuple[ast.AST, ...], Function]]:
    """Yield the public functions of a module, each with its module and its classes."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from functions(node, *outer, parent)
        elif isinstance(node, Function) and not node.name.startswith("_"):
            yield (*outer, parent), node
        elif isinstance(node, (ast.If, ast.Try)):
            yield from functions(node, *outer)


def arguments(function: Function) -> list[str]:
    parameters = function.args
    several = [argument for argument in (parameters.vararg, parameters.kwarg) if argument is not None]
    names = [argument.arg for argument in (*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs, *several)]
    return [name for name in names if name not in {"self", "cls"} and not name.startswith("_")]


def described(outer: tuple[ast.AST, ...], function: Function) -> str:
    """Return the text that describes the parameters of a function: its docstring, and lists of its class and module."""
    around = "\n".join(ast.get_docstring(node) or "" for node in outer if isinstance(node, (ast.Module, ast.ClassDef)))
    lists = re.findall(r"^- `.+", around, re.MULTILINE)
    return "\n".join([(ast.get_docstring(function) or "").partition("Args:\n")[2], *lists])


@functools.cache
def classes() -> dict[str, list[ast.ClassDef]]:
    by_name: dict[str, list[ast.ClassDef]] = {}
    for _, node in definitions(ast.ClassDef):
        by_name.setdefault(node.name, []).append(node)
    return by_name


def inherited(owner: ast.AST, name: str) -> bool:
    """Return whether a base class has a method of this name: an override has the arguments of the contract."""
    bases, unread = set(), [owner]
    while unread:
        for base in getattr(unread.pop(), "bases", ()):
            parents = classes().get(ast.unparse(base).split("[")[0].split(".")[-1], ())
            new = [parent for parent in parents if parent not in bases and parent is not owner]
            bases.update(new)
            unread += new
    return any(isinstance(node, Function) and node.name == name for base in bases for node in base.body)


# Contracts without a class in the project: torch's, and steps, which `ModuleHooks` declares with any parameters.
CONTRACTS = {"forward", "training_step", "validation_step", "test_step"}


def test_public_functions_describe_their_arguments():
    """In `Args`, or in a list of the class or the module; the arguments of an override are those of its contract."""
    silent = []
    for path in PYTHON:
        for outer, function in functions(parsed(path)):
            decorators = {ast.unparse(decorator) for decorator in function.decorator_list}
            elsewhere = function.name in CONTRACTS or {"overload", f"{function.name}.setter"} & decorators
            if elsewhere or inherited(outer[-1], function.name):
                continue
            text = described(outer, function)
            if missing := [name for name in arguments(function) if not re.search(rf"\b{name}\b", text)]:
                silent.append(f"{short(path)}:{function.lineno} {function.name}: {', '.join(missing)}")
    assert silent == []


def constructed_with(owner: ast.ClassDef) -> list[str]:
    """Return the arguments of the class's own constructor, or its own fields as a dataclass."""
    for node in owner.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return arguments(node)
    if not any("dataclass" in ast.unparse(decorator) for decorator in owner.decorator_list):
        return []
    fields = [node for node in owner.body if isinstance(node, ast.AnnAssign)]
    init_fields = [field for field in fields if not re.search("ClassVar|init=False", ast.unparse(field))]
    return [field.target.id for field in init_fields if not field.target.id.startswith("_")]


def test_public_classes_describe_their_constructor_arguments():
    silent = []
    for path, owner in definitions(ast.ClassDef):
        constructors = [node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
        texts = [ast.get_docstring(node) or "" for node in (owner, *constructors)]
        text = "\n".join(text.partition(head)[2] for text in texts for head in ("Args:\n", "Attributes:\n"))
        missing = [name for name in constructed_with(owner) if not re.search(rf"\b{name}\b", text)]
        if missing and not owner.name.startswith("_"):
            silent.append(f"{short(path)}:{owner.lineno} {owner.name}: {', '.join(missing)}")
    assert silent == []


# -- tests mirror the tree ----------------------------------------------------------------------------------------

UNIT = ROOT / "tests" / "unit"
MODULES = [path for path in PYTHON if not path.name.startswith("__")]
ROWS = [
    tuple(re.findall(r"`([\w/]+\.py)`", cell) for cell in cells)  # modules, tests
    for cells in re.findall(r"^\| (`.+?) \| (`.+?) \|", (UNIT / "README.md").read_text(), re.MULTILINE)
]


def place_of(module: Path) -> Path:
    """Return the path of a module's unit test."""
    inside = module.relative_to(ROOT / "fabricx" if module.is_relative_to(ROOT / "fabricx") else ROOT)
    return UNIT / inside.with_name(f"test_{module.name}")


def test_each_module_has_a_unit_test_of_its_name_or_a_row_with_the_reason():
    rows = [ROOT / module for modules, _ in ROWS for module in modules]
    assert len(set(rows)) == len(rows), "a module has two rows in tests/unit/README.md"
    tested = {module for module in MODULES if place_of(module).exists()}
    missing = sorted(short(place_of(module)) for module in set(MODULES) - tested - set(rows))
    assert missing == [], "write these tests, or add rows to tests/unit/README.md"
    needless = sorted(short(module) for module in set(rows) & tested)
    assert needless == [], "these modules have a test of their name: remove their rows from tests/unit/README.md"
    assert sorted(short(module) for module in set(rows) - set(MODULES)) == [], "rows of modules that are not there"


def test_each_unit_test_has_the_path_of_its_module():
    """`test_counts.py` belongs to no module: it counts the calls of a whole step."""
    expected = {place_of(module) for module in MODULES} | {UNIT / "test_counts.py"}
    assert [short(path) for path in files(UNIT, "test_*.py") if path not in expected] == []


def test_rows_name_existing_tests():
    assert all(tests for _, tests in ROWS)
    assert [name for _, tests in ROWS for name in tests if not (ROOT / "tests" / name).is_file()] == []


# -- dependencies (further rules in pyproject.toml, for import-linter) -----------------------------------------


@pytest.mark.parametrize("path", [path for path in PYTHON if ">>> " in path.read_text()], ids=short)
def test_examples_in_docstrings_run(path):
    inside = path.relative_to(ROOT).with_suffix("").parts
    module = importlib.import_module(".".join(inside if inside[0] == "fabricx" else ("fabricx", *inside)))
    assert doctest.testmod(module).failed == 0


def test_torch_distributed_is_imported_by_few_packages_only():
    allowed = {
        "fabricx/distributed",
        "fabricx/parameter_server/wire",
        "fabricx/launch",
        "fabricx/model_parallel",
        "fabricx/cli/doctor.py",
        "strategies",
    }
    for path, node in definitions((ast.Import, ast.ImportFrom)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)]
        if any(name.startswith("torch.distributed") and "checkpoint" not in name for name in names):
            assert any(short(path).startswith(prefix) for prefix in allowed), short(path)


def test_importing_fabricx_and_training_import_no_slow_library(tmp_path):
    program = (
        "import sys, fabricx as fx\n"
        "assert not {'torch', 'hydra'} & set(sys.modules), 'import fabricx is lazy'\n"
        "from fabricx.testing import QUIET, TinyModule, tiny_loader\n"
        "fx.Trainer(max_steps=1, **QUIET).fit(TinyModule(), tiny_loader())\n"
        "import fabricx.lightning, fabricx.loggers.tensorboard; fabricx.loggers.tensorboard.TensorBoardLogger()\n"
        "slow = {'hydra', 'omegaconf', 'tensorboard', 'torchmetrics', 'torch.distributed.checkpoint'}\n"
        "slow |= {'lightning', 'pytorch_lightning'}\n"
        "slow |= {'fabricx.strategies.' + name for name in ('ddp', 'fsdp', 'mesh', 'parameter_server')}\n"
        "print(*slow & set(sys.modules))"
    )
    assert python(program, cwd=tmp_path, path=ROOT).split() == []


def test_the_table_of_packages_equals_the_layers_of_import_linter():
    contract = next(c for c in PYPROJECT["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    layers = [sorted(layer.split(" | ")) for layer in contract["layers"] if layer != "__main__"]
    table = (ROOT / "docs" / "design.md").read_text().partition("| layer | content |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)
    assert [sorted(re.findall(r"`(\w+)`", row)) for row in rows] == layers


# -- README files -------------------------------------------------------------------------------------------------

MARKDOWN = [
    *ROOT.glob("*.md"),
    *(path for top in ("fabricx", *LINKED, "tests", "examples", "docs") for path in files(ROOT / top, "*.md")),
]


@pytest.mark.parametrize("path", MARKDOWN, ids=short)
def test_files_named_in_markdown_exist(path):
    text = path.read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text)]
    named = re.findall(r"`((?:fabricx|strategies|callbacks|conf|tests|examples)/[\w./]*\w\.(?:py|md|yaml))`", text)
    missing = [link for link in links if link and not (path.parent / link).exists()]
    missing += [name for name in named if not (ROOT / name).exists() and not (path.parent / name).exists()]
    assert missing == []


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in (ROOT / "fabricx").rglob("[a-z]*.py")}), ids=lambda folder: folder.name
)
def test_the_readme_of_a_folder_names_each_of_its_modules(folder: Path) -> None:
    readme = next(p / "README.md" for p in (folder, *folder.parents) if (p / "README.md").is_file()).read_text()
    absent = [path.stem for path in folder.glob("[a-z]*.py") if path.stem not in readme]
    assert not absent, f"name these modules in the README of {folder.name}: {absent}"


def test_the_readme_has_the_measured_figures_of_the_guide():
    [rows] = re.findall(
        r"^\| \| GPT.*?\n\n", (ROOT / "docs/guides/performance.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert rows in (ROOT / "README.md").read_text()


def test_targets_named_in_the_readme_exist_in_the_makefile():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^ +|`)make ([a-z]+)\b", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= named <= targets
