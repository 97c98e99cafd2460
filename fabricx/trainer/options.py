"""Validates and normalises the Trainer's arguments before any process starts."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch

from fabricx.duration import parse_duration
from fabricx.errors import did_you_mean

ACCELERATORS: Final = ("auto", "cpu", "gpu", "cuda", "mps")


def check_root(folder: str | os.PathLike[str] | None) -> str:
    """Return the folder where runs' folders are made.

    Raises:
        ValueError: it is a URL.
    """
    if "://" in str(folder):
        raise ValueError(
            f"default_root_dir={str(folder)!r}: a run's folder is on this machine; for checkpoints elsewhere give "
            "ModelCheckpoint(dirpath='...') or callbacks.model_checkpoint.dirpath=..."
        )
    return str(folder or Path.cwd())


def check_accelerator(accelerator: str) -> str:
    """Return "cpu", "cuda" or "mps".

    Raises:
        ValueError: the name isn't known, or there is no such device here.
    """
    if accelerator not in ACCELERATORS:
        raise ValueError(
            f"accelerator={accelerator!r} isn't known.{did_you_mean(str(accelerator), ACCELERATORS)}\n"
            f"  known: {', '.join(ACCELERATORS)}"
        )
    if accelerator == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    name = "cuda" if accelerator == "gpu" else accelerator
    there = {"cpu": True, "cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}[name]
    if there is not True and not there():  # type: ignore[operator]
        raise ValueError(
            f"accelerator={accelerator!r}, but torch {torch.__version__} sees no such device here; take 'cpu'"
        )
    return name


def check_devices(devices: Any, accelerator: str) -> list[int]:
    """Return the device numbers of this machine's ranks, one per rank.

    Args:
        devices: how many ("auto", 2, "2", -1 for all there are), or which ([0, 2], "0,2").
        accelerator: "cpu", "cuda" or "mps". On a CPU a device is a process, and there may be any number.

    Raises:
        ValueError: it can't be read, or asks for more than there are.
    """
    there = torch.cuda.device_count() if accelerator == "cuda" else 1 if accelerator == "mps" else None
    if devices == "auto":
        return list(range(there or 1))
    if isinstance(devices, str):
        try:
            devices = [int(part) for part in devices.split(",") if part] if "," in devices else int(devices)
        except ValueError:
            raise ValueError(f"devices={devices!r}: give 'auto', a number, or a list of numbers") from None
    if isinstance(devices, (list, tuple)):
        chosen = [int(number) for number in devices]
    elif isinstance(devices, int) and not isinstance(devices, bool) and (devices > 0 or devices == -1):
        chosen = list(range((there or os.cpu_count() or 1) if devices == -1 else devices))
    else:
        raise ValueError(f"devices={devices!r}: give 'auto', a positive number, -1 for all, or a list of numbers")
    if not chosen or len(set(chosen)) != len(chosen):
        raise ValueError(f"devices={devices!r}: each device once, and at least one")
    if there is not None and max(chosen) >= there:
        raise ValueError(f"devices={devices!r}, but this machine has {there} {accelerator} device(s)")
    return chosen


def check_limit(name: str, limit: Any) -> int | float:
    """Return a limit of batches: a number of them (int), a part of them (float), infinity for all.

    Raises:
        ValueError: it is negative, or a float above 1.
    """
    if limit is None or (isinstance(limit, float) and limit == 1.0):
        return float("inf")
    if isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0:
        return limit
    if isinstance(limit, float) and limit > 1 and limit == int(limit):
        return int(limit)
    if isinstance(limit, float) and 0 <= limit <= 1:
        return limit
    raise ValueError(f"{name}={limit!r}: give a number of batches (10), or a part of them (0.25; 1.0 is all)")


def check_batches(name: str, value: Any, least: int) -> int:
    """Return a number of batches; True is 1.

    Raises:
        ValueError: it is no whole number, or less than `least`.
    """
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: give a whole number of batches, {least} or more")
    return value


def check_validation_interval(every: Any) -> Any:
    """Return how often validation comes: a part of an epoch, a number of batches, steps ("500st"), or None for never.

    Raises:
        ValueError: it is 0, negative, or a float above 1.
    """
    if every is None or isinstance(every, str):  # text is read where the unit is needed
        return every
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return every
    if isinstance(every, float) and 0 < every <= 1:
        return every
    raise ValueError(
        f"val_check_interval={every!r}: give a part of an epoch (a float above 0, at most 1.0), a number of batches "
        "(100), or weight updates ('500st'); limit_val_batches=0 leaves validation out"
    )


def check_max_time(max_time: Any) -> timedelta | None:
    """Return a time limit; text such as "2h30m" or "00:12:00:00" and a dict for `timedelta` are read."""
    if max_time is None or isinstance(max_time, timedelta):
        return max_time
    return timedelta(**max_time) if isinstance(max_time, dict) else parse_duration(max_time)


def check_clipping(limit: float | None, algorithm: str | None) -> tuple[float | None, str]:
    """Return by how much gradients are clipped, and whether that is their "norm" or each "value"."""
    if algorithm not in (None, "norm", "value"):
        raise ValueError(f"gradient_clip_algorithm={algorithm!r}: 'norm' or 'value'")
    if limit is not None and limit < 0:
        raise ValueError(f"gradient_clip_val={limit}: a limit of 0 or more, or None to clip nothing")
    return limit, algorithm or "norm"


def check_deterministic(value: bool | str) -> bool | str:
    """Return True, False, "warn" or "elastic"."""
    if value not in (False, True, "warn", "elastic"):
        raise ValueError(f"deterministic={value!r}: False, True, 'warn' or 'elastic'")
    return value


def check_profiler(value: str | None) -> str | None:
    """Return the name of a profiler, or None."""
    known = ("simple", "trace")
    if value is not None and value not in known:
        raise ValueError(f"profiler={value!r}: 'simple', 'trace', or None.{did_you_mean(str(value), known)}")
    return value
