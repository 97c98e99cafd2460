"""Arguments of Lightning's Trainer without an equal in fabricx: their successors; the arguments of `barebones`."""

from __future__ import annotations

import ast
import functools
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

from fabricx.core.checkpoint_io import reader_among
from fabricx.errors import PossibleUserWarning, did_you_mean

# Arguments of the Trainer in Lightning 1, with their successors.
FORMER_ARGUMENTS: Final[Mapping[str, str]] = {
    "gpus": 'set accelerator="gpu" and devices=...',
    "tpu_cores": "fabricx runs on CPUs, CUDA and MPS; set accelerator and devices",
    "ipus": "fabricx runs on CPUs, CUDA and MPS; set accelerator and devices",
    "hpus": "fabricx runs on CPUs, CUDA and MPS; set accelerator and devices",
    "num_processes": 'set accelerator="cpu" and devices=...',
    "auto_select_gpus": "devices=... takes the first devices; CUDA_VISIBLE_DEVICES selects others",
    "distributed_backend": "set strategy=...",
    "use_ddp": 'set strategy="ddp"',
    "nb_gpus": 'set accelerator="gpu" and devices=...',
    "nb_gpu_nodes": "set num_nodes=...",
    "replace_sampler_ddp": "set use_distributed_sampler=...",
    "amp_backend": 'set precision="16-mixed" or "bf16-mixed"',
    "amp_level": 'set precision="16-mixed" or "bf16-mixed"',
    "use_amp": 'set precision="16-mixed" or "bf16-mixed"',
    "resume_from_checkpoint": "pass the path to the call: trainer.fit(module, ckpt_path=...)",
    "checkpoint_callback": "pass enable_checkpointing=True or False, and the callback in callbacks=[...]",
    "early_stop_callback": "pass EarlyStopping(...) in callbacks=[...]",
    "weights_save_path": "set default_root_dir=..., or ModelCheckpoint(dirpath=...)",
    "default_save_path": "set default_root_dir=...",
    "progress_bar_refresh_rate": "set enable_progress_bar=False, or pass ProgressBar(refresh_rate=...) in callbacks",
    "show_progress_bar": "set enable_progress_bar=...",
    "process_position": "remove it; ProgressBar has no position",
    "weights_summary": "set enable_model_summary=False, or pass ModelSummary(max_depth=...) in callbacks=[...]",
    "stochastic_weight_avg": "pass StochasticWeightAveraging(...) in callbacks=[...]",
    "prepare_data_per_node": "set the attribute prepare_data_per_node of the data module or the module",
    "flush_logs_every_n_steps": "set it on the logger; CSVLogger writes each row at once",
    "row_log_interval": "set log_every_n_steps=...",
    "log_save_interval": "set log_every_n_steps=...",
    "log_gpu_memory": "each run records memory by rank; `fabricx report` shows it",
    "track_grad_norm": "log fabricx.pytorch.utilities.grad_norm(self, 2) in on_before_optimizer_step",
    "terminate_on_nan": "set detect_anomaly=True, or pass EarlyStopping(check_finite=True, ...) in callbacks=[...]",
    "truncated_bptt_steps": "loop over the parts of a sequence in training_step, with automatic_optimization = False",
    "auto_lr_find": "call fabricx.Tuner(trainer).lr_find(module)",
    "auto_scale_batch_size": "call fabricx.Tuner(trainer).scale_batch_size(module)",
    "reload_dataloaders_every_epoch": "set reload_dataloaders_every_n_epochs=1",
    "multiple_trainloader_mode": 'pass CombinedLoader(loaders, mode="max_size_cycle") to fit',
    "move_metrics_to_cpu": "remove it; metrics stay on the device until they are read",
    "epochs": "set max_epochs=...",
    "num_epochs": "set max_epochs=...",
    "n_epochs": "set max_epochs=...",
    "batch_size": "set it in the DataLoader",
    "overfit_pct": "set overfit_batches=...",
    "train_percent_check": "set limit_train_batches=...",
    "val_percent_check": "set limit_val_batches=...",
    "test_percent_check": "set limit_test_batches=...",
    "nb_sanity_val_steps": "set num_sanity_val_steps=...",
    "max_nb_epochs": "set max_epochs=...",
    "min_nb_epochs": "set min_epochs=...",
    "gradient_clip": "set gradient_clip_val=...",
    "profile": 'set profiler="simple"',
    "automatic_optimization": "set the attribute automatic_optimization of the module",
    "suggest_integrations": "remove it; fabricx suggests no services",
    "model_registry": "load the file of the model, and pass its path: trainer.fit(module, ckpt_path=...)",
}

