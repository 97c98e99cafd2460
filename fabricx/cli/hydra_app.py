"""Run a function under Hydra: `@fx.main` for scripts, and the base of the `fabricx` command."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import io
import itertools
import os
import secrets
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import hydra
import yaml  # type: ignore[import-untyped]
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.default_element import GroupDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fabricx import config
from fabricx.cli import help
from fabricx.cli.mistakes import Composition, explain
from fabricx.cli.overrides import arranged, parsed
from fabricx.cli.run_log import own_logging
from fabricx.errors import ALL_FRAMES, FabricxError, WrongArgument, brief_traceback, is_user_module
from fabricx.redaction import masked_text, records_masked
from fabricx.trainer import provenance

CONFIG_PACKAGE = "pkg://fabricx.conf"
_STAMPS = itertools.count()  # all ranks of a launch compose the same configurations in the same order
_DISPLAY_FLAGS = ("--cfg", "-c", "--info", "-i")  # flags with which Hydra prints a configuration


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

    For example:

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


def run_app(function: Callable[..., Any], arguments: list[str], folder: str | None, name: str, usage: str = "") -> Any:
    """Compose the configuration and run a function with it; print user errors as a message without a traceback.

    Args:
        function: called with the configuration.
        arguments: command line, without the program.
        folder: folder of the main configuration; None for fabricx's configuration.
        name: name of the main configuration.
        usage: first part of the help; "" for a general text.

    Returns:
        result of the function.

    Raises:
        SystemExit: with status 1 after a user error.
    """
    config.register()
    _register_resolvers()
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # not on the import path of console scripts
    before = sys.argv
    full = os.environ.get("HYDRA_FULL_ERROR") or os.environ.get(ALL_FRAMES)
    composition = Composition(name, folder)
    failed: list[tuple[str, Exception]] = []
    overrides: list[str] = []
    try:
        kept, folder = _take_folders(arguments, folder)
        kept = _choose_open_groups(kept)
        composition = Composition(_config_name(kept) or name, folder)
        overrides = arranged(kept, composition.keys)
        if any(argument in ("--help", "-h") for argument in overrides):
            settings = [argument for argument in overrides if not argument.startswith("-")]
            usage = usage or f"{Path(before[0]).name} [GROUP=CHOICE ...] [KEY=VALUE ...]"
            print(masked_text(help.text(usage, composition, composition.compose(settings))))
            return None
        sys.argv = [before[0], *overrides]
        decorated = hydra.main(version_base="1.3", config_path=folder or CONFIG_PACKAGE, config_name=name)(
            _job(function, failed)
        )
        shows = any(argument.partition("=")[0] in _DISPLAY_FLAGS for argument in arguments)
        with records_masked(), _full_errors(), own_logging(), contextlib.redirect_stderr(_Stderr(sys.stderr)):
            return _print_masked(decorated) if shows else decorated()
    except Exception as error:
        if full:
            raise
        outside = None if any(cause is error for _, cause in failed) else error
        if outside is not None:
            failed.append(("", outside))
        for job, cause in failed:
            print(
                masked_text(job + _message(cause, composition, overrides, in_task=cause is not outside)),
                file=sys.stderr,
            )
        raise SystemExit(1) from None
    finally:
        sys.argv = before


def error_message(error: Exception) -> str:
    """Return the message for an error of a run: short for a mistake of the user, with a traceback for other errors.

    Args:
        error: raised by a run.
    """
    return _message(error, Composition("config", None), [], in_task=True)


def _message(error: Exception, composition: Composition, arguments: Sequence[str], *, in_task: bool) -> str:
    error.__traceback__ = _within_task(error.__traceback__)
    if isinstance(error, (HydraException, OmegaConfBaseException)) or (
        type(error) in (ValueError, WrongArgument) and not in_task
    ):
        return f"error: {explain(error, composition, arguments)}"
    if isinstance(error, OSError) and not in_task and error.filename:
        return f"error: {error.filename}: {error.strerror}; start in another folder, or set hydra.run.dir=FOLDER"
    if isinstance(error, PermissionError) and error.filename and not _place(error):
        return f"error: {error.filename}: {error.strerror}"
    if isinstance(error, yaml.YAMLError):
        return f"error: {error}"
    if isinstance(error, SyntaxError):
        return "".join(traceback.format_exception_only(error)).rstrip()
    if _is_user_error(error):
        return f"error: {str(error.args[0] if isinstance(error, KeyError) else error).strip()}{_place(error)}"
    return brief_traceback(error).strip()


def _within_task(full: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames of Hydra and of the command that called the task."""
    start, frame = full, full
    while frame is not None:
        module = str(frame.tb_frame.f_globals.get("__name__", ""))
        frame = frame.tb_next
        if frame is not None and module.startswith(("hydra.", "fabricx.cli.", "fabricx.config")):
            start = frame
    return start


