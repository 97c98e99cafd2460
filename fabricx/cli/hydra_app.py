"""Run a function under Hydra: `@fx.main` for scripts, and the base of the `fabricx` command."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import os
import re
import secrets
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fabricx import config
from fabricx.errors import FabricxError, did_you_mean
from fabricx.redaction import masked_text, records_masked
from fabricx.trainer import provenance

CONFIG_PACKAGE = "pkg://fabricx.conf"
_DISPLAY_FLAGS = ("--cfg", "-c", "--info", "-i", "--help", "-h")  # flags with which Hydra prints a configuration


def main(
    config_path: str | None = "conf", config_name: str = "config"
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the main function of a script that is configured on the command line.

    The function receives the composed configuration. To compose with fabricx's groups, begin the `defaults` of the
    script's configuration with `fabricx`.

    Args:
        config_path: folder of the configuration, relative to the script; None for fabricx's configuration.
        config_name: main file of the configuration, without `.yaml`.

    Returns:
        a decorator; the decorated function has no parameters.

    Example::

        @fx.main(config_path="conf", config_name="train")
        def train(cfg):
            trainer, module, data = build(cfg)      # from fabricx.config import build
            trainer.fit(module, datamodule=data)
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        folder = None
        if config_path is not None:
            folder = str((Path(inspect.getfile(function)).parent / config_path).resolve())

        @functools.wraps(function)
        def run() -> Any:
            return run_app(function, sys.argv[1:], folder, config_name)

        return run

    return decorate


def run_app(function: Callable[..., Any], arguments: list[str], folder: str | None, name: str) -> Any:
    """Compose the configuration and run a function with it; print user errors as a message without a traceback.

    Args:
        function: called with the configuration.
        arguments: command line, without the program.
        folder: folder of the main configuration; None for fabricx's configuration.
        name: name of the main configuration.

    Returns:
        result of the function.

    Raises:
        SystemExit: with status 1 after a user error.
    """
    config.register()
    _resolvers()
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # not on the import path of console scripts
    arguments = _take_config_dir(arguments)
    before = sys.argv
    sys.argv = [before[0], *_flags_first(_choose_open_groups(arguments))]
    full = os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # makes Hydra raise errors, which are explained below
    decorated = hydra.main(version_base="1.3", config_path=folder or CONFIG_PACKAGE, config_name=name)(
        _masking(function)
    )
    shows = any(argument.partition("=")[0] in _DISPLAY_FLAGS for argument in arguments)
    try:
        with records_masked(), contextlib.redirect_stderr(_Masking(sys.stderr)):
            return _print_masked(decorated) if shows else decorated()
    except (HydraException, OmegaConfBaseException, FabricxError, ValueError, LookupError, TypeError) as error:
        if full != "1" or os.environ.get("FABRICX_TRACEBACK") or not _is_user_error(error):
            raise
        print(f"error: {masked_text(explain(error, name, folder, arguments))}", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        sys.argv = before


def _masking(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mask secrets in the configuration files that Hydra writes, before the run begins."""

    @functools.wraps(function)
    def masking(cfg: DictConfig) -> Any:
        folder = Path(HydraConfig.get().runtime.output_dir)
        for file in (*(folder / ".hydra").glob("*.yaml"), folder.parent / "multirun.yaml"):
            if file.is_file():
                provenance.mask_file(file)
        return function(cfg)

    return masking


class _Masking:
    """Wrapper of the error stream that masks Hydra's message about a failed job, which contains its overrides."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> Any:
        """Write a text; Hydra's messages are masked.

        Args:
            text: the text.
        """
        return self._stream.write(masked_text(text) if text.startswith("Error executing job") else text)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _print_masked(show: Callable[[], Any]) -> Any:
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown):
            return show()
    finally:
        print(masked_text(shown.getvalue()), end="")


def _is_user_error(error: Exception) -> bool:
    """Return whether to print only the message; errors raised in the code of a user need a traceback."""
    if isinstance(error, (HydraException, OmegaConfBaseException, FabricxError)):
        return True
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    raised_in = traceback.tb_frame.f_globals.get("__name__", "") if traceback else ""
    return str(raised_in).startswith(("fabricx.", "hydra.", "omegaconf.")) and not isinstance(error, TypeError)


class ProjectPath(SearchPathPlugin):
    """Search path of configuration groups: the project's folder first, fabricx's folder last.

    Attributes:
        folder: the project's folder, from `--config-dir`; None without.
    """

    folder: ClassVar[str | None] = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Prepend the project's folder and append fabricx's folder.

        Args:
            search_path: Hydra's search path, which is changed.
        """
        if self.folder is not None:
            search_path.prepend("project", f"file://{self.folder}", "main")
        search_path.append("fabricx", CONFIG_PACKAGE)


