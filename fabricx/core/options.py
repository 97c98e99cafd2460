"""Options of the Trainer: their only definition, validated before any process starts. Does not import torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fabricx.core.duration import check_count, parse_duration
from fabricx.core.former_arguments import accelerator_name, lightnings, profiler_name

if TYPE_CHECKING:
    from fabricx.core.callback import Callback
    from fabricx.core.logger import FourMethods, Logger
    from fabricx.core.strategy import Strategy

_COUNTED: Final = re.compile(r"\s*\d[\d_]*\s*(st|ep|ba)?\s*")  # "500st"; other text is a duration
_SWITCHES: Final = (
    "inference_mode", "use_distributed_sampler", "detect_anomaly", "barebones", "sync_batchnorm", "benchmark",
    "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "enable_fault_recovery", "enable_telemetry",
    "enable_autolog_hparams",
)  # fmt: skip
ACCELERATORS: Final = ("auto", "cpu", "gpu", "cuda", "mps")


class ProfilerName(str):
    """The name of a profiler, with the methods that modules of Lightning call; these measure nothing.

    Times of a run are in its telemetry. The name is empty without a profiler.
    """

    def profile(self, action_name: str) -> AbstractContextManager[None]:
        """Return a context for an action.

        Args:
            action_name: of the action.
        """
        return nullcontext()

    def start(self, action_name: str) -> None:
        """Begin an action.

        Args:
            action_name: of the action.
        """

    def stop(self, action_name: str) -> None:
        """End an action.

        Args:
            action_name: of the action.
        """


class TrainerOptions:
    """Validated options of a run; the Trainer inherits them, and Hydra's schema is derived from the signature.

    Hooks may change options during a run, on all ranks in the same way: `trainer.max_steps = 100`.
    """

    @lightnings
    def __init__(
        self,
        *,
        accelerator: str = "auto",
        strategy: str | Strategy = "auto",
        devices: int | str | Sequence[int] = "auto",
        num_nodes: int = 1,
        precision: str | int = "32-true",
        max_epochs: int | str | None = None,
        min_epochs: int | str | None = None,
        max_steps: int | str = -1,
        min_steps: int | str | None = None,
        max_time: str | timedelta | Mapping[str, int] | None = None,
        limit_train_batches: int | float | None = 1.0,
        limit_val_batches: int | float | None = 1.0,
        limit_test_batches: int | float | None = 1.0,
        limit_predict_batches: int | float | None = 1.0,
        overfit_batches: int | float = 0,
        val_check_interval: int | float | str | timedelta | Mapping[str, int] | None = 1.0,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int = 2,
        log_every_n_steps: int = 50,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = "norm",
        deterministic: bool | str = False,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: Any = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        plugins: Any = None,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        fast_dev_run: bool | int = False,
        logger: bool | Logger | FourMethods | Sequence[Logger | FourMethods] | None = True,
        callbacks: Callback | str | Sequence[Callback | str] | None = None,
        enable_checkpointing: bool = True,
        enable_progress_bar: bool = True,
        enable_model_summary: bool = True,
        enable_fault_recovery: bool = True,
        enable_telemetry: bool = True,
        enable_autolog_hparams: bool = True,
        default_root_dir: str | Path | None = None,
        compile: bool | Mapping[str, Any] = False,
    ) -> None:
        """Validate all arguments; None is the default of an argument, if it has no other meaning.

        Args:
            accelerator: "auto", "cpu", "gpu", "cuda" or "mps".
            strategy: a name ("ddp"), a dotted path, or a `Strategy`; "auto" selects "single" for a single rank, and
                "ddp" for several ranks.
            devices: ranks on this machine: a number, "auto", -1 for all devices, or a list of device numbers. On a CPU,
                each rank is a process.
            num_nodes: number of machines; for more than 1, start the script on each machine with torchrun or SLURM.
            precision: "32-true", "64-true", "16-true", "bf16-true", "16-mixed" (CUDA) or "bf16-mixed".
            max_epochs: number of epochs; -1 for no limit. Training ends at the first limit of epochs, steps and time
                that is reached; if none is set, after 1000 epochs.
            min_epochs: a requested stop (early stopping, `trainer.should_stop`) is delayed until `min_epochs` and
                `min_steps` are reached; a signal is not delayed.
            max_steps: number of weight updates after which training ends; -1 for no limit.
            min_steps: number of weight updates before which no requested stop takes effect, as `min_epochs`.
            max_time: time limit of training: a timedelta, or text such as "2h30m".
            limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches: number of batches for
                each rank (int), or fraction of all batches (float).
            overfit_batches: train, and validate, on the first few batches of each loader, without shuffling: their
                number (int) or fraction (float).
            val_check_interval: interval between validations: a fraction of an epoch (float), a number of batches (int),
                a number of steps ("500st"), or a duration ("30m", "DD:HH:MM:SS", a timedelta).
            check_val_every_n_epoch: validate only in every n-th epoch; None counts the batches of `val_check_interval`
                across epochs.
            num_sanity_val_steps: validation batches before training, to detect errors early; -1 for all batches.
            log_every_n_steps: weight updates between two rows in the loggers.
            accumulate_grad_batches: batches of each rank for a weight update.
            gradient_clip_val: limit for clipping gradients; None disables clipping.
            gradient_clip_algorithm: "norm" (of all parameters together) or "value" (of each element).
            deterministic: use deterministic algorithms of torch; "warn" only warns where torch has none. "elastic"
                produces bitwise identical weights for any number of ranks, by the strategy "reproducible" instead of
                "ddp".
            benchmark: make cuDNN measure its algorithms and select the fastest; None does not change the setting of
                torch.
            inference_mode: evaluate under `torch.inference_mode` instead of `torch.no_grad`.
            use_distributed_sampler: split the data of a `DataLoader` over the ranks.
            profiler: "simple" prints a table of where the time was spent, "trace" writes `trace.json` for
                ui.perfetto.dev; the callbacks `Profiler` and `Tracing` do the same, with options. None disables both.
            detect_anomaly: enable the anomaly detection of autograd, which finds the operation that produced a NaN
                (slow).
            barebones: measure training without all that costs time: checkpoints, loggers, `self.log`, progress bar,
                summary, sanity check, telemetry and fault recovery are off.
            plugins: not used; for a plugin of Lightning, an error names the argument that replaces it.
            sync_batchnorm: compute the statistics of batch normalisation over the samples of all ranks; each rank then
                needs samples in each batch.
            reload_dataloaders_every_n_epochs: create the loaders again every n epochs; 0 for never.
            fast_dev_run: run 1 batch (True) or n batches (int) of each loader, without loggers and checkpoints, to find
                errors.
            logger: True for TensorBoard, False for no logger, a `Logger`, any object with the same four methods, or a
                list of them.
            callbacks: a `Callback`, a name, or a list of them.
            enable_checkpointing: add a `ModelCheckpoint` that keeps the newest checkpoint, unless `callbacks` has one.
            enable_progress_bar: add a `ProgressBar`, unless `callbacks` has one.
            enable_model_summary: print layers and parameters at the start (`ModelSummary`), unless `callbacks` has one.
            enable_fault_recovery: add the callback for recovery from failures, with several ranks on this machine. With
                enable_checkpointing=False it replaces lost workers in place or from memory, and writes no snapshots for
                restarts.
            enable_telemetry: record where each rank spends its time; nothing is recorded if neither a logger nor a
                callback for checkpoints writes to the run's folder.
            enable_autolog_hparams: pass hyperparameters to the loggers when training begins.
            default_root_dir: parent of the runs' folders; None for the current folder.
            compile: compile the module's forward with `torch.compile`; a mapping contains options for it.

        Raises:
            ValueError: an argument is invalid; the message lists the valid values.
            LookupError: no strategy or callback has this name.
        """
        given = {name: value for name, value in locals().items() if name != "self"}
        from fabricx.core.precision import check_precision  # imports torch

        check_switches(given)

        self.accelerator = check_accelerator(accelerator)
        self.device_ids = check_devices(devices, self.accelerator)
        self.devices_given = devices != "auto"
        self.num_nodes = check_count("num_nodes", num_nodes, "node", 1) or 1
        self.precision = check_precision(precision)
        self.max_epochs = -1 if max_epochs == -1 else check_count("max_epochs", max_epochs, "epoch")
        self.min_epochs = check_count("min_epochs", min_epochs, "epoch") or 0
        self.max_steps = -1 if max_steps in (-1, None) else check_count("max_steps", max_steps, "step") or 0
        self.min_steps = check_count("min_steps", min_steps, "step") or 0
        self.max_time = check_max_time(max_time)
        if self.max_epochs is None:
            self.max_epochs = -1 if self.max_steps != -1 or self.max_time else 1000
        self.limit_train_batches = check_limit("limit_train_batches", limit_train_batches)
        self.limit_val_batches = check_limit("limit_val_batches", limit_val_batches)
        self.limit_test_batches = check_limit("limit_test_batches", limit_test_batches)
        self.limit_predict_batches = check_limit("limit_predict_batches", limit_predict_batches)
        self.overfit_batches = overfit_batches
        if overfit_batches:
            self.limit_train_batches = self.limit_val_batches = check_limit("overfit_batches", overfit_batches)
        self.val_check_interval = check_validation_interval(val_check_interval)
        self.check_val_every_n_epoch = check_count("check_val_every_n_epoch", check_val_every_n_epoch, "epoch", 1)
        self.num_sanity_val_steps = check_batches("num_sanity_val_steps", num_sanity_val_steps, -1)
        self.log_every_n_steps = check_count("log_every_n_steps", log_every_n_steps, "step") or 0
        if isinstance(accumulate_grad_batches, Mapping):
            raise ValueError(
                f"accumulate_grad_batches={dict(accumulate_grad_batches)!r}: pass "
                f"GradientAccumulationScheduler({dict(accumulate_grad_batches)!r}) in callbacks=[...]"
            )
        self.accumulate_grad_batches = check_count("accumulate_grad_batches", accumulate_grad_batches, "batch", 1) or 1
        self.gradient_clip_val, self.gradient_clip_algorithm = check_clipping(
            gradient_clip_val, gradient_clip_algorithm
        )
        self.deterministic = check_deterministic(deterministic)
        self.benchmark = benchmark
        self.inference_mode = inference_mode
        self.use_distributed_sampler = use_distributed_sampler
        self.profiler = ProfilerName(check_profiler(profiler) or "")
        self.detect_anomaly = detect_anomaly
        self.barebones = barebones
        self.enable_autolog_hparams = enable_autolog_hparams
        self.sync_batchnorm = sync_batchnorm
        self.reload_dataloaders_every_n_epochs = (
            check_count("reload_dataloaders_every_n_epochs", reload_dataloaders_every_n_epochs, "epoch") or 0
        )
        self.compile = check_compile(compile)
        self.default_root_dir = check_root(default_root_dir)
        self.enable_checkpointing = enable_checkpointing and not fast_dev_run
        self.enable_telemetry = enable_telemetry and not fast_dev_run
        if not isinstance(fast_dev_run, bool):
            check_batches("fast_dev_run", fast_dev_run, 0)
        self.fast_dev_run = fast_dev_run
        if fast_dev_run:
            self._limit_to(int(fast_dev_run))
        self._create_plugins(given)

    def _create_plugins(self, given: Mapping[str, Any]) -> None:
        """Create the objects that the other arguments name; options on their own have none.

        Args:
            given: all arguments as the caller passed them, by name.
        """

    def _limit_to(self, batches: int) -> None:
        self.limit_train_batches = self.limit_val_batches = batches
        self.limit_test_batches = self.limit_predict_batches = batches
        self.max_epochs, self.max_steps, self.num_sanity_val_steps = 1, batches, 0
        self.val_check_interval, self.check_val_every_n_epoch = 1.0, 1


def check_switches(given: Mapping[str, Any]) -> None:
    """Refuse text where an option is True or False, since any text counts as True.

    Args:
        given: arguments by name.

    Raises:
        ValueError: names the argument.
    """
    for name, value in given.items():
        if isinstance(value, str) and name in _SWITCHES:
            raise ValueError(f"{name}={value!r}: set True or False")


def check_root(folder: str | os.PathLike[str] | None) -> str:
    """Return the parent of the runs' folders.

    Args:
        folder: path; None for the current folder.

    Raises:
        ValueError: the path is a URL.
    """
    if "://" in str(folder):
        raise ValueError(
            f"default_root_dir={str(folder)!r}: a run's folder is on this machine; to write checkpoints to a URL, set "
            "ModelCheckpoint(dirpath='...') or callbacks.model_checkpoint.dirpath=..."
        )
    return str(folder or Path.cwd())


def check_accelerator(accelerator: str) -> str:
    """Return "cpu", "cuda" or "mps".

    Args:
        accelerator: a name of `ACCELERATORS`.

    Raises:
        ValueError: the name is unknown, or this machine has no such device.
    """
    accelerator = accelerator_name(accelerator, ACCELERATORS)
    import torch

    if accelerator == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    name = "cuda" if accelerator == "gpu" else accelerator
    available = {"cpu": True, "cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}[name]
    if available is not True and not available():  # type: ignore[operator]
        raise ValueError(
            f"accelerator={accelerator!r}, but torch {torch.__version__} finds no such device; set accelerator='cpu'"
        )
    return name


def check_devices(devices: Any, accelerator: str) -> list[int]:
    """Return the device number of each rank on this machine.

    Args:
        devices: number of devices ("auto", 2, "2", -1 for all), or list of device numbers ([0, 2], "0,2").
        accelerator: "cpu", "cuda" or "mps". On a CPU, a device is a process; any number is valid.

    Raises:
        ValueError: the text is invalid, a device is repeated, or this machine does not have the devices.
    """
    import torch

    count = torch.cuda.device_count() if accelerator == "cuda" else 1 if accelerator == "mps" else None
    if devices == "auto":
        return list(range(count or 1))
    if isinstance(devices, str):
        try:
            devices = [int(part) for part in devices.split(",") if part] if "," in devices else int(devices)
        except ValueError:
            raise ValueError(f"devices={devices!r}: set 'auto', a number, or a list of numbers") from None
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        chosen = [int(number) for number in devices]
    elif isinstance(devices, int) and not isinstance(devices, bool) and (devices > 0 or devices == -1):
        chosen = list(range((count or os.cpu_count() or 1) if devices == -1 else devices))
    else:
        raise ValueError(f"devices={devices!r}: set 'auto', a positive number, -1 for all, or a list of numbers")
    if not chosen or len(set(chosen)) != len(chosen):
        raise ValueError(f"devices={devices!r}: list at least one device, and each device only once")
    if count is not None and max(chosen) >= count:
        raise ValueError(f"devices={devices!r}, but this machine has {count} {accelerator} device(s)")
    return chosen


def check_limit(name: str, limit: Any) -> int | float:
    """Return a limit of batches: their number (int), or a fraction (float; 1.0 for all batches).

    Args:
        name: of the option, for the message.
        limit: None is 1.0.

    Raises:
        ValueError: the limit is negative, or a fraction above 1.
    """
    if limit is None:
        return 1.0
    if isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0:
        return limit
    if isinstance(limit, float) and limit > 1 and limit == int(limit):
        return int(limit)
    if isinstance(limit, float) and 0 <= limit <= 1:
        return limit
    raise ValueError(f"{name}={limit!r}: set a number of batches (10), or a fraction (0.25; 1.0 for all batches)")


def check_batches(name: str, value: Any, least: int) -> int:
    """Return a number of batches.

    Args:
        name: of the option, for the message.
        value: the number.
        least: the minimum.

    Raises:
        ValueError: the value is not an integer, or less than `least`.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r}: set an integer number of batches, {least} or more")
    return value


