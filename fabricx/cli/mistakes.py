"""Messages about mistakes in a configuration: key, value, valid choices, the nearest name, and the next action."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from fabricx import conf
from fabricx.cli.overrides import parsed
from fabricx.errors import did_you_mean, nearest_key

_NAMED_ENTRIES = ("callbacks", "logger")  # an entry of these groups is added under any name
_GROUPS = ("experiment", "debug", "module", "data", "strategy", "launcher", "callbacks", "logger", "trainer")
_CLASSES = {"module": "Net", "data": "Data", "strategy": "Strategy", "launcher": "Launcher"}  # groups with a `_target_`


@dataclass(frozen=True)
class Composition:
    """How a configuration is composed.

    Attributes:
        name: name of the main configuration.
        folder: folder of the main configuration; None for fabricx's configuration.
    """

    name: str
    folder: str | None

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """Compose the configuration.

        Args:
            overrides: overrides as `KEY=VALUE`.
        """
        with self._initialized():
            return hydra.compose(self.name, list(overrides))

    def groups(self) -> dict[str, list[str]]:
        """Return the choices of each group, without Hydra's groups."""
        with self._initialized():
            loader = GlobalHydra.instance().config_loader()
            names = [name for name in loader.list_groups("") if name != "hydra"]
            options = {name: loader.get_group_options(name) for name in names}
        return {name: choices for name, choices in options.items() if choices}

    def _initialized(self) -> Any:
        GlobalHydra.instance().clear()
        if self.folder:
            return hydra.initialize_config_dir(self.folder, version_base="1.3")
        return hydra.initialize_config_module("fabricx.conf", version_base="1.3")

    def keys(self, overrides: Sequence[str] = ()) -> list[str]:
        """Return all keys of the composed configuration, dotted; none if it can't be composed.

        Args:
            overrides: overrides as `KEY=VALUE`; choices of groups determine the keys.
        """
        try:
            return list(_keys(self.compose(overrides)))
        except Exception:  # a second error would hide the error to be explained
            return []


def _keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in map(str, node):
        yield f"{prefix}{key}"
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            yield from _keys(child, f"{prefix}{key}.")


def config_files(folder: str | None) -> list[str]:
    """Return the names of the main configurations in a folder and in fabricx.

    Args:
        folder: folder of the project; None without.
    """
    folders = [Path(folder)] if folder else []
    return sorted({file.stem for path in [*folders, Path(conf.__file__).parent] for file in path.glob("*.yaml")})


def unread_keys(cfg: DictConfig, arguments: Sequence[str]) -> list[str]:
    """Return the top-level keys that a command line adds, and no value of the configuration refers to.

    Args:
        cfg: of the command, whose own keys exist without the command line.
        arguments: overrides of the command line.
    """
    added = {argument.lstrip("+").partition("=")[0] for argument in arguments if argument.startswith("+")}
    text = OmegaConf.to_yaml(cfg, resolve=False)
    plain_keys = [key for key in sorted(added) if re.fullmatch(r"\w+", key) and key not in _GROUPS]
    return [key for key in plain_keys if not re.search(rf"\$\{{\.*{key}\b", text)]


def explain(error: Exception, composition: Composition, arguments: Sequence[str]) -> str:
    """Return an error message with the nearest valid key or choice.

    Args:
        error: error of Hydra or of the run.
        composition: composition of the configuration.
        arguments: overrides of the command line.
    """
    text = str(error).strip()
    if isinstance(error, MissingConfigException):
        return _missing_choice(error, text, composition)
    if isinstance(error, InterpolationResolutionError):
        return _interpolation(error, arguments)
    if match := re.match(r"(?:In '([^']*)': )?Could not override '([^']+)'", text):
        key = match.group(2).partition("@")[0]
        if match.group(1):  # `override /group` in a file
            groups = composition.groups()
            return f"{match.group(1)}: there is no group {key!r} to override.{did_you_mean(key, groups)}"
        return _unknown_key(key, composition, arguments)
    if match := re.match(r"Could not append to config. An item is already at '([^']+)'", text):
        return f"+{match.group(1)}: the key exists already; set it without '+': {match.group(1)}=..."
    if match := re.match(r"Could not delete from config. '([^']+)' does not exist", text):
        near = did_you_mean(match.group(1), composition.keys(_group_choices(arguments)))
        return f"~{match.group(1)}: there is no such key to remove.{near}"
    if match := re.match(r"Error merging override (.*)", text):
        return _merging(match.group(1), error.__cause__, composition, arguments)
    if match := re.match(r"In '([^']*)': \w+ raised while composing config:\n(.*)", text):
        return f"{match.group(1)}.yaml: {_in_file(error, match.group(2), composition)}"
    if text.startswith("Config group override must be a string or a list"):
        return _no_name(composition.groups(), arguments)
    if match := re.match(r"Ambiguous value for argument '(([^=]+)=(.+))'$", text.splitlines()[0]):
        return (
            f"{match.group(1)}: several values need --multirun, which starts a run for each; "
            f"for a list, write {match.group(2)}=[{match.group(3)}]"
        )
    if isinstance(error, OmegaConfBaseException):
        return _with_key(error)
    lines = [line for line in text.splitlines() if "hydra.cc/docs" not in line]
    return "\n".join(line for line in lines if line.strip()) or type(error).__name__