def _take_config_dir(arguments: list[str]) -> list[str]:
    """Remove `--config-dir` from the arguments, and prepend its folder to the search path.

    Hydra's handling appends the folder, so that its files could not override fabricx's files of the same name.
    """
    kept: list[str] = []
    rest = iter(arguments)
    ProjectPath.folder = None
    for argument in rest:
        flag, equals, value = argument.partition("=")
        if flag in ("--config-dir", "-cd"):
            folder = Path(value if equals else next(rest, ""))
            if not folder.is_dir():
                print(f"error: --config-dir {folder}: the folder does not exist", file=sys.stderr)
                raise SystemExit(1)
            ProjectPath.folder = str(folder.resolve())
        else:
            kept.append(argument)
    if ProjectPath not in Plugins.instance().discover(SearchPathPlugin):
        Plugins.instance().register(ProjectPath)
    return kept


def _flags_first(arguments: list[str]) -> list[str]:
    """Move flags before the overrides: Hydra's parser requires consecutive overrides."""
    overrides = [arg for arg in arguments if not arg.startswith("-") and ("=" in arg or arg.startswith("~"))]
    return [*(arg for arg in arguments if arg not in overrides), *overrides]


def _choose_open_groups(arguments: list[str]) -> list[str]:
    """Choose the open variant of each group with a `_target_` on the command line, so that any key may be set."""
    opened = list(arguments)
    for group in config.OPEN_GROUPS:
        chosen = any(argument.startswith((f"{group}=", f"+{group}=")) for argument in arguments)
        if not chosen and any(argument.lstrip("+").startswith(f"{group}._target_=") for argument in arguments):
            opened.insert(0, f"{group}=custom")
    return opened


@functools.cache
def _resolvers() -> None:
    OmegaConf.register_new_resolver("run_stamp", _stamp, use_cache=True, replace=True)


def _stamp() -> str:
    """Return a name for the run's folder; equal for the ranks that the same torchrun process started."""
    if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
        launcher = os.getppid()
        began = (
            datetime.fromtimestamp(os.stat(f"/proc/{launcher}").st_ctime) if Path("/proc").is_dir() else datetime.min
        )
        return f"{began:%Y-%m-%d_%H-%M-%S}-{launcher:06x}"
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S}-{secrets.token_hex(3)}"


def explain(error: Exception, name: str, folder: str | None, arguments: Sequence[str]) -> str:
    """Return an error message with the nearest valid key or choice.

    Args:
        error: error of Hydra or of the run.
        name: name of the main configuration.
        folder: folder of the main configuration; None for fabricx's configuration.
        arguments: command line, without the program.
    """
    text = str(error).strip()
    if isinstance(error, MissingConfigException) and error.options:
        choice = str(error.missing_cfg_file).rpartition("/")[2]
        return f"{text.splitlines()[0]}.{did_you_mean(choice, error.options)}\n  known: {', '.join(error.options)}"
    match = re.search(r"Could not override '([^']+)'", text)
    if match is None:
        return text
    key = match.group(1).partition("@")[0]
    choices = [arg for arg in arguments if re.fullmatch(r"[\w/]+=[\w/]+", arg)]  # choices of groups determine the keys
    valid = _valid_keys(name, folder, choices) or _valid_keys(name, folder, [])
    group = key.partition(".")[0]
    if group in ("callbacks", "logger"):  # an entry of these groups is added under any name
        valid = [valid_key for valid_key in valid if valid_key.startswith(f"{group}.")]
        near = did_you_mean(key, valid)
        return f"there is no key {key!r} to set.{near}\n  to add it, write +{key}=..."
    near = did_you_mean(key, [valid_key for valid_key in valid if not key.startswith(f"{valid_key}.")])
    if not near and "." in key:
        group = key.rpartition(".")[0]
        under = [valid_key for valid_key in valid if valid_key.startswith(f"{group}.")]
        near = f"\n  known: {', '.join(under)}\n  to add a new key, write +{key}=..." if under else ""
    return f"there is no key {key!r} to set.{near}"


def _valid_keys(name: str, folder: str | None, choices: list[str]) -> list[str]:
    GlobalHydra.instance().clear()
    try:
        if folder:
            with hydra.initialize_config_dir(folder, version_base="1.3"):
                cfg = hydra.compose(name, choices)
        else:
            with hydra.initialize_config_module("fabricx.conf", version_base="1.3"):
                cfg = hydra.compose(name, choices)
    except Exception:  # a second error would hide the error to be explained
        return []
    keys: list[str] = []

    def walk(node: DictConfig, prefix: str) -> None:
        for key in map(str, node):
            keys.append(f"{prefix}{key}")
            child = node._get_node(key)
            if isinstance(child, DictConfig) and not child._is_none():
                walk(child, f"{prefix}{key}.")

    walk(cfg, "")
    return keys
