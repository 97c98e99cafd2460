"""Configuration: the schema that Hydra checks, and the construction of objects from it."""

from __future__ import annotations

import inspect
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, make_dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from fabricx import plugins
from fabricx.core.options.annotations import check_value
from fabricx.core.options.trainer_options import LAUNCHERS, TrainerOptions
from fabricx.errors import did_you_mean, nearest_key
from fabricx.redaction import masked, masked_keys
from fabricx.trainer import provenance

if TYPE_CHECKING:
    from fabricx.core.datamodule import DataModule
    from fabricx.core.module import Module
    from fabricx.trainer.trainer import Trainer


T = TypeVar("T")
OPEN_GROUPS = ("module", "data", "strategy", "launcher")
_GROUPS = ("self", "strategy", "launcher", "callbacks", "logger")  # not part of the group "trainer"
_CHECKED = {"bool": bool, "int": int, "str": str, "bool | None": bool | None, "int | None": int | None,
            "float | None": float | None, "str | None": str | None}  # types of arguments that Hydra checks  # fmt: skip


def _trainer_schema() -> type:
    """Return a dataclass with the Trainer's arguments and defaults; types that Hydra does not support become Any."""
    parameters = inspect.signature(TrainerOptions.__init__).parameters.values()
    return make_dataclass(
        "TrainerConfig",
        [(p.name, _CHECKED.get(p.annotation, Any), p.default) for p in parameters if p.name not in _GROUPS],
    )


TrainerConfig: Final = _trainer_schema()


def register() -> None:
    """Register the schema and the open groups with Hydra; called before the configuration is composed."""
    store = ConfigStore.instance()
    store.store(name="schema", node={"trainer": TrainerConfig}, provider="fabricx")
    for group, kind in (("strategy", "strategies"), ("launcher", "launchers")):
        for name in plugins.registered(kind):  # by entry points of packages
            store.store(group=group, name=name, node=_open({"name": name}), provider="fabricx")
    for group, kind in (("callbacks", "callbacks"), ("logger", "loggers")):
        for name in plugins.registered(kind):
            beside = {"defaults": ["default", "_self_"]} if group == "callbacks" else {}
            store.store(group=group, name=name, node={**beside, name: _open({})}, provider="fabricx")
    for group in OPEN_GROUPS:  # open: the keys are arguments of a class of the user
        store.store(group=group, name="custom", node=_open({}), provider="fabricx")


def _open(node: dict[str, Any]) -> DictConfig:
    """Return a node to which the command line may add keys."""
    return DictConfig(node, flags={"struct": False})


def plain(cfg: DictConfig) -> dict[str, Any]:
    """Convert a configuration to plain data, with all interpolations resolved.

    Args:
        cfg: the configuration.

    Raises:
        ValueError: mandatory values are missing; the message lists them.
    """
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise ValueError("these keys need a value: " + ", ".join(missing) + f"\n  set them, as in {missing[0]}=...")
    resolved: Any = OmegaConf.to_container(cfg, resolve=True)
    return {str(key): value for key, value in resolved.items()}