_PLUGINS: Final = (
    "precision plugins are Trainer(precision=...), clusters (torchrun, MPI, SLURM) are detected, sync_batchnorm=True "
    "synchronises layers, and a TorchCheckpointIO may override load_checkpoint only"
)
_NONE_HAS_A_MEANING: Final = ("check_val_every_n_epoch",)  # other arguments that are None have their default

_LOG: Final = logging.getLogger(__name__)
_BATCHES: Final = ("1 batch of each loader is used", "100% of the batches of each loader are used")
_ONE: Final[Mapping[str, tuple[str, str]]] = {  # meanings of 1 and of 1.0
    "limit_train_batches": _BATCHES,
    "limit_val_batches": _BATCHES,
    "limit_test_batches": _BATCHES,
    "limit_predict_batches": _BATCHES,
    "overfit_batches": _BATCHES,
    "val_check_interval": (
        "validation will run after each training batch", "validation will run at the end of each training epoch",
    ),
}  # fmt: skip

_PREFIX: Final = "PL_TRAINER_"  # of environment variables, as in Lightning

# The values of `barebones`; any different value of these arguments is an error.
_BARE: Final[Mapping[str, Any]] = {
    "enable_checkpointing": False, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "log_every_n_steps": 0, "num_sanity_val_steps": 0, "fast_dev_run": False, "detect_anomaly": False, "profiler": None,
    "enable_fault_recovery": False, "enable_telemetry": False,
}  # fmt: skip


