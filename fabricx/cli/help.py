"""The help of a command with settings: groups with their choices, keys with values and explanations."""

from __future__ import annotations

import ast
import importlib.util
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from fabricx import plugins
from fabricx.cli.mistakes import Composition
from fabricx.core.options import TrainerOptions

_WIDTH: Final = 79
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
        composition: of the configuration.
        config: the composed configuration.
    """
    lines = [usage.rstrip(), "", "Groups: GROUP=CHOICE", ""]
    for group, choices in composition.groups().items():
        choice = f"{group}: {', '.join(choices)}"
        lines.append(textwrap.fill(choice, _WIDTH, initial_indent="  ", subsequent_indent="    "))
    lines += ["", "Keys: KEY=VALUE, with their present values", ""]
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
        return explained_arguments(_docstring(config[group][name], _PLUGINS[group], name)).get(option, "")
    if group in config and isinstance(config[group], DictConfig):
        node = config[group]
        return explained_arguments(_docstring(node, "strategies", str(node.get("name", "")))).get(option, "")
    return ""


def _docstring(node: Mapping[str, Any], kind: str, name: str) -> str:
    """Return the docstring of a class, read from its source: importing it may take seconds."""
    path = str(node.get("_target_") or plugins.path_of(kind, name).replace(":", "."))
    module, _, attribute = path.rpartition(".")
    try:
        spec = importlib.util.find_spec(module) if module else None
        tree = ast.parse(Path(spec.origin).read_text()) if spec is not None and spec.origin else ast.Module([], [])
    except (ImportError, OSError, SyntaxError, ValueError):
        return ""
    found = next((item for item in tree.body if getattr(item, "name", "") == attribute), None)
    if not isinstance(found, (ast.ClassDef, ast.FunctionDef)):
        return ""
    inside = [item for item in found.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
    return "\n\n".join(ast.get_docstring(item) or "" for item in [found, *inside])


def explained_arguments(docstring: str) -> dict[str, str]:
    """Return the explanation of each argument in the section `Args` of a docstring.

    Args:
        docstring: in Google's style.

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
