"""The arguments of the command line before Hydra reads them: mistakes are refused, texts are quoted."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from fabricx.errors import nearest, nearest_key

_FLAGS: Final = (  # of Hydra
    "--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--resolve", "--package", "-p", "--run", "-r",
    "--multirun", "-m", "--shell-completion", "-sc", "--config-path", "-cp", "--config-name", "-cn", "--config-dir",
    "-cd", "--experimental-rerun", "--info", "-i",
)  # fmt: skip
_TAKE_VALUE: Final = {"--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir",
                      "-cd", "--experimental-rerun"}  # fmt: skip
_INFO: Final = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_NOTHING: Final = ("experiment=null", "debug=null")  # the default; Hydra refuses null as a choice
_CLOSING: Final = {"(": ")", "[": "]", "{": "}"}


def arranged(arguments: Sequence[str], keys: Callable[[], list[str]]) -> list[str]:
    """Return the arguments with flags before overrides, as Hydra's parser requires, and with texts quoted.

    Args:
        arguments: command line, without the program.
        keys: returns the known keys, for suggestions.

    Raises:
        ValueError: an argument is neither a flag nor a setting, has no value, or a group is chosen twice.
    """
    flags: list[str] = []
    settings: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("-"):
            settings.append(_setting(argument, rest, keys))
            continue
        flag = argument.partition("=")[0]
        if flag not in _FLAGS:
            raise ValueError(_unknown_flag(argument, rest, keys()))
        flags.append(argument)
        if argument in _TAKE_VALUE:
            if not rest:
                raise ValueError(f"{flag} needs a value after it; fabricx fit --help has examples")
            flags.append(rest.pop(0))
        elif argument in ("--info", "-i"):
            flags.append(rest.pop(0) if rest and rest[0] in _INFO else "all")
    _refuse_repeated_groups(settings)
    settings = [setting for setting in settings if setting not in _NOTHING]
    return [*flags, *settings]


def _setting(argument: str, rest: list[str], keys: Callable[[], list[str]]) -> str:
    if argument.startswith("~"):
        return argument
    key, equals, value = argument.partition("=")
    if not equals:
        raise ValueError(_without_value(argument, rest, keys()))
    if not value.strip():
        raise ValueError(
            f"{argument} has no value: write {key}=VALUE. For no value, write {key}=null; for an empty text, "
            f"\"{key}=''\""
        )
    return _quoted(argument, key, value)


def _without_value(argument: str, rest: list[str], keys: list[str]) -> str:
    if rest[:1] == ["="] or (rest and rest[0].startswith("=")):
        value = "".join(rest[:2]).lstrip("=") if rest[0] == "=" else rest[0].lstrip("=")
        return f"{argument} {' '.join(rest[:2])}: write settings without spaces: {argument}={value}"
    if "/" in argument or argument.endswith((".ckpt", ".safetensors", ".yaml", ".yml")):
        option = "--config-name" if argument.endswith((".yaml", ".yml")) else "ckpt_path="
        return f"{argument} is not a setting: settings are written as KEY=VALUE. For this path, did you mean {option}?"
    key = _known(argument, keys)
    if rest and not rest[0].startswith("-") and "=" not in rest[0]:
        return f"{argument} {rest[0]}: write {key}={rest[0]}"
    return f"{argument} has no value: write {key}=VALUE"


def _unknown_flag(argument: str, rest: list[str], keys: list[str]) -> str:
    name, equals, value = argument.lstrip("-").partition("=")
    if not equals and rest and not rest[0].startswith("-") and "=" not in rest[0]:
        value = rest[0]
    key = _known(name.replace("-", "_"), keys)
    near = nearest(argument.partition("=")[0], _FLAGS)
    if key != name.replace("-", "_") or key in keys or near is None:
        return f"{argument}: settings are written without dashes: {key}={value or 'VALUE'}"
    return f"there is no flag {argument.partition('=')[0]!r}. Did you mean {near!r}?"


def _known(key: str, keys: list[str]) -> str:
    """Return the most similar valid key; the key unchanged if none is similar."""
    return key if key in keys else nearest_key(key, keys) or key


def _quoted(argument: str, key: str, value: str) -> str:
    """Quote a text that Hydra's grammar can't read, such as `epoch=0-step=3.ckpt`, unless brackets are unbalanced."""
    parser = OverridesParser.create()
    try:
        parser.parse_override(argument)
    except HydraException:
        parts = value.split(",") if _is_text(value) else []
        if not parts:
            raise ValueError(
                f"{argument} can't be read: a bracket or a quote has no partner. In a shell, write settings with "
                f"brackets, quotes or spaces within quotes: '{key}=[1,2]', '{key}=\"a text\"'"
            ) from None
        if not all(part.strip() for part in parts):
            raise ValueError(
                f"{argument} has an empty value between or after commas: write {key}={','.join(filter(None, parts))}; "
                f"a text with commas is written within quotes: '{key}=\"a,b\"'"
            ) from None
        return f"{key}={','.join(_as_text(part, parser, key) for part in parts)}"
    return argument


def _as_text(part: str, parser: OverridesParser, key: str) -> str:
    try:
        parser.parse_override(f"{key}={part}")
    except HydraException:
        escaped = re.sub(r"(\\*)'", lambda match: match[1] * 2 + r"\'", part)
        return "'" + escaped + ("\\" if part.endswith("\\") else "") + "'"
    return part


def _is_text(value: str) -> bool:
    """Return whether a value that can't be read is a text, and not an incomplete list, dict or quoted text.

    >>> [_is_text(value) for value in ("a=b", "{epoch}-{loss:.2f}", "it's", "[1,2", "{a:1", "'a")]
    [True, True, True, False, False, False]
    """
    if value[0] in "'\"":
        return False
    open_brackets: list[str] = []
    for character in value:
        if character in _CLOSING:
            open_brackets.append(_CLOSING[character])
        elif character in _CLOSING.values() and (not open_brackets or open_brackets.pop() != character):
            return False
    return not open_brackets and not (value[0] == "[" and value[-1] == "]")


def _refuse_repeated_groups(settings: Sequence[str]) -> None:
    """Refuse two choices of a group: the second would replace the first silently."""
    chosen: dict[str, str] = {}
    for setting in settings:
        key, _, value = setting.lstrip("+").partition("=")
        if "." in key or setting.startswith("~"):
            continue
        if chosen.setdefault(key, value) != value:
            raise ValueError(f"{key} is set twice, to {chosen[key]} and to {value}: keep one of them")


def parsed(overrides: Iterable[str]) -> list[Override]:
    """Parse overrides, without the invalid overrides.

    Args:
        overrides: overrides as `KEY=VALUE`.
    """
    valid: list[Override] = []
    for text in overrides:
        with contextlib.suppress(HydraException):
            valid.append(OverridesParser.create().parse_override(text))
    return valid