def check_validation_interval(every: Any) -> Any:
    """Return the interval between validations.

    Args:
        every: a fraction of an epoch (float), a number of batches (int), steps ("500st"), a duration (a timedelta, text
            such as "30m" or "00:00:30:00", arguments of `timedelta` as a dict), or None for no validation.

    Raises:
        ValueError: the interval is 0, negative, or a fraction above 1, or the text can't be parsed.
    """
    if isinstance(every, timedelta | Mapping):
        return _duration("val_check_interval", every)
    if isinstance(every, str):
        return every if _COUNTED.fullmatch(every) else _duration("val_check_interval", every)
    if every is None:
        return every
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return every
    if isinstance(every, float) and 0 < every <= 1:
        return every
    raise ValueError(
        f"val_check_interval={every!r}: set a fraction of an epoch (a float above 0, at most 1.0), a number "
        "of batches (100), weight updates ('500st'), or a duration ('30m'); limit_val_batches=0 disables validation"
    )


def check_max_time(max_time: Any) -> timedelta | None:
    """Return a time limit.

    Args:
        max_time: a timedelta, text such as "2h30m" or "00:12:00:00", arguments of `timedelta` as a dict, or None.
    """
    return None if max_time is None else _duration("max_time", max_time)


def _duration(name: str, value: Any) -> timedelta:
    try:
        return parse_duration(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def check_compile(value: bool | Mapping[str, Any]) -> bool | Mapping[str, Any]:
    """Return whether to compile the module, or options of `torch.compile`.

    Args:
        value: of the option.

    Raises:
        ValueError: the value is neither a bool nor a mapping.
    """
    if not isinstance(value, (bool, Mapping)):
        raise ValueError(
            f"compile={value!r}: set True, False, or options of torch.compile such as {{'mode': 'default'}}"
        )
    return value


def check_clipping(limit: float | None, algorithm: str | None) -> tuple[float | None, str]:
    """Return the limit for gradients, and whether it applies to their "norm" or to each "value".

    Args:
        limit: None disables clipping.
        algorithm: None is "norm".

    Raises:
        ValueError: the limit is no number or negative, or the algorithm is unknown.
    """
    if algorithm not in (None, "norm", "value"):
        raise ValueError(f"gradient_clip_algorithm={algorithm!r}: set 'norm' or 'value'")
    if limit is not None and (not isinstance(limit, (int, float)) or isinstance(limit, bool) or not limit >= 0):
        raise ValueError(f"gradient_clip_val={limit!r}: set a limit of 0 or more, or None to disable clipping")
    return limit, algorithm or "norm"


def check_deterministic(value: bool | str) -> bool | str:
    """Return True, False, "warn" or "elastic".

    Args:
        value: of the option.

    Raises:
        ValueError: the value is invalid.
    """
    if not isinstance(value, bool) and value not in ("warn", "elastic"):
        raise ValueError(f"deterministic={value!r}: set False, True, 'warn' or 'elastic'")
    return value


def check_profiler(value: Any) -> str | None:
    """Return the name of a profiler, or None.

    Args:
        value: of the option.

    Raises:
        ValueError: the name is unknown.
    """
    return profiler_name(value, ("simple", "trace"))
