"""The help of a command with settings: groups with their choices, keys with values and explanations."""

from __future__ import annotations

import ast
import importlib.util
import re
import textwrap
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from fabricx import plugins
from fabricx.cli.mistakes import Composition
from fabricx.core.options.trainer_options import TrainerOptions

_WIDTH: Final = 79
_REFERENCE: Final = re.compile(r"see `\w+`")
_PLUGINS: Final = {"callbacks": "callbacks", "logger": "loggers"}
_TOP: Final = {
    "seed": "seed of all random number generators; null: a different seed in each run",
    "ckpt_path": "checkpoint to continue from or to evaluate: a path, last, or none (the initial weights)",
    "monitor": "metric that ranks checkpoints and that sweepers optimise",
    "mode": "min or max of the monitored metric",
    "test": "test the best weights after training",
}


def text(usage: str, composition: Composition, config: DictConfig) -> str:
    """Return the help.

    Args:
        usage: how the command is called, with examples.
        composition: composition of the configuration.
        config: the composed configuration.
    """
    lines = [usage.rstrip(), "", "Groups: GROUP=CHOICE", ""]
    for group, choices in composition.groups().items():
        choice = f"{group}: {', '.join(choices)}"
        lines.append(textwrap.fill(choice, _WIDTH, initial_indent="  ", subsequent_indent="    "))
    lines += ["", "Keys: KEY=VALUE, with their present values (None is written null)", ""]
    for key, value in _entries(config):
        lines.append(f"  {key}={_shown(value)}")
        if explanation := _explanation(key, config):
            lines.append(textwrap.fill(explanation, _WIDTH, initial_indent="      ", subsequent_indent="      "))
    return "\n".join(lines)


def _entries(node: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield keys and values as they are written: interpolations and missing values are not resolved."""
    return _of_plain(OmegaConf.to_container(node, resolve=False), prefix)


def _of_plain(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, child in node.items():
        if isinstance(child, dict) and child:
            yield from _of_plain(child, f"{prefix}{key}.")
        elif not str(key).startswith("_") or key == "_target_":
            yield f"{prefix}{key}", child


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _explanation(key: str, config: DictConfig) -> str:
    group, _, option = key.partition(".")
    if not option:
        return _TOP.get(key, "")
    if group == "trainer":
        return explained_arguments(TrainerOptions.__init__.__doc__ or "").get(option, "")
    if group in _PLUGINS and "." in option:
        name, _, option = option.partition(".")
        return _explained(config[group][name], _PLUGINS[group], name, option)
    if group in config and isinstance(config[group], DictConfig):
        node = config[group]
        kind = "launchers" if group == "launcher" else "strategies"
        return _explained(node, kind, str(node.get("name", "")), option)
    return ""


def _explained(node: Mapping[str, Any], kind: str, name: str, option: str) -> str:
    path = str(node.get("_target_") or plugins.path_of(kind, name).replace(":", "."))
    text = explained_argument(path, option)
    inherited = explained_argument(path, option, bases=True) if _REFERENCE.search(text) else ""
    return _REFERENCE.sub(lambda _: inherited, text) if inherited else text


def explained_argument(path: str, name: str, *, bases: bool = False) -> str:
    """Return the explanation of an argument in the docstring of a class or function; "" without an explanation.

    The source is read, because importing it may take seconds.

    Args:
        path: module and name, such as "torch.optim.Adam".
        name: name of the argument.
        bases: look in the base classes instead, without the final stop.
    """
    module, _, attribute = path.rpartition(".")
    tree = _source(module)
    defined = next((item for item in tree.body if getattr(item, "name", "") == attribute), None)
    if not isinstance(defined, (ast.ClassDef, ast.FunctionDef)):
        return ""
    if not bases:
        inside = [item for item in defined.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
        return explained_arguments("\n\n".join(ast.get_docstring(item) or "" for item in [defined, *inside])).get(
            name, ""
        )
    paths = {getattr(item, "name", ""): f"{module}.{getattr(item, 'name', '')}" for item in tree.body}
    for item in tree.body:
        if isinstance(item, ast.ImportFrom) and item.module is not None and not item.level:
            paths |= {alias.asname or alias.name: f"{item.module}.{alias.name}" for alias in item.names}
    for base in (paths.get(ast.unparse(base), "") for base in getattr(defined, "bases", ())):
        if text := explained_argument(base, name) or explained_argument(base, name, bases=True):
            return text.rstrip(".")
    return ""


def _source(module: str) -> ast.Module:
    """Return the source of a module, empty if it is missing; the packages that contain it are not imported either."""
    name, *parts = module.split(".")
    try:
        spec = importlib.util.find_spec(name) if name else None
        for part in parts:
            name, folders = f"{name}.{part}", None if spec is None else spec.submodule_search_locations
            spec = PathFinder.find_spec(name, list(folders)) if folders else None
        return ast.parse(Path(spec.origin).read_text()) if spec is not None and spec.origin else ast.Module([], [])
    except (ImportError, OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def explained_arguments(docstring: str) -> dict[str, str]:
    """Return the explanation of each argument in the section `Args` of a docstring.

    Args:
        docstring: docstring in Google's style.

    >>> explained_arguments("Args:\\n    lr: of the\\n        optimizer.\\n    low, high: limits.")
    {'lr': 'of the optimizer.', 'low': 'limits.', 'high': 'limits.'}
    """
    explained: dict[str, str] = {}
    for section in re.findall(r"^ *Args:\n((?:(?: +.*)?\n?)*)", docstring, re.MULTILINE):
        lines = [line for line in section.splitlines() if line.strip()]
        indent = len(lines[0]) - len(lines[0].lstrip()) if lines else 0
        names: list[str] = []
        for line in lines:
            if len(line) - len(line.lstrip()) < indent:
                break
            entry = re.match(r"\*{0,2}(\w+(?:, \w+)*): *(.*)", line[indent:])
            if entry and not line[indent].isspace():
                names = entry[1].split(", ")
                explained |= dict.fromkeys(names, entry[2])
            else:
                explained |= {name: f"{explained[name]} {line.strip()}".strip() for name in names}
    return explained
