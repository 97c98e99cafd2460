"""`LightningCLI`, whose runs are runs of fabricx."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ActionConfigFile, Namespace  # type: ignore[attr-defined]
from jsonargparse.typing import class_from_function
from torch.optim import Optimizer

from fabricx import __version__
from fabricx.cli.lightning.checkpoints import hparams_of
from fabricx.cli.lightning.objects import ConfiguredOptimizers, Instantiator, class_of
from fabricx.cli.lightning.parser import AUTOMATIC, Group, LightningArgumentParser
from fabricx.cli.lightning.saving import SaveConfigCallback
from fabricx.core.callback import Callback
from fabricx.core.datamodule import DataModule
from fabricx.core.module import Module
from fabricx.core.module_state.rng import seed_everything
from fabricx.lightning.functions import is_overridden
from fabricx.lightning.schedules import LRSchedulerTypeTuple, ReduceLROnPlateau
from fabricx.trainer.trainer import Trainer

ArgsType = list[str] | dict[str, Any] | Namespace | None


class LightningCLI:
    """Build a trainer, a module and a data module from the command line and from YAML files, and run a method.

    Args:
        model_class: class of the module, or a function that returns it; None lets the user select one by `--model`.
        datamodule_class: the same for the data module, by `--data`.
        save_config_callback: class of the callback that writes the configuration; None writes nothing.
        save_config_kwargs: arguments of this callback.
        trainer_class: class of the trainer, or a function that returns it.
        trainer_defaults: defaults of its arguments; callbacks of this dict are always added.
        seed_everything_default: seed; True for that of `PL_GLOBAL_SEED`, else 0; False sets none.
        parser_kwargs: arguments of the parsers, by subcommand or for all.
        parser_class: class of the parsers.
        subclass_mode_model, subclass_mode_data: the user may select a class derived from the given one.
        args: words of the command line, or values by name; None for the command line of this process.
        run: run the method that the subcommand names; False only creates the objects.
        auto_configure_optimizers: add the options `--optimizer` and `--lr_scheduler`.
        load_from_checkpoint_support: `save_hyperparameters` saves the values of the configuration, so that
            `load_from_checkpoint` can create nested objects.

    Attributes:
        config: values of all options, with class paths.
        config_init: the same with the created objects.
        model, datamodule, trainer: the created objects.
        subcommand: name of the trainer's method; None with `run=False`.
    """

    def __init__(
        self, model_class: Callable[..., Any] | None = None, datamodule_class: Callable[..., Any] | None = None,
        save_config_callback: type[SaveConfigCallback] | None = SaveConfigCallback,
        save_config_kwargs: dict[str, Any] | None = None, trainer_class: Callable[..., Any] = Trainer,
        trainer_defaults: dict[str, Any] | None = None, seed_everything_default: bool | int = True,
        parser_kwargs: dict[str, Any] | None = None,
        parser_class: type[LightningArgumentParser] = LightningArgumentParser, subclass_mode_model: bool = False,
        subclass_mode_data: bool = False, args: ArgsType = None, run: bool = True,
        auto_configure_optimizers: bool = True, load_from_checkpoint_support: bool = True,
    ) -> None:  # fmt: skip
        self.save_config_callback, self.save_config_kwargs = save_config_callback, save_config_kwargs or {}
        self.trainer_class, self.trainer_defaults = trainer_class, trainer_defaults or {}
        self.seed_everything_default, self.auto_configure_optimizers = (
            seed_everything_default,
            auto_configure_optimizers,
        )
        self.parser_kwargs, self.parser_class = parser_kwargs or {}, parser_class
        self.model_class, self.datamodule_class = model_class, datamodule_class
        self.subclass_mode_model = model_class is None or subclass_mode_model
        self.subclass_mode_data = datamodule_class is None or subclass_mode_data
        self._subcommand_parsers: dict[str, LightningArgumentParser] = {}
        self._method_options: dict[str, list[str]] = {}
        names = self.subcommands()
        common = {name: value for name, value in self.parser_kwargs.items() if name not in names}
        self.setup_parser(run, common, {name: self.parser_kwargs[name] for name in names if name in self.parser_kwargs})
        self.parse_arguments(self.parser, args)
        self.subcommand: str | None = self.config["subcommand"] if run else None
        self._read_checkpoint()
        self._seed()
        self.load_from_checkpoint_support = load_from_checkpoint_support
        self.before_instantiate_classes()
        self.instantiate_classes()
        self.after_instantiate_classes()
        if self.subcommand is not None:
            self._run(self.subcommand)

    # -- the parser ---------------------------------------------------------------------------------------------

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Return a parser with the option `--config`.

        Args:
            **kwargs: arguments of the parser.
        """
        parser = self.parser_class(**{"dump_header": [f"fabricx=={__version__}"], **kwargs})
        parser.add_argument("-c", "--config", action=ActionConfigFile, help="path of a YAML or JSON file with options")
        return parser

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """Create `self.parser`.

        Args:
            add_subcommands: with a parser for each subcommand.
            main_kwargs: arguments of the parser.
            subparser_kwargs: arguments of the parser of each subcommand.
        """
        self.parser = self.init_parser(**main_kwargs)
        if not add_subcommands:
            self._add_options(self.parser)
            return
        trainer = (
            self.trainer_class if isinstance(self.trainer_class, type) else class_from_function(self.trainer_class)
        )
        commands = self.parser.add_subcommands()
        for name, skipped in self.subcommands().items():
            about = (getattr(trainer, name).__doc__ or "").strip().partition("\n")[0]
            parser = self.init_parser(**{"description": about, **subparser_kwargs.get(name, {})})
            self._add_options(parser)
            self._method_options[name] = parser.add_method_arguments(trainer, name, skip={"module", *skipped})
            self._subcommand_parsers[name] = parser
            commands.add_subcommand(name, parser, help=about)

    def _add_options(self, parser: LightningArgumentParser) -> None:
        self.add_default_arguments_to_parser(parser)
        self.add_core_arguments_to_parser(parser)
        self.add_arguments_to_parser(parser)
        if self.auto_configure_optimizers and not parser.optimizer_groups:
            parser.add_optimizer_args((Optimizer,))
        if self.auto_configure_optimizers and not parser.lr_scheduler_groups:
            parser.add_lr_scheduler_args(LRSchedulerTypeTuple)
        self.link_optimizers_and_lr_schedulers(parser)

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the option `--seed_everything`.

        Args:
            parser: receives the option.
        """
        parser.add_argument(
            "--seed_everything", type=bool | int, default=self.seed_everything_default,
            help="seed, set before the objects are created; true: that of PL_GLOBAL_SEED, else 0; false: none",
        )  # fmt: skip

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options of the trainer, the module and the data module.

        Args:
            parser: receives the options.
        """
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        defaults = {f"trainer.{name}": value for name, value in self.trainer_defaults.items() if name != "callbacks"}
        parser.set_defaults(defaults)
        parser.add_lightning_class_args(self.model_class or Module, "model", subclass_mode=self.subclass_mode_model)
        parser.add_lightning_class_args(
            self.datamodule_class or DataModule, "data", subclass_mode=self.subclass_mode_data,
            required=self.datamodule_class is not None,  # modules may have the loaders
        )  # fmt: skip

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Override to add options, or to link them.

        Args:
            parser: receives the options.
        """

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the methods of the trainer that are subcommands, and arguments of these that are no options."""
        evaluation = {"model", "dataloaders", "datamodule"}
        fit = {"model", "train_dataloaders", "val_dataloaders", "datamodule"}
        return {"fit": fit, "validate": evaluation, "test": evaluation, "predict": evaluation}

    @staticmethod
    def link_optimizers_and_lr_schedulers(parser: LightningArgumentParser) -> None:
        """Pass optimizers and schedules with a target to it.

        Args:
            parser: has all options.
        """
        parser.link_groups()

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Set `self.config`.

        Args:
            parser: has all options.
            args: see `LightningCLI`.
        """
        if args is not None and len(sys.argv) > 1:
            warnings.warn(
                f"LightningCLI(args={args}) ignores the command line of this process, {sys.argv[1:]}: pass one of them",
                stacklevel=3,
            )
        if isinstance(args, (dict, Namespace)):
            self.config = parser.parse_object(args)
        else:
            self.config = parser.parse_args(args)

    def _read_checkpoint(self) -> None:
        """Set options of the module from the hyperparameters of a checkpoint that the subcommand reads."""
        if self.subcommand is None:
            return
        options = self.config[self.subcommand]
        path = options.get("ckpt_path")
        if not path or not Path(path).exists():
            return
        base, trusted = class_of(self.model_class or Module), options.get("weights_only") is False
        hparams = hparams_of(path, base, options.get("model"), trusted=trusted)
        if not hparams:
            return
        try:
            self.config = self.parser.parse_object({self.subcommand: {"model": hparams}}, self.config)
        except SystemExit:
            sys.stderr.write(
                f"Parsing of ckpt_path hyperparameters failed: {base.__name__} does not accept {hparams}\n"
            )
            raise

    # -- the objects --------------------------------------------------------------------------------------------

    def _seed(self) -> None:
        seed = self._get(self.config, "seed_everything")
        if seed is not False:
            options = self.config[self.subcommand] if self.subcommand else self.config
            options["seed_everything"] = seed_everything(None if seed is True else seed, workers=True)

    def _instantiators(self) -> list[tuple[Instantiator, Any, bool]]:
        """Return the functions that create the module and the data module, with their classes."""
        if not self.load_from_checkpoint_support:
            return []
        model, data = class_of(self.model_class or Module), class_of(self.datamodule_class or DataModule)
        return [
            (Instantiator(self._values, "model"), model, self.subclass_mode_model),
            (Instantiator(self._values, "data"), data, self.subclass_mode_data),
        ]

    def _values(self) -> Mapping[str, Any]:
        """Return the configuration as plain data, with values that are linked to others."""
        text = self.parser.dump(self.config, skip_link_targets=False, skip_unset=False, format="yaml")
        values: Mapping[str, Any] = yaml.safe_load(text)
        return values[self.subcommand] if self.subcommand else values

    def before_instantiate_classes(self) -> None:
        """Override to run code before the objects are created."""

    def instantiate_classes(self) -> None:
        """Create the data module, the module and the trainer."""
        self.config_init = self.parser.instantiate(self.config, instantiators=self._instantiators())
        self.datamodule = self._get(self.config_init, "data")
        self.model = self._get(self.config_init, "model")
        if self.auto_configure_optimizers:
            self._set_configure_optimizers()
        self.trainer = self.instantiate_trainer()

    def after_instantiate_classes(self) -> None:
        """Override to run code after the objects are created."""

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Return a new trainer.

        Args:
            **kwargs: arguments in place of those of the configuration.
        """
        parser = self._parser()
        arguments = {**(self._get(self.config_init, "trainer") or {}), **kwargs}
        added = [self._get(self.config_init, key) for key in parser.callback_keys]
        if "callbacks" not in arguments:
            name = getattr(self.trainer_class, "__qualname__", self.trainer_class)
            warnings.warn(f"{name} has no argument callbacks, so no callback is added", stacklevel=2)
            return self.trainer_class(**arguments)
        fixed = [_callback(value) for value in _listed(self.trainer_defaults.get("callbacks"))]
        callbacks = [*_listed(arguments["callbacks"]), *added, *fixed]
        if self.save_config_callback is not None and not arguments.get("fast_dev_run"):
            config = self.config[self.subcommand] if self.subcommand else self.config
            callbacks.append(self.save_config_callback(parser, config, **self.save_config_kwargs))
        return self.trainer_class(**{**arguments, "callbacks": callbacks})

    @staticmethod
    def configure_optimizers(lightning_module: Any, optimizer: Optimizer, lr_scheduler: Any = None) -> Any:
        """Return the result of the module's `configure_optimizers`; override to change it.

        Args:
            lightning_module: the module.
            optimizer: the optimizer of the configuration.
            lr_scheduler: the schedule of the configuration; None without one.
        """
        if lr_scheduler is None:
            return optimizer
        if isinstance(lr_scheduler, ReduceLROnPlateau):
            schedule = {"scheduler": lr_scheduler, "monitor": lr_scheduler.monitor}
            return {"optimizer": optimizer, "lr_scheduler": schedule}
        return [optimizer], [lr_scheduler]

    def _set_configure_optimizers(self) -> None:
        """Let the module create the optimizer and the schedule of the configuration, if the user has set one.

        Raises:
            ValueError: several optimizers or schedules are automatic.
        """
        parser = self._parser()
        optimizers, schedules = (
            {key: group for key, group in groups.items() if group.target == AUTOMATIC}
            for groups in (parser.optimizer_groups, parser.lr_scheduler_groups)
        )
        if not optimizers:
            return
        if len(optimizers) > 1 or len(schedules) > 1:
            raise ValueError(
                f"LightningCLI creates at most one optimizer and one schedule, got {[*optimizers, *schedules]}: pass "
                "link_to='model.init_args...' to add_optimizer_args and add_lr_scheduler_args, and create the objects "
                "in configure_optimizers of the module"
            )
        optimizer = self._group_values(optimizers)
        if not optimizer:
            return
        if is_overridden("configure_optimizers", self.model):
            warnings.warn(
                f"`{type(self.model).__name__}.configure_optimizers` will be overridden by "
                f"`{type(self).__name__}.configure_optimizers`.",
                stacklevel=2,
            )
        self.model.configure_optimizers = ConfiguredOptimizers(
            self.model, self.configure_optimizers, optimizer, self._group_values(schedules)
        )

    def _group_values(self, groups: Mapping[str, Group]) -> dict[str, Any]:
        for key, group in groups.items():
            return dict(group.with_class(self._get(self.config_init, key)) or {})
        return {}

    def _parser(self) -> LightningArgumentParser:
        return self.parser if self.subcommand is None else self._subcommand_parsers[self.subcommand]

    def _get(self, config: Any, key: str) -> Any:
        """Return the value of an option, which may be in the part of a subcommand."""
        return (config[self.subcommand] if self.subcommand else config).get(key)

    def _run(self, subcommand: str) -> None:
        """Call the trainer's method, or a method of this class with the same name, and the hooks around it."""
        options = self.config_init[subcommand]
        arguments = {name: options[name] for name in self._method_options[subcommand] if name in options}
        arguments["model"] = self.model
        if self.datamodule is not None:
            arguments["datamodule"] = self.datamodule
        nothing: Callable[[], None] = lambda: None  # noqa: E731
        getattr(self, f"before_{subcommand}", nothing)()
        method = getattr(self, subcommand, None) or getattr(self.trainer, subcommand)
        method(**arguments)
        getattr(self, f"after_{subcommand}", nothing)()


def _callback(value: Any) -> Any:
    """Return a callback, which a dict with the key "class_path" can stand for."""
    if not isinstance(value, Mapping):
        return value
    parser = LightningArgumentParser()
    parser.add_subclass_arguments(Callback, "callback")
    return parser.instantiate(parser.parse_object({"callback": dict(value)})).callback


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
