"""Configuration: the schema that Hydra checks, and the construction of objects from it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from fabricx.annotations import check_value
from fabricx.core.options import TrainerOptions
from fabricx.errors import did_you_mean
from fabricx.redaction import masked, masked_keys
from fabricx.trainer import provenance

if TYPE_CHECKING:
    from fabricx.core.datamodule import DataModule
    from fabricx.core.module import Module
    from fabricx.trainer.trainer import Trainer


OPEN_GROUPS = ("module", "data", "strategy")
_GROUPS = ("self", "strategy", "callbacks", "logger")  # not part of the group "trainer"
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
    for group in OPEN_GROUPS:  # open: the keys are arguments of a class of the user
        store.store(group=group, name="custom", node=DictConfig({}, flags={"struct": False}), provider="fabricx")


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


def configuration_of(run_dir: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the configuration of an earlier run, with overrides applied.

    Args:
        run_dir: the run's folder.
        overrides: changes, as `KEY=VALUE`.

    Raises:
        ValueError: the folder has no configuration, the key of an override does not exist, or a secret is missing.
    """
    file = run_dir / "config.yaml"
    if not file.is_file():
        raise ValueError(
            f"{run_dir} has no config.yaml: pass the folder of a run that was started by the command or @fx.main. To "
            "resume a run from Python, use trainer.fit(..., ckpt_path=...)"
        )
    cfg = OmegaConf.load(file)
    assert isinstance(cfg, DictConfig)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ValueError(f"{override!r}: overrides must have the form KEY=VALUE")
        if key == "strategy":
            cfg["strategy"] = {"name": value}
            continue
        parent, _, name = key.rpartition(".")
        node: Any = OmegaConf.select(cfg, parent) if parent else cfg
        if not isinstance(node, DictConfig) or name not in node:
            valid = [str(name) for name in (node if isinstance(node, DictConfig) else cfg)]
            raise ValueError(
                f"{key}: the run's configuration has no such key.{did_you_mean(name, valid)}\n"
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
    from fabricx.trainer.trainer import Trainer

    config = plain(cfg) if isinstance(cfg, DictConfig) else {str(key): value for key, value in cfg.items()}
    for group in ("module", "data"):
        _check_target(group, config.get(group) or {})
    module = _instantiate("module", config["module"])
    data = _instantiate("data", config["data"]) if config.get("data") else None
    trainer = Trainer(
        **{**config["trainer"], "strategy": _strategy(config.get("strategy") or {})},
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
    from fabricx import plugins

    if "_target_" in options:
        return _instantiate(where, options)
    for option, value in options.items():
        check_value(f"{where}.{option}", value, plugins.find(kind, name), option)
    return plugins.build(kind, name, **options)


def _strategy(options: dict[str, Any]) -> Any:
    if not options or options.get("name") == "auto":
        return "auto"
    arguments = {key: value for key, value in options.items() if key != "name"}
    return _plugin("strategy", "strategies", options.get("name", ""), arguments)


def _check_target(group: str, node: Mapping[str, Any]) -> None:
    """Compare keys and values with the constructor's arguments, to detect errors before any object is created."""
    from hydra.utils import get_object

    if "_target_" not in node:
        choices = "module=digits" if group == "module" else "data=digits"
        raise ValueError(f"{group} is not set: choose a {group} ({choices}), or set {group}._target_=my_project.Mine")
    try:
        target = get_object(node["_target_"])
    except Exception as error:
        raise LookupError(
            f"{group}._target_={node['_target_']} can't be imported: {error}\n"
            "  modules are imported from the current folder and from installed packages"
        ) from error
    valid = inspect.signature(target).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in valid.values())
    for key, value in node.items():
        check_value(f"{group}.{key}", value, target, key)
        if not takes_any and not key.startswith("_") and key not in valid:
            raise ValueError(
                f"{group}.{key}: {node['_target_']} has no argument {key!r}.{did_you_mean(key, valid)}\n"
                f"  known: {', '.join(valid) or 'none'}"
            )


def _instantiate(where: str, node: Mapping[str, Any]) -> Any:
    from hydra.utils import instantiate

    _check_target(where, node)
    return instantiate(dict(node), _convert_="all")