def recorded_configuration(run_dir: Path) -> DictConfig:
    """Return the configuration that is recorded in a run's folder, with masked secrets.

    Args:
        run_dir: the run's folder.

    Raises:
        ValueError: the folder has no configuration.
    """
    file = provenance.newest_configuration(run_dir)
    if not file.is_file():
        from fabricx.checkpoint import is_committed  # imports torch, which other commands do without

        if is_committed(run_dir) or run_dir.is_file():
            of_run = run_dir.absolute().parent.parent
            known = provenance.newest_configuration(of_run).is_file()
            hint = f"\n  to resume its run: fabricx resume {shlex.quote(os.path.relpath(of_run))}" if known else ""
            raise ValueError(
                f"{run_dir} is not the folder of a run{hint}\n  to begin a run with it: fabricx fit ckpt_path={run_dir}"
            )
        if not run_dir.is_dir():
            runs = sorted(str(path.parent) for path in Path("runs").glob("*/config.yaml"))
            newest = f"\n  newest run: {runs[-1]}" if runs else ""
            raise ValueError(f"{run_dir}: there is no such folder.{did_you_mean(str(run_dir), runs)}{newest}")
        raise ValueError(
            f"{run_dir} has no config.yaml: pass the folder of a run that was started by the command or @fx.main. To "
            "resume a run from Python, use trainer.fit(..., ckpt_path=...)"
        )
    cfg = OmegaConf.load(file)
    assert isinstance(cfg, DictConfig)
    if "seed_everything" in cfg and "trainer" in cfg and "model" in cfg:
        raise ValueError(
            f"{file} is the configuration of a program with LightningCLI: resume the run with this program, and the "
            f"options fit --config={file} --ckpt_path=CHECKPOINT\n  its checkpoints are in {run_dir / 'checkpoints'}"
        )
    return cfg


