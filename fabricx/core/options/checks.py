"""Checks of single options of the Trainer: each returns the valid form of a value, or names the valid values."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from fabricx.core.options.duration import check_count, parse_duration
from fabricx.core.options.former_arguments import accelerator_name, profiler_name
from fabricx.errors import WrongArgument

_COUNTED: Final = re.compile(r"\s*\d[\d_]*\s*(st|ep|ba)?\s*")  # "500st"; other text is a duration
_SWITCHES: Final = (
    "inference_mode", "use_distributed_sampler", "detect_anomaly", "barebones", "sync_batchnorm", "benchmark",
    "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "enable_fault_recovery", "enable_telemetry",
    "enable_autolog_hparams",
)  # fmt: skip
ACCELERATORS: Final = ("auto", "cpu", "gpu", "cuda", "mps")


def check_switches(arguments: Mapping[str, Any]) -> None:
    """Refuse text where an option is True or False, since any text counts as True.

    Args:
        arguments: arguments by name.

    Raises:
        ValueError: names the argument.
    """
    for name, value in arguments.items():
        if isinstance(value, str) and name in _SWITCHES:
            raise ValueError(f"{name}={value!r}: set True or False")


def check_root(folder: str | os.PathLike[str] | None) -> str:
    """Return the parent of the runs' folders.

    Args:
        folder: path, in which "~" is the home folder; None for the current folder.

    Raises:
        ValueError: the path is a URL.
    """
    if "://" in str(folder):
        raise ValueError(
            f"default_root_dir={str(folder)!r}: a run's folder is on this machine; to write checkpoints to a URL, set "
            "ModelCheckpoint(dirpath='...') or callbacks.model_checkpoint.dirpath=..."
        )
    return str(Path(folder).expanduser() if folder else Path.cwd())


def check_accelerator(accelerator: str, *, elsewhere: bool = False) -> str:
    """Return "cpu", "cuda" or "mps".

    Args:
        accelerator: a name of `ACCELERATORS`.
        elsewhere: the ranks are on other machines, so that this machine need not have the device.

    Raises:
        ValueError: the name is unknown, or this machine has no such device.
    """
    accelerator = accelerator_name(accelerator, ACCELERATORS)
    import torch

    if accelerator == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    name = "cuda" if accelerator == "gpu" else accelerator
    available = {"cpu": True, "cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}[name]
    if available is not True and not elsewhere and not available():  # type: ignore[operator]
        raise ValueError(
            f"accelerator={accelerator!r}, but torch {torch.__version__} finds no such device; set accelerator='cpu'"
        )
    return name


def check_devices(devices: Any, accelerator: str, *, elsewhere: bool = False) -> list[int]:
    """Return the device number of each rank on this machine.

    Args:
        devices: number of devices ("auto", 2, "2", -1 for all), or list of device numbers ([0, 2], "0,2").
        accelerator: "cpu", "cuda" or "mps". On a CPU, a device is a process; any number is valid.
        elsewhere: the ranks are on other machines, whose devices a launcher chooses: only a number is valid.

    Raises:
        ValueError: the text is invalid, a number is negative or repeated, or this machine does not have the devices.
    """
    import torch

    if elsewhere:
        if isinstance(devices, bool) or not str(devices).isdecimal() or int(devices) < 1:
            raise ValueError(f"devices={devices!r}: with a launcher, set the number of ranks on each machine")
        return list(range(int(devices)))
    count = torch.cuda.device_count() if accelerator == "cuda" else 1 if accelerator == "mps" else None
    if devices == "auto":
        return list(range(count or 1))
    if isinstance(devices, str):
        try:
            devices = [int(part) for part in devices.split(",") if part] if "," in devices else int(devices)
        except ValueError:
            raise WrongArgument(f"devices={devices!r}: set 'auto', a number, or a list of numbers") from None
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        chosen = [int(number) for number in devices]
    elif isinstance(devices, int) and not isinstance(devices, bool) and (devices > 0 or devices == -1):
        chosen = list(range((count or os.cpu_count() or 1) if devices == -1 else devices))
    else:
        raise WrongArgument(f"devices={devices!r}: set 'auto', a positive number, -1 for all, or a list of numbers")
    if not chosen or len(set(chosen)) != len(chosen) or min(chosen) < 0:
        raise ValueError(f"devices={devices!r}: list at least one device from 0 on, and each device only once")
    if count is not None and max(chosen) >= count:
        raise ValueError(
            f"devices={devices!r}, but this machine has {count} {accelerator} device(s): set devices='auto', or "
            "accelerator='cpu' for any number of processes"
        )
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
    raise WrongArgument(f"{name}={limit!r}: set a number of batches (10), or a fraction (0.25; 1.0 for all batches)")


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


def check_accumulation(batches: Any) -> int:
    """Return the number of batches of each rank for a weight update.

    Args:
        batches: the number.

    Raises:
        ValueError: the value is not a positive integer; for a schedule, the message names the callback.
    """
    if isinstance(batches, Mapping):
        raise ValueError(
            f"accumulate_grad_batches={dict(batches)!r}: pass "
            f"GradientAccumulationScheduler({dict(batches)!r}) in callbacks=[...]"
        )
    return check_count("accumulate_grad_batches", batches, "batch", 1) or 1


def check_clipping(limit: float | None, algorithm: str | None) -> tuple[float | None, str | None]:
    """Return the limit for gradients, and whether it applies to their "norm" or to each "value".

    Args:
        limit: None disables clipping.
        algorithm: None stands for "norm".

    Raises:
        ValueError: the limit is negative or not a number, or the algorithm is unknown.
    """
    if algorithm not in (None, "norm", "value"):
        raise ValueError(f"gradient_clip_algorithm={algorithm!r}: set 'norm' or 'value'")
    if limit is not None and (not isinstance(limit, (int, float)) or isinstance(limit, bool) or not limit >= 0):
        raise WrongArgument(f"gradient_clip_val={limit!r}: set a limit of 0 or more, or None to disable clipping")
    return limit, algorithm


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
