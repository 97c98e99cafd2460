"""The configuration that Hydra checks, and the one place that turns it into objects."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from fabricx.errors import did_you_mean
from fabricx.redaction import masked, masked_keys
from fabricx.trainer import provenance

if TYPE_CHECKING:
    from fabricx.core.datamodule import DataModule
    from fabricx.core.module import Module
    from fabricx.trainer.trainer import Trainer


@dataclass
class TrainerConfig:
    """The Trainer's arguments, as it has them; strategy, callbacks and logger are groups of their own."""

    accelerator: str = "auto"
    devices: Any = "auto"
    num_nodes: int = 1
    precision: Any = "32-true"
    max_epochs: Any = None
    min_epochs: Any = None
    max_steps: Any = -1
    min_steps: Any = None
    max_time: Any = None
    limit_train_batches: Any = 1.0
    limit_val_batches: Any = 1.0
    limit_test_batches: Any = 1.0
    limit_predict_batches: Any = 1.0
    overfit_batches: Any = 0
    val_check_interval: Any = 1.0
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int = 2
    log_every_n_steps: int = 50
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str | None = "norm"
    deterministic: Any = False
    benchmark: bool | None = None
    inference_mode: bool = True
    use_distributed_sampler: bool = True
    profiler: Any = None
    detect_anomaly: bool = False
    sync_batchnorm: bool = False
    reload_dataloaders_every_n_epochs: int = 0
    fast_dev_run: Any = False
    enable_checkpointing: bool = True
    enable_progress_bar: bool = True
    enable_model_summary: bool = True
    enable_fault_recovery: bool = True
    enable_telemetry: bool = True
    default_root_dir: str | None = None
    compile: Any = False


OPEN_GROUPS = ("module", "data", "strategy")


def register() -> None:
    """Tell Hydra what fabricx owns; called before anything is composed."""
    store = ConfigStore.instance()
    store.store(name="schema", node={"trainer": TrainerConfig}, provider="fabricx")
    for group in OPEN_GROUPS:  # open: any key may be set, since it belongs to a class of the user's
        store.store(group=group, name="custom", node=DictConfig({}, flags={"struct": False}), provider="fabricx")


def plain(cfg: DictConfig) -> dict[str, Any]:
    """Return a configuration as plain data, everything resolved.

    Raises:
        ValueError: mandatory values are missing; the message lists all of them.
    """
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise ValueError("these keys need a value: " + ", ".join(missing) + f"\n  such as {missing[0]}=...")
    resolved: Any = OmegaConf.to_container(cfg, resolve=True)
    return {str(key): value for key, value in resolved.items()}


def configuration_of(run_dir: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the configuration that a run was made with, and what `KEY=VALUE` overrides change of it.

    Raises:
        ValueError: the folder has no configuration, an override has a key that isn't there, or a secret isn't given.
    """
    file = run_dir / "config.yaml"
    if not file.is_file():
        raise ValueError(
            f"{run_dir} has no config.yaml: give the folder of a run that the command or @fx.main has started; from "
            "Python, go on with trainer.fit(..., ckpt_path=...)"
        )
    cfg = OmegaConf.load(file)
    assert isinstance(cfg, DictConfig)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ValueError(f"{override!r}: an override is KEY=VALUE")
        if key == "strategy":
            cfg["strategy"] = {"name": value}
            continue
        parent, _, name = key.rpartition(".")
        node: Any = OmegaConf.select(cfg, parent) if parent else cfg
        if not isinstance(node, DictConfig) or name not in node:
            known = [str(one) for one in node] if isinstance(node, DictConfig) else [str(one) for one in cfg]
            raise ValueError(
                f"{key}: the run's configuration has no such key.{did_you_mean(name, known)}\n"
                f"  known: {', '.join(known)}"
            )
        OmegaConf.update(cfg, key, yaml.safe_load(value))
    given = plain(cfg)
    if hidden := list(masked_keys(given)):
        raise ValueError(
            f"{run_dir} was started with secrets, which are stored nowhere: give them again\n  fabricx resume "
            f"{run_dir} " + " ".join(f"{key}=..." for key in hidden)
        )
    return given


def build(cfg: DictConfig | Mapping[str, Any]) -> tuple[Trainer, Module, DataModule | None]:
    """Make trainer, module and data module of a configuration.

    Raises:
        LookupError, ValueError: a name or a key is wrong; the message has the nearest right one.
    """
    from fabricx.trainer.trainer import Trainer

    given = plain(cfg) if isinstance(cfg, DictConfig) else {str(key): value for key, value in cfg.items()}
    for group in ("module", "data"):
        _check_target(group, given.get(group) or {})
    module = _instantiate("module", given["module"])
    data = _instantiate("data", given["data"]) if given.get("data") else None
    trainer = Trainer(
        **{**given["trainer"], "strategy": _strategy(given.get("strategy") or {})},
        callbacks=[_plugin("callbacks", name, options) for name, options in _entries(given, "callbacks")],
        logger=[_plugin("loggers", name, options) for name, options in _entries(given, "logger")],
    )
    trainer.configuration = given
    masked(given)  # notes the secrets, so that messages don't show them
    if HydraConfig.initialized():  # the folder that Hydra has made for this run or job
        trainer.run_dir = Path(HydraConfig.get().runtime.output_dir)
        provenance.write(trainer.run_dir, given)
    return trainer, module, data


def _entries(given: Mapping[str, Any], group: str) -> list[tuple[str, dict[str, Any]]]:
    # `callbacks.early_stopping=null` takes one out of a choice
    return [(name, dict(options)) for name, options in (given.get(group) or {}).items() if options is not None]


def _plugin(kind: str, name: str, options: dict[str, Any]) -> Any:
    from fabricx import plugins

    if "_target_" in options:
        return _instantiate(f"{kind}.{name}", options)
    return plugins.build(kind, name, **options)


def _strategy(options: dict[str, Any]) -> Any:
    if not options or options.get("name") == "auto":
        return "auto"
    if "_target_" in options:
        return _instantiate("strategy", {key: value for key, value in options.items() if key != "name"})
    return _plugin("strategies", options["name"], {key: value for key, value in options.items() if key != "name"})


def _check_target(group: str, node: Mapping[str, Any]) -> None:
    """Compare keys with the constructor's arguments, so that a typo is found before anything is built."""
    from hydra.utils import get_object

    if "_target_" not in node:
        choices = "module=digits" if group == "module" else "data=digits"
        raise ValueError(f"there is no {group}: choose one ({choices}), or give {group}._target_=my_project.Mine")
    try:
        target = get_object(node["_target_"])
    except Exception as error:
        raise LookupError(
            f"{group}._target_={node['_target_']} can't be imported: {error}\n"
            "  modules are looked for in the current folder and in what is installed"
        ) from error
    known = inspect.signature(target).parameters
    if any(p.kind is p.VAR_KEYWORD for p in known.values()):
        return
    for key in node:
        if not key.startswith("_") and key not in known:
            raise ValueError(
                f"{group}.{key}: {node['_target_']} has no argument {key!r}.{did_you_mean(key, known)}\n"
                f"  known: {', '.join(known) or 'none'}"
            )


def _instantiate(where: str, node: Mapping[str, Any]) -> Any:
    from hydra.utils import instantiate

    _check_target(where, node)
    return instantiate(dict(node), _convert_="all")
