"""More or fewer workers for a run that goes on, when somebody asks for them from outside."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from fabricx.launch.lock import who_is_here

ELASTIC: Final = "elastic"  # what such a run says of itself
_WISH: Final = "workers"  # the file that holds the number


def ask(run_dir: Path, workers: int) -> None:
    """Ask the run in a folder for so many workers; it takes them in, or lets them go, between two steps.

    Raises:
        ValueError: nobody trains there, or with a strategy that can't change its workers.
    """
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir} isn't a run's folder")
    here = who_is_here(run_dir)
    if here is None:
        raise ValueError(f"nobody trains in {run_dir}; go on with it by: fabricx resume {run_dir} trainer.devices=...")
    if ELASTIC not in here.split():
        raise ValueError(
            f"the run in {run_dir} can't change its workers while it goes on: that takes several devices, and "
            "FaultRecovery (async_sgd goes without), on CPUs, and no pull_compression where servers step. Stop it "
            f"(Ctrl-C), and: fabricx resume {run_dir} trainer.devices={workers}"
        )
    fresh = run_dir / f"{_WISH}.new"
    fresh.write_text(str(workers))
    os.replace(fresh, run_dir / _WISH)


def wish(run_dir: Path) -> int | None:
    """Return how many workers somebody has asked for since this was asked last, if anybody has."""
    try:
        text = (run_dir / _WISH).read_text()
        (run_dir / _WISH).unlink()
    except FileNotFoundError:
        return None
    return int(text)