def _missing_choice(error: MissingConfigException, text: str, composition: Composition) -> str:
    group, _, choice = str(error.missing_cfg_file).rpartition("/")
    if not group:
        known = config_files(composition.folder)
        return (
            f"--config-name {choice}: there is no such file.{did_you_mean(choice, known)}\n  known: {', '.join(known)}"
        )
    if not error.options:
        return text.splitlines()[0]
    parent = re.match(r"In '([^']*)'", text)
    where = parent.group(1) if parent and parent.group(1) not in ("config", "fabricx", "hydra/config") else ""
    kind = {"callbacks": "choice of callbacks"}.get(group, group.replace("/", " "))
    message = f"{group}={choice}{f' (in {where})' if where else ''}: there is no such {kind}."
    message += f"{did_you_mean(choice, error.options)}\n  known: {', '.join(error.options)}"
    if group in _CLASSES:
        path = choice if "." in choice else f"my_project.{_CLASSES[group]}"
        return f"{message}\n  your own class: {group}._target_={path}"
    if group == "hydra/launcher":
        return f"{message}\n  others are packages, such as hydra-joblib-launcher"
    return f"{message}\n  your own: a file {group}/{choice}.yaml in the folder of --config-dir"


def _group_choices(arguments: Sequence[str]) -> list[str]:
    """Return the overrides that may be choices of groups, on which the keys depend."""
    return [text for text in arguments if re.fullmatch(r"\+?[\w/]+=[\w/,\[\]]+", text)]


def _no_name(groups: Mapping[str, list[str]], arguments: Sequence[str]) -> str:
    """Return a message on a choice of a group that Hydra reads as a number, a truth value or null."""
    for override in parsed(arguments):
        group, value = override.key_or_group, override.value()
        if group not in groups or isinstance(value, (str, list)):
            continue
        if value is None:
            return f"{group}=null: a group needs a choice: {', '.join(groups[group])}; to leave it out, write ~{group}"
        written, kind = str(override.input_line).partition("=")[2], type(value).__name__
        return f"{group}={written} is read as a {kind}: write {group}='\"{written}\"', or rename the file"
    return "a group needs the name of a choice"


def _unknown_key(key: str, composition: Composition, arguments: Sequence[str]) -> str:
    valid = composition.keys(_group_choices(arguments)) or composition.keys()
    group, _, option = key.partition(".")
    message = f"there is no key {key!r} to set."
    if option and (owners := _choices_with(composition, key)):
        chosen = next((f"{o.key_or_group}={o.value()}" for o in parsed(arguments) if o.key_or_group == group), "")
        return f"{message[:-1]}{chosen and f' with {chosen}'}\n  it belongs to " + ", ".join(
            f"{group}={owner}" for owner in owners
        )
    if group in _NAMED_ENTRIES:
        near = did_you_mean(key, [name for name in valid if name.startswith(f"{group}.")])
        return f"{message}{near}\n  to add it, write +{key}=..."
    if similar := nearest_key(key, valid):
        return f"{message} Did you mean {similar!r}?"
    under = [name for name in valid if option and name.startswith(f"{key.rpartition('.')[0]}.")]
    return message + (f"\n  known: {', '.join(under)}\n  to add a new key, write +{key}=..." if under else "")


def _choices_with(composition: Composition, key: str) -> list[str]:
    """Return the choices of a group whose configuration has a key."""
    group = key.partition(".")[0]
    return [
        choice
        for choice in composition.groups().get(group, [])
        if choice != "custom" and key in composition.keys([f"{group}={choice}"])
    ]


def _interpolation(error: InterpolationResolutionError, arguments: Sequence[str]) -> str:
    text = str(error).splitlines()[0]
    name = next(iter(re.findall(r"'([^']+)' not found", text)), "")
    keys = (argument.partition("=")[0] for argument in arguments if name and name in argument and "${" in argument)
    key = error.full_key or next(keys, "a value")
    if re.search(r"Environment variable '[^']+' not found", text):
        return f"{key}: the environment variable {name} is not set; export it, or give a default: ${{oc.env:{name},0}}"
    if re.search(r"Interpolation key '[^']+' not found", text):
        return f"{key}=${{{name}}}: there is no key {name!r}; write a dotted key, such as ${{module.lr}}"
    return f"{key}: {text}"


def _merging(override: str, cause: Any, composition: Composition, arguments: Sequence[str]) -> str:
    key = override.lstrip("+~").partition("=")[0]
    if override.startswith("~"):
        return f"{override}: this key can't be removed; leave it out, or set another value: {key}=..."
    reason = str(cause).splitlines()[0] if cause is not None else ""
    if re.match(r"Key '[^']*' (not in|is not in)", reason):
        return _unknown_key(key, composition, arguments)
    return f"{override.lstrip('+')}: {reason or 'the value is not valid here'}"


def _in_file(error: Exception, first: str, composition: Composition) -> str:
    """Return the message for an invalid key or value in a configuration file."""
    match = re.search(r"full_key: (\S+)", str(error))
    key = match.group(1) if match else ""
    if not re.match(r"Key '[^']*' not in", first):
        return f"{key}: {first}" if key else first
    near = nearest_key(key, composition.keys())
    return f"there is no key {key!r} to set.{f' Did you mean {near!r}?' if near else ''}"


def _with_key(error: OmegaConfBaseException) -> str:
    """Return the first line of an error of OmegaConf, with the key."""
    text = str(error).splitlines()[0]
    key = getattr(error, "full_key", None)
    return f"{key}: {text}" if key and str(key) not in text else text
