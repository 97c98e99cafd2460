"""The contract suite of loggers: the destination has a single value of each step, also after a worker has died."""

from __future__ import annotations

import json
import math
import pickle
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from fabricx import plugins
from fabricx.core.logger import Logger
from fabricx.testing.broken import BrokenContract
from fabricx.testing.faults import kill
from fabricx.testing.modules import QUIET, TinyModule, tiny_loader
from fabricx.trainer.trainer import Trainer

Row = tuple[int, str, float]
KILLED_AT: Final = 2  # of 4 steps


def check_logger(make: Callable[[], Logger], read: Callable[[Path], Iterable[Row]]) -> None:
    """Check that a logger writes a single value of each step: on 1 and 2 ranks, after a death and after a rewind.

    It writes rows without a run, and rewinds them with a new object, as a process that resumes a run does. Then it
    trains a small module on 1 rank, on 2 ranks, and on 2 ranks with a kill of the main rank, which logs.

    Args:
        make: returns a new logger.
        read: returns the rows that the destination has of a run, as (step, name, value), in any order; it is called
            with the run's folder.

    Raises:
        BrokenContract: the logger breaks the contract. Errors of a run pass.
    """
    try:
        pickle.loads(pickle.dumps(make()))  # it is sent to a worker
    except Exception as error:  # of the pickled object
        raise BrokenContract(f"it cannot be sent to a worker: {error}. Open files and connections in open") from error
    with tempfile.TemporaryDirectory() as folder:
        _check_rewinding(make, read, Path(folder) / "rewound")
        _check_run("one rank", make, read, Path(folder) / "one")
        _check_run("two ranks", make, read, Path(folder) / "two", devices=2)
        fault = kill(0).during("backward", step=KILLED_AT)
        _check_run("the main rank is killed", make, read, Path(folder) / "killed", devices=2, callbacks=[fault])


def _check_rewinding(make: Callable[[], Logger], read: Callable[[Path], Iterable[Row]], run_dir: Path) -> None:
    run_dir.mkdir()
    first, resumed = make(), make()
    first.open(run_dir)
    first.open(run_dir)  # does nothing
    first.log_hyperparams({"lr": 0.1, "sizes": [2, 3], "data": {"path": None}})
    first.log_text("configuration", "lr: 0.1")
    for step in (1, 2, 3, 4):
        first.log_metrics({"loss": step / 2, "nan": math.nan, "infinite": -math.inf}, step)
    first.close("failed")
    resumed.open(run_dir)
    resumed.rewind(2)
    resumed.flush()
    resumed.log_metrics({"loss": 8.0}, 3)
    resumed.close("success")
    _compare("after rewind(2)", read(run_dir), {1: 0.5, 2: 1.0, 3: 8.0}, "Does rewind delete rows of later steps?")


def _check_run(
    name: str, make: Callable[[], Logger], read: Callable[[Path], Iterable[Row]], folder: Path, **options: Any
) -> None:  # fmt: skip
    folder.mkdir()
    reference = plugins.build("loggers", "jsonl")
    arguments = {**QUIET, "logger": [make(), reference], "log_every_n_steps": 1, "default_root_dir": folder, **options}
    trainer = Trainer(max_steps=4, **arguments)
    trainer.fit(TinyModule(), tiny_loader(batch=2), tiny_loader())
    assert trainer.run_dir is not None
    lines = [json.loads(line) for line in (trainer.run_dir / "metrics.jsonl").read_text().splitlines()]
    wanted = {line["step"]: line["loss"] for line in lines if "loss" in line}
    _compare(name, read(trainer.run_dir), wanted, "Does it write to the same place in each process of the run?")


def _compare(name: str, rows: Iterable[Row], wanted: dict[int, float], hint: str) -> None:
    # A set: a row of the step to which a run returns may be written twice, with the same value.
    values = sorted({(step, value) for step, metric, value in rows if metric == "loss"})
    steps = [step for step, _ in values]
    if steps != sorted(wanted):
        raise BrokenContract(f"{name}: the destination has 'loss' of the steps {steps}, not {sorted(wanted)}. {hint}")
    for step, value in values:
        if not math.isclose(value, wanted[step], rel_tol=1e-5):
            raise BrokenContract(f"{name}: 'loss' of step {step} is {value}, and was {wanted[step]}")