def lightnings(init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor of the Trainer that accepts the argument values of Lightning.

    None is the default of each argument, `barebones` sets all arguments that cost time, and arguments without an
    equivalent may be None or empty. Environment variables such as PL_TRAINER_MAX_STEPS set arguments that the caller
    does not pass.

    Args:
        init: the constructor.

    Raises:
        ValueError: by the returned constructor: an argument has no equivalent.
    """

    @functools.wraps(init)
    def with_defaults(self: Any, **arguments: Any) -> None:
        self.checkpoint_io, others = reader_among(arguments.pop("plugins", None))
        if others:
            raise ValueError(f"Trainer(plugins={others!r}): {_PLUGINS}")
        arguments = from_environment(init) | arguments
        arguments = {
            name: value for name, value in arguments.items() if value is not None or name in _NONE_HAS_A_MEANING
        }
        explain_one(arguments)
        if arguments.get("barebones"):
            arguments |= barebones(arguments)
        init(self, **arguments)

    return with_defaults


def explain_one(arguments: Mapping[str, Any]) -> None:
    """Log, at level INFO, what the values 1 and 1.0 of an argument mean: a number of batches, and a fraction.

    Args:
        arguments: that the caller has passed, by name.
    """
    for name, (number, fraction) in _ONE.items():
        value = arguments.get(name)
        if value == 1 and not isinstance(value, bool):
            meaning = number if isinstance(value, int) else fraction
            _LOG.info("`Trainer(%s=%s)` was configured so %s", name, value, meaning)


def from_environment(init: Callable[..., None]) -> dict[str, Any]:
    """Return the arguments of a Trainer that environment variables set, with a warning for each.

    Args:
        init: the constructor.
    """
    arguments: dict[str, Any] = {}
    names = {f"{_PREFIX}{name.upper()}": name for name in inspect.signature(init).parameters if name != "self"}
    for variable in sorted(variable for variable in os.environ if variable.startswith(_PREFIX)):
        text = os.environ[variable]
        if variable not in names:
            hint = did_you_mean(variable.removeprefix(_PREFIX).lower(), set(names.values()))
            said = f"{variable}={text} sets no argument of the Trainer.{hint}"
        else:
            try:
                arguments[names[variable]] = ast.literal_eval(text)
            except (ValueError, SyntaxError):
                arguments[names[variable]] = text
            said = f"the environment variable {variable} sets {names[variable]}={text}, unless the Trainer gets another"
        warnings.warn(said, PossibleUserWarning, stacklevel=3)
    return arguments


def barebones(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a Trainer without costly features, for measurements of the training alone.

    Args:
        arguments: of the caller.

    Raises:
        ValueError: an argument contradicts it.
    """
    for name, value in _BARE.items():
        if name in arguments and arguments[name] != value:
            raise ValueError(
                f"Trainer(barebones=True, {name}={arguments[name]!r}): barebones turns off all features that cost "
                f"time, so {name} has to be {value!r}; remove one of the two"
            )
    return dict(_BARE)


_DDP: Final = 'set strategy="ddp"'
_FSDP: Final = 'set strategy="fsdp", which shards weights, gradients and optimizer state'
_ELSEWHERE: Final = "fabricx runs on CPUs, CUDA and MPS"
# Prefixes of strategy names of Lightning, with their successors.
_FORMER_STRATEGIES: Final[Mapping[str, str]] = {
    "ddp_sharded": _FSDP, "ddp_fully_sharded": _FSDP, "fsdp_native": _FSDP, "deepspeed": _FSDP, "colossalai": _FSDP,
    "fairscale": _FSDP, "ddp2": _DDP, "ddp_cpu": 'set strategy="ddp" and accelerator="cpu"', "ddp": _DDP, "dp": _DDP,
    "horovod": _DDP, "bagua": _DDP, "hivemind": 'set strategy="async_sgd" or "local_sgd"',
    "model_parallel": 'set strategy="fsdp"', "tpu": _ELSEWHERE,
    "xla": _ELSEWHERE, "single_xla": _ELSEWHERE, "hpu": _ELSEWHERE, "ipu": _ELSEWHERE, "single_tpu": _ELSEWHERE,
    "fsdp": _FSDP,
}  # fmt: skip


def former_strategy(name: str) -> str | None:
    """Return the successor of a strategy of Lightning; None for unknown names.

    Args:
        name: of the strategy.
    """
    start = next((start for start in _FORMER_STRATEGIES if name == start or name.startswith(f"{start}_")), None)
    return None if start is None else _FORMER_STRATEGIES[start]


_ACCELERATORS: Final = {"CPUAccelerator": "cpu", "CUDAAccelerator": "cuda", "MPSAccelerator": "mps"}


def accelerator_name(accelerator: Any, known: tuple[str, ...]) -> str:
    """Return the name of an accelerator.

    Args:
        accelerator: its name, or an accelerator of Lightning.
        known: valid names.

    Raises:
        ValueError: the name is unknown.
    """
    name = _ACCELERATORS.get(type(accelerator).__name__, accelerator)
    if name not in known:
        remedy = f" {_ELSEWHERE}" if name in ("tpu", "hpu", "ipu", "xla") else did_you_mean(str(name), known)
        raise ValueError(f"accelerator={accelerator!r} is unknown.{remedy}\n  known: {', '.join(known)}")
    return str(name)


_PROFILERS: Final = {"SimpleProfiler": "simple", "PassThroughProfiler": None}
_FORMER_PROFILERS: Final = {
    "advanced": 'profiler="trace" writes a timeline of all ranks, profiler="simple" prints a table; cProfile of a '
    "single process is: python -m cProfile script.py",
    "pytorch": 'profiler="trace" writes a timeline of all ranks, and Tracing(operators=(10, 12)) in callbacks=[...] '
    "adds torch's operators of these steps",
    "xla": _ELSEWHERE,
}


def profiler_name(profiler: Any, known: tuple[str, ...]) -> str | None:
    """Return the name of a profiler, or None.

    Args:
        profiler: its name, or a profiler of Lightning.
        known: valid names.

    Raises:
        ValueError: the name is unknown.
    """
    kind = type(profiler).__name__
    name: str | None = _PROFILERS.get(kind, profiler)
    if name is None or name in known:
        return name
    word = kind.removesuffix("Profiler").lower() if kind.endswith("Profiler") else str(name)
    remedy = _FORMER_PROFILERS.get(word, f"set 'simple', 'trace', or None.{did_you_mean(word, known)}")
    raise ValueError(f"profiler={profiler!r}: {remedy}")