def configuration_of(run_dir: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the configuration of an earlier run, with overrides applied.

    Args:
        run_dir: the run's folder.
        overrides: changes, as `KEY=VALUE`.

    Raises:
        ValueError: the folder has no configuration, the key of an override does not exist, or a secret is missing.
    """
    cfg = recorded_configuration(run_dir)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ValueError(f"{override!r}: overrides must have the form KEY=VALUE")
        if key in ("strategy", "launcher"):
            cfg[key] = {"name": value}
            continue
        parent, _, name = key.rpartition(".")
        node: Any = OmegaConf.select(cfg, parent) if parent else cfg
        if not isinstance(node, DictConfig) or name not in node:
            near = nearest_key(key, [*changed_settings({}, OmegaConf.to_container(cfg, resolve=False))])
            valid = [str(name) for name in (node if isinstance(node, DictConfig) else cfg)]
            raise ValueError(
                f"{key}: the run's configuration has no such key.{f' Did you mean {near!r}?' if near else ''}\n"
                f"  known: {', '.join(valid)}"
            )
        cfg.merge_with_dotlist([override])  # omegaconf reads 1e-3 as a number, yaml.safe_load as text
    config = plain(cfg)
    if hidden := list(masked_keys(config)):
        raise ValueError(
            f"{run_dir} was started with secrets, which are not stored: pass them again\n  fabricx resume "
            f"{run_dir} " + " ".join(f"{key}=..." for key in hidden)
        )
    return config


def changed_settings(before: Any, after: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, by dotted key, as pairs of values.

    Args:
        before: a configuration, as plain data.
        after: another configuration.
        prefix: dotted key of both.

    >>> changed_settings({"module": {"lr": 0.1, "hidden": 3}}, {"module": {"lr": 0.5, "hidden": 3}})
    {'module.lr': (0.1, 0.5)}
    """
    if not (isinstance(before or {}, Mapping) and isinstance(after, Mapping)):
        return {} if before == after else {prefix: (before, after)}
    changed: dict[str, tuple[Any, Any]] = {}
    before = before or {}
    for key in [*before, *(key for key in after if key not in before)]:
        changed |= changed_settings(before.get(key), after.get(key), f"{prefix}.{key}" if prefix else str(key))
    return changed


def check_same_model(config: Mapping[str, Any], saved: Any, checkpoint: str) -> dict[str, tuple[Any, Any]]:
    """Compare module and data of a configuration with those of a checkpoint's run.

    Args:
        config: the configuration, as plain data.
        saved: the configuration of the checkpoint's run; None if it has none.
        checkpoint: its path, for the message.

    Returns:
        settings of them that differ, as pairs of the checkpoint's value and the present value.

    Raises:
        ValueError: the checkpoint was saved for another class; the message contains the settings of its run.
    """
    differing: dict[str, tuple[Any, Any]] = {}
    config = masked(config)  # as the checkpoint's
    for group in ("module", "data") if isinstance(saved, Mapping) else ():
        now, then = config.get(group) or {}, saved.get(group) or {}
        if now.get("_target_") != then.get("_target_"):
            settings = [f"{name}.{key}={value}" for name in ("module", "data") for key, value in saved[name].items()]
            raise ValueError(
                f"{checkpoint} is of a run with {group}._target_={then.get('_target_')}, and this command has "
                f"{now.get('_target_')}\n  to use it, set: {' '.join(settings)}"
            )
        differing |= changed_settings(then, now, group)
    return differing


def build(cfg: DictConfig | Mapping[str, Any]) -> tuple[Trainer, Module, DataModule | None]:
    """Create trainer, module and data module from a configuration.

    Args:
        cfg: composed configuration, or plain data of the same structure.

    Returns:
        trainer, module, and data module (None without `data`).

    Raises:
        LookupError: a name is unknown; the message contains the nearest valid name.
        ValueError: a key or value is invalid; the message contains the nearest valid key.
    """
    from fabricx.core.datamodule import DataModule
    from fabricx.core.module import Module
    from fabricx.lightning import adapt_data, adapt_module
    from fabricx.trainer.trainer import Trainer

    config = plain(cfg) if isinstance(cfg, DictConfig) else {str(key): value for key, value in cfg.items()}
    check_settings(config)
    for group, choice in (("module", "module=digits"), ("data", "data=digits")):
        if config.get(group) and "_target_" in config[group]:
            _check_target(group, config[group])
        elif config.get(group) or group == "module":
            raise ValueError(
                f"{group} is not set: choose a {group} ({choice}), or set {group}._target_=my_project.Mine"
            )
    module = _built("module", config["module"], Module, adapt_module)
    data = _built("data", config["data"], DataModule, adapt_data) if config.get("data") else None
    trainer = Trainer(
        **{**config["trainer"], "strategy": _named("strategy", config), "launcher": _named("launcher", config)},
        callbacks=[_plugin(f"callbacks.{name}", "callbacks", name, options) for name, options in _callbacks(config)],
        logger=[_plugin(f"logger.{name}", "loggers", name, options) for name, options in _entries(config, "logger")],
    )
    masked(config)  # registers the secrets, so that they are masked in messages
    # Hydra has created a folder for this run or job.
    run_dir = Path(HydraConfig.get().runtime.output_dir) if HydraConfig.initialized() else None
    trainer.configure(config, run_dir)
    if run_dir is not None:
        provenance.write(run_dir, config)
    return trainer, module, data


def _entries(config: Mapping[str, Any], group: str) -> list[tuple[str, dict[str, Any]]]:
    """Return name and options of each entry of a group; `callbacks.early_stopping=null` removes an entry."""
    return [(name, dict(options)) for name, options in (config.get(group) or {}).items() if options is not None]


def _callbacks(config: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the entries of callbacks; `trainer.enable_checkpointing=false` removes the group's own ModelCheckpoint."""
    saves = config["trainer"].get("enable_checkpointing", True)
    return [(name, options) for name, options in _entries(config, "callbacks") if saves or name != "model_checkpoint"]


def _plugin(where: str, kind: str, name: str, options: dict[str, Any]) -> Any:
    if "_target_" in options:
        return _instantiate(where, options)
    for option, value in options.items():
        check_value(f"{where}.{option}", value, plugins.find(kind, name), option)
    return plugins.build(kind, name, **options)


def _named(group: str, config: Mapping[str, Any]) -> Any:
    """Return the strategy or launcher of a configuration; names without a class are returned unchanged."""
    options = config.get(group) or {"name": "auto"}
    name, arguments = options.get("name", ""), {key: value for key, value in options.items() if key != "name"}
    if name == "auto" or (group == "launcher" and name in LAUNCHERS):
        return name
    return _plugin(group, "strategies" if group == "strategy" else "launchers", name, arguments)


def _check_target(where: str, node: Mapping[str, Any]) -> Any:
    """Compare keys and values with the constructor's arguments, to detect errors before any object is created.

    Returns:
        the class or function of `_target_`.
    """
    target = plugins.load(f"{where}._target_", node["_target_"])
    valid = inspect.signature(target).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in valid.values())
    for key, value in node.items():
        check_value(f"{where}.{key}", value, target, key)
        if not takes_any and not key.startswith("_") and key not in valid:
            raise ValueError(
                f"{where}.{key}: {node['_target_']} has no argument {key!r}.{did_you_mean(key, valid)}\n"
                f"  known: {', '.join(valid) or 'none'}"
            )
        _check_nested(f"{where}.{key}", value)
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    missing = [name for name, p in valid.items() if p.kind in named and p.default is p.empty and name not in node]
    if missing and "_args_" not in node and not node.get("_partial_"):
        raise ValueError(
            f"{where}: {node['_target_']} needs a value for {', '.join(missing)}\n"
            f"  set {' '.join(f'{where}.{name}=...' for name in missing)}"
        )
    return target


def _check_nested(where: str, value: Any) -> None:
    if isinstance(value, Mapping):
        if "_target_" in value:
            _check_target(where, value)
        else:
            for key, item in value.items():
                _check_nested(f"{where}.{key}", item)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _check_nested(f"{where}.{number}", item)


def _instantiate(where: str, node: Mapping[str, Any]) -> Any:
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    _check_target(where, node)
    try:
        return instantiate(dict(node), _convert_="all")
    except InstantiationException as error:
        if isinstance(error.__cause__, Exception):
            raise error.__cause__ from None  # the error of the constructor, with its traceback
        raise


def _built(group: str, node: Mapping[str, Any], contract: type[T], adapt: Callable[[Any], Any]) -> T:
    """Return the object of a group; an object of Lightning is adapted to the contract.

    Raises:
        ValueError: it does not implement the contract.
    """
    built = adapt(_instantiate(group, node))
    if not isinstance(built, contract):
        raise ValueError(
            f"{group}._target_={node['_target_']} creates a {type(built).__name__}, which is not a "
            f"fabricx.{contract.__name__}: name a class that is derived from it"
        )
    return built


def check_settings(config: Mapping[str, Any]) -> None:
    """Check the settings outside of groups, and that groups are groups.

    Args:
        config: the configuration, as plain data.

    Raises:
        ValueError: a value has another type; the message names the key.
    """
    for group in ("trainer", "module", "data", "strategy", "launcher", "callbacks", "logger"):
        value = config.get(group)
        if isinstance(value, Mapping) or (value is None and group != "trainer"):
            continue
        if isinstance(value, str) and "." in value and group in OPEN_GROUPS:
            raise ValueError(f"{group}={value}: for a class of your own, write {group}._target_={value}")
        raise ValueError(
            f"{group}={value!r}: {group} is a group of keys, not a value; set one of its keys: {group}.KEY=VALUE"
        )
    for group in ("callbacks", "logger"):
        for name, options in (config.get(group) or {}).items():
            if options is not None and not isinstance(options, Mapping):
                raise ValueError(f"{group}.{name}={options!r}: set its options, {group}.{name}.KEY=VALUE, or null")
    for name in config["trainer"]:
        if name not in (known := [field.name for field in fields(TrainerConfig)]):
            raise ValueError(f"trainer.{name}: there is no such key.{did_you_mean(name, known)}")
    for group in ("experiment", "debug"):
        if isinstance(config.get(group), Mapping):
            raise ValueError(
                f"the file of {group}=... would change nothing, because its keys are below {group!r}: write "
                "`# @package _global_` as its first line"
            )
    seed, test = config.get("seed"), config.get("test", False)
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise ValueError(f"seed={seed!r}: set a whole number, or null for a different seed in each run")
    if not isinstance(test, bool):
        raise ValueError(f"test={test!r}: set true or false")
    for key in ("monitor", "ckpt_path"):
        if not isinstance(config.get(key), (str, NoneType)):
            raise ValueError(f"{key}={config[key]!r}: set a text, or null")
