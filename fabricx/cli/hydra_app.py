"""Hydra around a function: `@fx.main` for scripts, and the base of the `fabricx` command."""

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

HERE = "pkg://fabricx.conf"
_SHOWING = ("--cfg", "-c", "--info", "-i", "--help", "-h")  # flags with which Hydra prints a configuration


def main(
    config_path: str | None = "conf", config_name: str = "config"
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function the main program of a script, configured on the command line.

    The function is given the composed configuration. fabricx's own groups can be composed from: begin the script's
    `defaults` with `fabricx`.

    Args:
        config_path: the folder of the configuration, relative to the script.
        config_name: its main file, without `.yaml`.

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
    """Compose, run, and end with an exit code and a message that helps if something was wrong.

    Args:
        function: is given the configuration.
        arguments: of the command line, without the program.
        folder: where the main configuration is; fabricx's own if None.
        name: of the main configuration.
    """
    config.register()
    _resolvers()
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a console script hasn't the current folder on its path
    arguments = _own_groups(arguments)
    before = sys.argv
    sys.argv = [before[0], *_flags_first(_opened(arguments))]
    full = os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors come to us, who can say more than Hydra
    decorated = hydra.main(version_base="1.3", config_path=folder or HERE, config_name=name)(_masking(function))
    shows = any(argument.partition("=")[0] in _SHOWING for argument in arguments)
    try:
        with records_masked(), contextlib.redirect_stderr(_Masking(sys.stderr)):
            return _shown_masked(decorated) if shows else decorated()
    except (HydraException, OmegaConfBaseException, FabricxError, ValueError, LookupError, TypeError) as error:
        if full != "1" or os.environ.get("FABRICX_TRACEBACK") or not _is_users(error):
            raise
        print(f"error: {masked_text(explain(error, name, folder, arguments))}", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        sys.argv = before


def _masking(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mask what Hydra has written of a run's configuration, before the run begins."""

    @functools.wraps(function)
    def masking(cfg: DictConfig) -> Any:
        folder = Path(HydraConfig.get().runtime.output_dir)
        for file in (*(folder / ".hydra").glob("*.yaml"), folder.parent / "multirun.yaml"):
            if file.is_file():
                provenance.mask_file(file)
        return function(cfg)

    return masking


class _Masking:
    """The error stream, on which Hydra prints the overrides of a job that has failed."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> Any:
        """Write a text, and mask it if it is Hydra's."""
        return self._stream.write(masked_text(text) if text.startswith("Error executing job") else text)

    def flush(self) -> None:
        """Write what is buffered."""
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _shown_masked(show: Callable[[], Any]) -> Any:
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown):
            return show()
    finally:
        print(masked_text(shown.getvalue()), end="")


def _is_users(error: Exception) -> bool:
    """Return whether the message is enough: an error in somebody's own code needs its traceback."""
    if isinstance(error, (HydraException, OmegaConfBaseException, FabricxError)):
        return True
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    raised_in = traceback.tb_frame.f_globals.get("__name__", "") if traceback else ""
    return str(raised_in).startswith(("fabricx.", "hydra.", "omegaconf.")) and not isinstance(error, TypeError)


class ProjectPath(SearchPathPlugin):
    """Where groups are looked for: a project's own first, fabricx's last."""

    own: ClassVar[str | None] = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Put the project's folder before the main one, and fabricx's behind it."""
        if self.own is not None:
            search_path.prepend("project", f"file://{self.own}", "main")
        search_path.append("fabricx", HERE)


def _own_groups(arguments: list[str]) -> list[str]:
    """Take `--config-dir` out of the arguments: as Hydra has it, it can't replace what fabricx has too."""
    kept: list[str] = []
    rest = iter(arguments)
    ProjectPath.own = None
    for argument in rest:
        flag, equals, value = argument.partition("=")
        if flag in ("--config-dir", "-cd"):
            given = Path(value if equals else next(rest, ""))
            if not given.is_dir():
                print(f"error: --config-dir {given}: there is no such folder", file=sys.stderr)
                raise SystemExit(1)
            ProjectPath.own = str(given.resolve())
        else:
            kept.append(argument)
    if ProjectPath not in Plugins.instance().discover(SearchPathPlugin):
        Plugins.instance().register(ProjectPath)
    return kept


def _flags_first(arguments: list[str]) -> list[str]:
    """Let flags stand anywhere: Hydra's parser wants all overrides together, behind them."""
    overrides = [one for one in arguments if not one.startswith("-") and ("=" in one or one.startswith("~"))]
    return [*(one for one in arguments if one not in overrides), *overrides]


def _opened(arguments: list[str]) -> list[str]:
    """Choose the open variant of a group whose class is given on the command line."""
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
    """Return a name for a run's folder; ranks that torchrun started beside each other agree on it."""
    if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
        launcher = os.getppid()
        began = (
            datetime.fromtimestamp(os.stat(f"/proc/{launcher}").st_ctime) if Path("/proc").is_dir() else datetime.min
        )
        return f"{began:%Y-%m-%d_%H-%M-%S}-{launcher:06x}"
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S}-{secrets.token_hex(3)}"


def explain(error: Exception, name: str, folder: str | None, arguments: Sequence[str]) -> str:
    """Return what went wrong, with the nearest right key or choice."""
    text = str(error).strip()
    if isinstance(error, MissingConfigException) and error.options:
        choice = str(error.missing_cfg_file).rpartition("/")[2]
        return f"{text.splitlines()[0]}.{did_you_mean(choice, error.options)}\n  known: {', '.join(error.options)}"
    found = re.search(r"Could not override '([^']+)'", text)
    if found is None:
        return text
    key = found.group(1).partition("@")[0]
    chosen = [one for one in arguments if re.fullmatch(r"[\w/]+=[\w/]+", one)]  # groups: their keys are known then
    known = _known_keys(name, folder, chosen) or _known_keys(name, folder, [])
    near = did_you_mean(key, [one for one in known if not key.startswith(f"{one}.")])
    if not near and "." in key:
        group = key.rpartition(".")[0]
        under = [one for one in known if one.startswith(f"{group}.")]
        near = f"\n  known: {', '.join(under)}\n  to give one more, write +{key}=..." if under else ""
    return f"there is no key {key!r} to set.{near}"


def _known_keys(name: str, folder: str | None, chosen: list[str]) -> list[str]:
    GlobalHydra.instance().clear()
    try:
        if folder:
            with hydra.initialize_config_dir(folder, version_base="1.3"):
                cfg = hydra.compose(name, chosen)
        else:
            with hydra.initialize_config_module("fabricx.conf", version_base="1.3"):
                cfg = hydra.compose(name, chosen)
    except Exception:  # while explaining an error, a second one would only hide it
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