def _is_python(module: str) -> bool:
    """Return whether a module belongs to Python's standard library."""
    return module.partition(".")[0] in sys.stdlib_module_names


def _place(error: Exception) -> str:
    """Return the line of the user's code that called the function with the error; "" without such a line."""
    frames = [
        frame
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if is_user_module(frame.f_globals.get("__name__", "")) and not _is_python(frame.f_globals.get("__name__", ""))
    ]
    if not frames or isinstance(error, FabricxError):
        return ""
    line = max((number for frame, number in traceback.walk_tb(error.__traceback__) if frame is frames[-1]), default=0)
    return f"\n  at {frames[-1].f_code.co_filename}:{line}, in {frames[-1].f_code.co_qualname}"


@contextlib.contextmanager
def _full_errors() -> Iterator[None]:
    """Make Hydra raise errors, which the caller explains, instead of printing them."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before


def _config_name(arguments: Sequence[str]) -> str | None:
    """Return the value of `--config-name`, or None."""
    for number, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag in ("--config-name", "-cn"):
            return value if equals else next(iter(arguments[number + 1 :]), None)
    return None


def _job(function: Callable[..., Any], failed: list[tuple[str, Exception]]) -> Callable[[DictConfig], Any]:
    """Wrap the function of a job: mask secrets in Hydra's files, check choices of groups, collect errors."""

    @functools.wraps(function)
    def run(cfg: DictConfig) -> Any:
        context = HydraConfig.get()
        folder = Path(context.runtime.output_dir)
        for file in (*(folder / ".hydra").glob("*.yaml"), folder.parent / "multirun.yaml"):
            if file.is_file():
                provenance.mask_file(file)
        overrides = [str(text) for text in OmegaConf.to_container(context.overrides.task, resolve=False)]  # type: ignore[union-attr]
        try:
            _check_choices(overrides)
            return function(cfg)
        except Exception as error:
            swept = context.mode == RunMode.MULTIRUN
            job = f"job {context.job.num} of the sweep ({' '.join(overrides)}) failed\n" if swept else ""
            failed.append((job, error))
            _remove_unused(folder)
            raise

    return run


def _remove_unused(folder: Path) -> None:
    """Remove the folder of a job that failed before it trained: it has only the record of the command."""
    record = ("config.yaml", "command.txt", "versions.json", "arguments.yaml", f"{HydraConfig.get().job.name}.log")
    with contextlib.suppress(OSError):
        files = list(folder.iterdir())
        if folder != Path.cwd() and all(
            file.is_file() and (file.name in record or not file.stat().st_size) for file in files
        ):
            for file in files:
                file.unlink()
            folder.rmdir()
            folder.parent.rmdir()  # unless it has other runs


def _check_choices(overrides: Sequence[str]) -> None:
    """Refuse unknown choices of groups that the configuration declares as optional, which Hydra ignores."""
    loader = GlobalHydra.instance().config_loader()
    for group, choice in HydraConfig.get().runtime.choices.items():
        if choice is not None and "/" not in group and "@" not in group:
            _check_defaults(loader, f"{group}/{choice}")
    for override in parsed(overrides):
        group = override.key_or_group
        value = None if override.is_delete() or "." in group else override.value()
        if value is None or not (loader.get_group_options(group) or loader.list_groups(group)):
            continue
        for choice in value if isinstance(value, list) else [value]:
            parent, _, name = f"{group}/{choice}".rpartition("/")
            if name not in (options := loader.get_group_options(parent)):
                raise MissingConfigException(f"there is no {parent}/{name}", f"{parent}/{name}", options)


def _check_defaults(loader: Any, path: str) -> None:
    """Refuse a file that overrides a group twice: Hydra ignores the second choice."""
    file = loader.repository.load_config(path)
    chosen: dict[str, Any] = {}
    for default in (file.defaults_list or []) if file is not None else []:
        if isinstance(default, GroupDefault) and default.override:
            group = str(default.group).lstrip("/")
            if chosen.setdefault(group, default.value) != default.value:
                raise ValueError(
                    f"{path}.yaml overrides {group} twice, with {chosen[group]} and with {default.value}: keep one"
                )


