"""The module paths and names of `lightning.pytorch`: the object of fabricx for each, or its successor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True)
class Names:
    """Names of a module of Lightning.

    Attributes:
        source: package of fabricx with the names that are equal; "" for none.
        names: other names, as "module:attribute".
        absent: names that fabricx does not have, and what replaces them.
        paths: modules below, with the same names, such as `callbacks.early_stopping`; separated by spaces.
    """

    source: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    paths: str = ""


def _each(names: str, successor: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), successor)


_CORE: Final = "fabricx.core"
_FUNCTIONS: Final = "fabricx.lightning.functions"
_FABRIC: Final = "fabricx.lightning.fabric_functions"
_PARSING: Final = "fabricx.lightning.parsing"
_TYPES: Final = "fabricx.lightning.types"
_CLI: Final = "fabricx.cli.lightning"
_RANK_ZERO: Final = "lightning_utilities.core.rank_zero"
_PRECISION: Final = "set Trainer(precision=...)"
_CLUSTER: Final = "torchrun, MPI, SLURM and SageMaker are detected; remove it"
_CHECKPOINTS: Final = "ModelCheckpoint(dirpath='s3://...') writes to storages of fsspec and your own: docs/extending.md"
_MACHINERY: Final = "fabricx has its own loops; hooks of modules and callbacks are the public interface"
_DEMO: Final = "fabricx.demo has other modules; define the module in your program"

_RANK_NAMES: Final = {
    **{
        name: f"{_RANK_ZERO}:{name}"
        for name in ("rank_zero_debug", "rank_zero_deprecation", "rank_zero_info", "rank_zero_only", "rank_zero_warn")
    },
    "LightningDeprecationWarning": f"{_RANK_ZERO}:rank_zero_deprecation_category",
    "WarningCache": f"{_RANK_ZERO}:WarningCache",
    "rank_prefixed_message": f"{_RANK_ZERO}:rank_prefixed_message",
}
_TYPE_NAMES: Final = {
    name: f"{_TYPES}:{name}"
    for name in (
        "EVAL_DATALOADERS",
        "LRSchedulerConfigType",
        "LRSchedulerPLType",
        "LRSchedulerType",
        "LRSchedulerTypeTuple",
        "LRSchedulerTypeUnion",
        "OptimizerConfig",
        "OptimizerLRScheduler",
        "OptimizerLRSchedulerConfig",
        "STEP_OUTPUT",
        "TRAIN_DATALOADERS",
        "_EVALUATE_OUTPUT",
        "_METRIC",
        "_PREDICT_OUTPUT",
    )
} | {"LRSchedulerConfig": f"{_CORE}.optimizers:Schedule"}
_UTILITIES: Final = {
    **_RANK_NAMES,
    "AttributeDict": f"{_CORE}.hparams:AttributeDict",
    "LightningEnum": "lightning_utilities.core.enums:StrEnum",
    "is_picklable": f"{_PARSING}:is_picklable",
    "CombinedLoader": "fabricx.data.combined:CombinedLoader",
    "grad_norm": f"{_FUNCTIONS}:grad_norm",
    "move_data_to_device": f"{_CORE}.tensors.transfer:to_device",
}
_LOGGED: Final = {
    f"_{name}": f"{_FABRIC}:{name}"
    for name in ("add_prefix", "convert_params", "flatten_dict", "sanitize_callable_params", "sanitize_params")
}
_CORE_NAMES: Final = {
    "LightningModule": f"{_CORE}.module:LightningModule",
    "LightningDataModule": f"{_CORE}.datamodule:DataModule",
}
_IMPORTS: Final = (
    "RequirementCache compare_version module_available package_available _OMEGACONF_AVAILABLE "
    "_RICH_AVAILABLE _TORCHVISION_AVAILABLE _TORCHMETRICS_GREATER_EQUAL_0_8_0 "
    "_TORCHMETRICS_GREATER_EQUAL_0_9_1 _TORCHMETRICS_GREATER_EQUAL_0_11 _TORCHMETRICS_GREATER_EQUAL_1_0_0"
)
_ARGPARSE: Final = "add the arguments to your parser, and pass them: Trainer(max_epochs=args.max_epochs, ...)"
_SHARDED: Final = 'set strategy="fsdp"'

# Absent names that Lightning 2 does not have either.
FORMER: Final = frozenset(
    _each(
        "Accuracy DDPFullyShardedNativeStrategy DDPPlugin DDPShardedStrategy DDPSpawnStrategy DataParallelStrategy "
        "DeviceDtypeModuleMixin F1 FitLoop GPUStatsMonitor IoU LightningLite LoggerCollection Loop MeanSquaredError "
        "Metric MetricCollection ProgressBarBase QuantizationAwareTraining TestTubeLogger XLAStatsMonitor "
        "add_argparse_args atomic_save from_argparse_args gather_all_tensors get_init_arguments_and_types load "
        "parse_argparser parse_env_variables",
        "",
    )
)

TREE: Final[Mapping[str, Names]] = {
    "": Names(
        names={
            **_CORE_NAMES,
            "Trainer": "fabricx:Trainer",
            "Callback": "fabricx:Callback",
            "cli_lightning_logo": f"{_FUNCTIONS}:cli_lightning_logo",
            "seed_everything": "fabricx:seed_everything",
        },
        absent={"LightningLite": "use fabricx.Trainer", "Fabric": "use fabricx.Trainer"},
    ),
    "callbacks": Names(
        "fabricx.callbacks",
        {
            "Callback": "fabricx:Callback",
            "Checkpoint": "fabricx.callbacks.model_checkpoint:Checkpoint",
            "EarlyStoppingReason": "fabricx.callbacks.early_stopping:EarlyStoppingReason",
            "RichProgressBarTheme": "fabricx.callbacks.progress_bar:RichProgressBarTheme",
            "WriteInterval": "fabricx.callbacks.prediction_writer:WriteInterval",
        },
        {
            "GPUStatsMonitor": "DeviceStatsMonitor",
            "XLAStatsMonitor": "DeviceStatsMonitor",
            "ProgressBarBase": "ProgressBar",
            "ModelPruning": "call torch.nn.utils.prune in a callback of your own",
            "QuantizationAwareTraining": "torch.ao.quantization, in configure_model",
        },
        paths=(
            "base batch_size_finder callback checkpoint device_stats_monitor early_stopping finetuning "
            "gradient_accumulation_scheduler lambda_function lr_finder lr_monitor model_checkpoint "
            "model_summary on_exception_checkpoint prediction_writer progress progress.base "
            "progress.progress_bar pruning "
            "rich_model_summary spike stochastic_weight_avg throughput_monitor timer weight_averaging"
        ),
    ),
    "callbacks.progress.rich_progress": Names(
        "fabricx.callbacks",
        {"RichProgressBarTheme": "fabricx.callbacks.progress_bar:RichProgressBarTheme"},
        absent=_each(
            "BatchesProcessedColumn CustomBarColumn CustomInfiniteTask CustomProgress CustomTimeColumn "
            "MetricsTextColumn ProcessingSpeedColumn",
            "override get_metrics of RichProgressBar, which draws by itself",
        ),
    ),
    "callbacks.progress.tqdm_progress": Names("fabricx.callbacks", {"Tqdm": "fabricx.lightning.tqdm_bar:Tqdm"}),
    "loggers": Names(
        "fabricx.loggers",
        {
            "CSVLogger": "fabricx.loggers.lightning_logs:CSVLogger",
            "DummyLogger": f"{_CORE}.logger:DummyLogger",
            "TensorBoardLogger": "fabricx.loggers.lightning_logs:TensorBoardLogger",
            "Logger": "fabricx.lightning.loggers:LightningLogger",
            "LightningLoggerBase": "fabricx.lightning.loggers:LightningLogger",
            "DummyExperiment": f"{_CORE}.logger:Silent",
            "rank_zero_experiment": "fabricx.lightning.loggers:rank_zero_experiment",
        },
        {
            **_each("CometLogger MLFlowLogger NeptuneLogger WandbLogger", "pass an object of Lightning's logger"),
            "LitLogger": "TensorBoardLogger, or a logger of your own",
            "LoggerCollection": "trainer.loggers is the list of loggers",
            "TestTubeLogger": "TensorBoardLogger or CSVLogger",
        },
        paths="base comet csv_logs litlogger logger mlflow neptune tensorboard utilities wandb",
    ),
    "utilities": Names(
        names={
            **_UTILITIES,
            "apply_to_collection": "lightning_utilities.core.apply_func:apply_to_collection",
            "disable_possible_user_warnings": f"{_FUNCTIONS}:disable_possible_user_warnings",
        },
        absent={
            "find_shared_parameters": "a tied weight has all its names in checkpoints",
            "measure_flops": "torch.utils.flop_counter",
            "GradClipAlgorithmType": 'the words "norm" and "value"',
            "is_shared_filesystem": "nothing",
            "set_shared_parameters": "assign the weight",
            "suggested_max_num_workers": "os.cpu_count()",
        },
        paths="apply_func",
    ),
    "utilities.rank_zero": Names(names=_RANK_NAMES),
    "utilities.distributed": Names(names=_RANK_NAMES, absent={"gather_all_tensors": "self.all_gather, in the module"}),
    "utilities.types": Names(names=_TYPE_NAMES),
    "utilities.seed": Names(
        names={
            "isolate_rng": f"{_FUNCTIONS}:isolate_rng",
            "reset_seed": f"{_CORE}.module_state.rng:reset_seed",
            "seed_everything": "fabricx:seed_everything",
        },
    ),
    "utilities.model_summary": Names(
        names={
            "ModelSummary": f"{_FUNCTIONS}:summary",
            "summarize": f"{_FUNCTIONS}:summary",
            "get_human_readable_count": f"{_FUNCTIONS}:get_human_readable_count",
        },
        absent={
            "DeepSpeedSummary": "ModelSummary",
            "LayerSummary": "summarize(module).rows",
            "get_formatted_model_size": "summarize(module)",
            "parse_batch_shape": "summarize(module)",
        },
        paths="model_summary",
    ),
    "utilities.combined_loader": Names(names={"CombinedLoader": _UTILITIES["CombinedLoader"]}),
    "utilities.exceptions": Names(
        names={"MisconfigurationException": "builtins:ValueError", "SIGTERMException": "fabricx.errors:Terminated"}
    ),
    "utilities.grads": Names(names={"grad_norm": _UTILITIES["grad_norm"]}),
    "utilities.parsing": Names(
        names={
            "AttributeDict": _UTILITIES["AttributeDict"],
            **{
                name: f"{_PARSING}:{name}"
                for name in (
                    "clean_namespace",
                    "get_init_args",
                    "is_picklable",
                    "lightning_getattr",
                    "lightning_hasattr",
                    "lightning_setattr",
                    "parse_class_init_keys",
                )
            },
        },
        absent={
            "save_hyperparameters": "self.save_hyperparameters()",
            "collect_init_args": "self.save_hyperparameters()",
        },
    ),
    "utilities.memory": Names(
        names={
            name: f"{_FUNCTIONS}:{name}" for name in ("garbage_collection_cuda", "is_oom_error", "recursive_detach")
        },
        absent=_each("is_cuda_out_of_memory is_cudnn_snafu is_out_of_cpu_memory", "is_oom_error"),
    ),
    "utilities.model_helpers": Names(
        names={"is_overridden": f"{_FUNCTIONS}:is_overridden"},
        absent={"get_torchvision_model": "torchvision.models.get_model(name, weights=...)"},
    ),
    "utilities.data": Names(names={"extract_batch_size": f"{_CORE}.tensors.transfer:batch_size_of"}),
    "utilities.warnings": Names(names={"PossibleUserWarning": "fabricx.errors:PossibleUserWarning"}),
    "utilities.imports": Names(
        names={name: f"fabricx.lightning.imports:{name}" for name in _IMPORTS.split()},
    ),
    "utilities.enums": Names(
        names={"LightningEnum": _UTILITIES["LightningEnum"]},
        absent={"GradClipAlgorithmType": 'the words "norm" and "value"'},
    ),
    "utilities.signature_utils": Names(names={"is_param_in_hook_signature": f"{_PARSING}:is_param_in_hook_signature"}),
    "utilities.argparse": Names(
        absent=_each(
            "add_argparse_args from_argparse_args parse_argparser parse_env_variables get_init_arguments_and_types",
            _ARGPARSE,
        )
    ),
    "utilities.cloud_io": Names(
        names={"get_filesystem": f"{_FUNCTIONS}:get_filesystem"},
        absent={
            "atomic_save": "torch.save",
            "load": "torch.load, or fabricx.checkpoint.load for a checkpoint of fabricx",
        },
    ),
    "utilities.parameter_tying": Names(
        absent=_each("find_shared_parameters set_shared_parameters", "a tied weight has all its names in checkpoints")
    ),
    "utilities.cli": Names(names={"LightningCLI": f"{_CLI}.app:LightningCLI"}),
    "strategies": Names(
        names={
            **{
                name: f"fabricx.lightning.strategies:{name}"
                for name in ("DDPStrategy", "FSDPStrategy", "ParallelStrategy", "SingleDeviceStrategy")
            },
            "Strategy": "fabricx:Strategy",
            "StrategyRegistry": "fabricx.lightning.registries:StrategyRegistry",
        },
        absent={
            "DeepSpeedStrategy": _SHARDED,
            "ModelParallelStrategy": _SHARDED,
            "XLAStrategy": "fabricx has no TPUs",
            "SingleDeviceXLAStrategy": "fabricx has no TPUs",
            "DDPSpawnStrategy": 'set strategy="ddp"',
            "DDPShardedStrategy": _SHARDED,
            "DDPFullyShardedNativeStrategy": _SHARDED,
            "DataParallelStrategy": 'set strategy="ddp"',
        },
        paths="ddp deepspeed fsdp model_parallel parallel single_device strategy",
    ),
    "tuner": Names(names={"Tuner": "fabricx:Tuner"}, paths="tuning lr_finder batch_size_scaling"),
    "profilers": Names(
        names={name: f"{_FUNCTIONS}:{name}" for name in ("PassThroughProfiler", "SimpleProfiler")},
        absent={
            "AdvancedProfiler": 'set Trainer(profiler="simple") or "trace"',
            "Profiler": 'set Trainer(profiler="trace")',
            "PyTorchProfiler": 'set Trainer(profiler="trace"), and Tracing(operators=...) for torch\'s operators',
            "XLAProfiler": "fabricx has no TPUs",
        },
        paths="advanced base profiler pytorch simple",
    ),
    "metrics": Names(absent=_each("Accuracy F1 IoU MeanSquaredError Metric MetricCollection", "torchmetrics has it")),
    "plugins": Names(
        names=dict.fromkeys(("CheckpointIO", "TorchCheckpointIO"), f"{_CORE}.checkpoint_io:TorchCheckpointIO"),
        absent={
            **_each(
                "BitsandbytesPrecision DeepSpeedPrecision DoublePrecision FSDPPrecision HalfPrecision "
                "MixedPrecision MixedPrecisionPlugin Precision TransformerEnginePrecision XLAPrecision",
                _PRECISION,
            ),
            **_each(
                "ClusterEnvironment KubeflowEnvironment LSFEnvironment LightningEnvironment "
                "MPIEnvironment SLURMEnvironment TorchElasticEnvironment XLAEnvironment",
                _CLUSTER,
            ),
            **_each("AsyncCheckpointIO XLACheckpointIO", _CHECKPOINTS),
            **_each("LayerSync TorchSyncBatchNorm", "set Trainer(sync_batchnorm=True)"),
            "DDPPlugin": 'set Trainer(strategy="ddp")',
        },
        paths=(
            "environments io io.async_plugin io.checkpoint_plugin io.torch_plugin layer_sync precision precision.amp "
            "precision.double precision.fsdp precision.half precision.precision training_type"
        ),
    ),
    "accelerators": Names(
        names={
            name: f"{_FUNCTIONS}:{name}"
            for name in ("Accelerator", "CPUAccelerator", "CUDAAccelerator", "MPSAccelerator")
        }
        | {"AcceleratorRegistry": "fabricx.lightning.registries:AcceleratorRegistry"},
        absent={
            **_each("TPUAccelerator XLAAccelerator", "fabricx has no TPUs"),
            "find_usable_cuda_devices": "set Trainer(devices=2)",
        },
        paths="accelerator cpu cuda mps xla",
    ),
    "core": Names(
        names={
            **_CORE_NAMES,
            "LightningOptimizer": f"{_CORE}.optimizers:OptimizerHandle",
            "HyperparametersMixin": f"{_CORE}.hparams:HyperParameters",
            "ModelHooks": f"{_CORE}.module_hooks:ModuleHooks",
        },
        absent={
            "DataHooks": "LightningDataModule",
            "CheckpointHooks": "LightningModule",
            "DeviceDtypeModuleMixin": "LightningModule",
        },
        paths="datamodule hooks lightning mixins module optimizer mixins.hparams_mixin",
    ),
    "core.saving": Names(
        names={
            "get_filesystem": f"{_FUNCTIONS}:get_filesystem",
            "load_hparams_from_yaml": "fabricx.checkpoint.reader:load_hparams",
        },
        absent={
            "load_hparams_from_tags_csv": "csv.DictReader",
            "save_hparams_to_tags_csv": "csv.DictWriter",
            "save_hparams_to_yaml": "yaml.safe_dump",
            "update_hparams": "hparams.update(values)",
        },
    ),
    "trainer": Names(
        names={"Trainer": "fabricx:Trainer", "seed_everything": "fabricx:seed_everything"}, paths="trainer"
    ),
    "trainer.states": Names(
        names={
            **{name: f"{_CORE}.state:{name}" for name in ("RunningStage", "TrainerFn", "TrainerStatus")},
            "TrainerState": f"{_CORE}.state:RunState",
        },
    ),
    "trainer.supporters": Names(names={"CombinedLoader": _UTILITIES["CombinedLoader"]}),
    "cli": Names(
        names={
            **{
                name: f"fabricx.lightning.schedules:{name}"
                for name in (
                    "LRSchedulerCallable",
                    "LRSchedulerType",
                    "LRSchedulerTypeTuple",
                    "LRSchedulerTypeUnion",
                    "OptimizerCallable",
                    "ReduceLROnPlateau",
                )
            },
            "ArgsType": f"{_CLI}.app:ArgsType",
            "LightningArgumentParser": f"{_CLI}.parser:LightningArgumentParser",
            "LightningCLI": f"{_CLI}.app:LightningCLI",
            "SaveConfigCallback": f"{_CLI}.saving:SaveConfigCallback",
            "ModuleType": "fabricx.checkpoint.class_paths:T",
            "instantiate_class": f"{_CLI}.objects:instantiate_class",
            "instantiate_module": "fabricx.checkpoint.class_paths:instantiate_module",
        },
    ),
    "demos": Names(
        names={
            name: f"fabricx.demo.boring:{name}"
            for name in (
                "BoringDataModule",
                "BoringModel",
                "ManualOptimBoringModel",
                "RandomDataset",
                "RandomDictDataset",
                "RandomIterableDataset",
                "RandomIterableDatasetWithLen",
            )
        },
        absent=_each(
            "DemoModel LightningLSTM LightningTransformer SequenceSampler SimpleLSTM Transformer WikiText2 "
            "MNISTDataModule",
            _DEMO,
        ),
        paths="boring_classes lstm mnist_datamodule transformer",
    ),
    "loops": Names(
        absent=_each(
            "Loop FitLoop _Loop _FitLoop _TrainingEpochLoop _EvaluationLoop _PredictionLoop _DataFetcher", _MACHINERY
        ),
        paths="evaluation_loop fetchers fit_loop loop prediction_loop training_epoch_loop",
    ),
    "lite": Names(absent={"LightningLite": "use fabricx.Trainer"}),
    "utilities.logger": Names(names=_LOGGED),
    "fabric": Names(
        names={"seed_everything": "fabricx:seed_everything"},
        absent=_each("Fabric is_wrapped", "use fabricx.Trainer; a loop of your own is torch.distributed"),
        paths="fabric wrappers",
    ),
    "fabric.utilities": Names(
        names={
            **{name: path for name, path in _UTILITIES.items() if name not in ("CombinedLoader", "grad_norm")},
            "disable_possible_user_warnings": f"{_FUNCTIONS}:disable_possible_user_warnings",
            "suggested_max_num_workers": f"{_FABRIC}:suggested_max_num_workers",
        },
        absent={
            "is_shared_filesystem": "nothing",
            **_each("Throughput ThroughputMonitor", "the report shows samples per second"),
            "measure_flops": "torch.utils.flop_counter",
        },
    ),
    "fabric.utilities.apply_func": Names(
        names={
            "move_data_to_device": _UTILITIES["move_data_to_device"],
            "apply_to_collection": "lightning_utilities.core.apply_func:apply_to_collection",
            "convert_tensors_to_scalars": f"{_FABRIC}:convert_tensors_to_scalars",
        },
        absent={"convert_to_tensors": "torch.as_tensor"},
    ),
    "fabric.utilities.cloud_io": Names(
        names={"get_filesystem": f"{_FUNCTIONS}:get_filesystem", "_load": f"{_FABRIC}:load_file"},
        absent={"_atomic_save": "torch.save"},
    ),
    "fabric.utilities.data": Names(
        names={
            "AttributeDict": _UTILITIES["AttributeDict"],
            "sized_len": f"{_FABRIC}:sized_len",
            "suggested_max_num_workers": f"{_FABRIC}:suggested_max_num_workers",
        },
        absent=_each("has_iterable_dataset has_len", "len(loader)"),
    ),
    "fabric.utilities.distributed": Names(
        names={"_distributed_is_initialized": f"{_FABRIC}:is_initialized", "ReduceOp": "torch.distributed:ReduceOp"},
        absent={
            "is_shared_filesystem": "nothing",
            "_gather_all_tensors": "self.all_gather, in the module",
            "_sync_ddp_if_available": "trainer.strategy.reduce",
        },
    ),
    "fabric.utilities.enums": Names(names={"LightningEnum": _UTILITIES["LightningEnum"]}),
    "fabric.utilities.exceptions": Names(names={"MisconfigurationException": "builtins:ValueError"}),
    "fabric.utilities.imports": Names(
        names={name: f"fabricx.lightning.imports:{name}" for name in _IMPORTS.split()},
    ),
    "fabric.utilities.logger": Names(names=_LOGGED),
    "fabric.utilities.rank_zero": Names(names=_RANK_NAMES),
    "fabric.utilities.seed": Names(
        names={
            "isolate_rng": f"{_FUNCTIONS}:isolate_rng",
            "pl_worker_init_function": f"{_FABRIC}:worker_init_function",
            "reset_seed": f"{_CORE}.module_state.rng:reset_seed",
            "seed_everything": "fabricx:seed_everything",
        },
    ),
    "fabric.utilities.types": Names(
        names={
            name: f"{_TYPES}:{name}"
            for name in ("_DEVICE", "_MAP_LOCATION_TYPE", "_PARAMETERS", "_PATH", "Optimizable", "Steppable")
        }
        | {
            "LRScheduler": "torch.optim.lr_scheduler:LRScheduler",
            "ReduceLROnPlateau": "torch.optim.lr_scheduler:ReduceLROnPlateau",
        }
    ),
    "fabric.utilities.warnings": Names(
        names={
            "PossibleUserWarning": "fabricx.errors:PossibleUserWarning",
            "disable_possible_user_warnings": f"{_FUNCTIONS}:disable_possible_user_warnings",
        }
    ),
    "fabric.loggers": Names(
        names={
            "CSVLogger": "fabricx.loggers.lightning_logs:CSVLogger",
            "TensorBoardLogger": "fabricx.loggers.lightning_logs:TensorBoardLogger",
            "Logger": "fabricx.lightning.loggers:LightningLogger",
            "_DummyExperiment": f"{_CORE}.logger:Silent",
            "rank_zero_experiment": "fabricx.lightning.loggers:rank_zero_experiment",
        },
        paths="csv_logs logger tensorboard",
    ),
    "fabric.plugins": Names(
        names=dict.fromkeys(("CheckpointIO", "TorchCheckpointIO"), f"{_CORE}.checkpoint_io:TorchCheckpointIO"),
        absent=_each("ClusterEnvironment LightningEnvironment SLURMEnvironment TorchElasticEnvironment", _CLUSTER),
        paths="environments io io.checkpoint_io io.torch_io",
    ),
    "fabric.accelerators": Names(
        names={
            name: f"{_FUNCTIONS}:{name}"
            for name in ("Accelerator", "CPUAccelerator", "CUDAAccelerator", "MPSAccelerator")
        },
        absent={"find_usable_cuda_devices": "set Trainer(devices=2)"},
        paths="accelerator cpu cuda mps",
    ),
    "fabric.strategies": Names(
        absent=_each("DDPStrategy FSDPStrategy Strategy", "fabricx.pytorch.strategies has it"),
        paths="ddp fsdp strategy",
    ),
}


def names_of(path: str) -> Names | None:
    """Return the names of a module of Lightning; None for a module that fabricx does not have.

    Args:
        path: below `lightning.pytorch`, such as "callbacks.early_stopping".

    >>> names_of("callbacks.early_stopping") is TREE["callbacks"], names_of("nothing")
    (True, None)
    """
    if path in TREE:
        return TREE[path]
    for parent, names in TREE.items():
        if parent and path.startswith(f"{parent}.") and path.removeprefix(f"{parent}.") in names.paths.split():
            return names
    return None


def modules() -> list[str]:
    """Return the paths of all modules, without the root."""
    return sorted(
        {*TREE, *(f"{parent}.{path}" for parent, names in TREE.items() for path in names.paths.split())} - {""}
    )