class _Stderr:
    """Wrapper of the error stream without Hydra's line about a failed job, whose error is printed in full later."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> Any:
        """Write a text.

        Args:
            text: the text.
        """
        return len(text) if text.startswith("Error executing job with overrides: ") else self._stream.write(text)

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
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised_in = frames[-1].f_globals.get("__name__", "") if frames else ""
    mistaken = isinstance(error, WrongArgument) or not isinstance(error, TypeError)
    return mistaken and str(raised_in).startswith(("fabricx.", "hydra.", "omegaconf."))


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


def _take_folders(arguments: list[str], folder: str | None) -> tuple[list[str], str | None]:
    """Remove `--config-dir` and `--config-path` from the arguments; prepend the first's folder to the search path.

    Hydra's handling appends the folder of `--config-dir`, so that its files could not override fabricx's files of the
    same name, and searches that of `--config-path` beside this file.

    Args:
        arguments: command line.
        folder: folder of the main configuration, unless there is a `--config-path`.

    Returns:
        the other arguments, and the folder of the main configuration.
    """
    kept, ProjectPath.folder = _take_folder(arguments, ("--config-dir", "-cd"), "your own groups")
    kept, chosen = _take_folder(kept, ("--config-path", "-cp"), "your own main configuration")
    if ProjectPath not in Plugins.instance().discover(SearchPathPlugin):
        Plugins.instance().register(ProjectPath)
    return kept, chosen or folder


def _take_folder(arguments: list[str], flags: tuple[str, str], content: str) -> tuple[list[str], str | None]:
    """Remove a flag from the arguments; return the others, and the flag's folder or None."""
    kept: list[str] = []
    rest, taken = iter(arguments), None
    for argument in rest:
        flag, equals, value = argument.partition("=")
        if flag not in flags:
            kept.append(argument)
            continue
        value = value if equals else next(rest, "")
        if not value:
            raise ValueError(f"{flags[0]} needs a folder with {content}: {flags[0]} conf")
        if not (folder := Path(value)).is_dir():
            raise ValueError(f"{flags[0]} {folder}: the folder does not exist in {os.getcwd()}")
        taken = str(folder.resolve())
    return kept, taken


def _choose_open_groups(arguments: list[str]) -> list[str]:
    """Choose the open variant of each group with a `_target_` on the command line, so that any key may be set."""
    opened = list(arguments)
    for group in config.OPEN_GROUPS:
        chosen = any(argument.startswith((f"{group}=", f"+{group}=")) for argument in arguments)
        if not chosen and any(argument.lstrip("+").startswith(f"{group}._target_=") for argument in arguments):
            opened.insert(0, f"{group}=custom")
    return opened


@functools.cache
def _register_resolvers() -> None:
    OmegaConf.register_new_resolver("run_stamp", _stamp, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("runs_folder", _runs_folder, replace=True)


def _runs_folder(_root_: Any) -> str:
    """Return the folder of all runs, for a configuration; the Trainer refuses a URL."""
    trainer = _root_.get("trainer")  # a wrong value of the group gets an error of its own later
    root = trainer.get("default_root_dir") if isinstance(trainer, DictConfig) else None
    return "runs" if root is None or "://" in str(root) else str(Path(root).expanduser() / "runs")


def _stamp() -> str:
    """Return a name for the run's folder; equal on all ranks of a launch, which call it together."""
    from fabricx.launch import cluster, launch_store  # import torch, which short commands do without

    launched = cluster.detect()
    if launched is None or launched.size == 1:
        return _new_stamp(restarts=False)
    name = _new_stamp(restarts=cluster.launch() is not None)
    return launch_store.agreed(launch_store.connect(launched), f"stamp/{next(_STAMPS)}", name)


def _new_stamp(*, restarts: bool) -> str:
    """Return a name for a run's folder; if torchrun `restarts` this process, the same name each time."""
    if restarts and Path("/proc").is_dir():
        from fabricx.launch.launch_store import agent

        began = datetime.fromtimestamp(os.stat(f"/proc/{os.getppid()}").st_ctime)
        # Its process id may be 1, in the containers of several launches that share a file system.
        return f"{began:%Y-%m-%d_%H-%M-%S}-{hashlib.sha256(agent().encode()).hexdigest()[:6]}"
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S}-{secrets.token_hex(3)}"
