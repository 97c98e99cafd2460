"""The contract suite of loggers: the destination has a single value of each step, also after a worker has died."""

from __future__ import annotations

import json
import math
import pickle
import tempfile
from collections.abc import Callable, Iterable, Mapping
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
PARAMS: Final = {"lr": 0.1, "sizes": [2, 3], "data": {"path": None}, "optimizer": "sgd"}


def check_logger(
    make: Callable[[], Logger], read: Callable[[Path], Iterable[Row]],
    read_params: Callable[[Path], Mapping[str, Any]] | None = None,
) -> None:  # fmt: skip
    """Check that a logger writes a single value of each step: on 1 and 2 ranks, after a death and after a rewind.

    It writes rows without a run, and rewinds them with a new object, as a process that resumes a run does. Then it
    trains a small module on 1 rank, on 2 ranks, and on 2 ranks with a kill of the main rank, which logs. All metrics
    are compared; a destination may omit NaN and infinite values.

    Args:
        make: returns a new logger.
        read: returns the rows that the destination has of a run, as (step, name, value), in any order; it is called
            with the run's folder.
        read_params: returns the hyperparameters that the destination has of a run, of which "lr" and "optimizer" are
            compared; None for a logger that writes none.

    Raises:
        BrokenContract: the logger breaks the contract. Errors of a run pass.
    """
    try:
        pickle.loads(pickle.dumps(make()))  # it is sent to a worker
    except Exception as error:  # of the pickled object
        raise BrokenContract(f"it cannot be sent to a worker: {error}. Open files and connections in open") from error
    with tempfile.TemporaryDirectory() as folder:
        _check_rewinding(make, read, Path(folder) / "rewound")
        if read_params is not None:
            _check_params(read_params(Path(folder) / "rewound"))
        _check_run("one rank", make, read, Path(folder) / "one")
        _check_run("two ranks", make, read, Path(folder) / "two", devices=2)
        fault = kill(0).during("backward", step=KILLED_AT)
        _check_run("the main rank is killed", make, read, Path(folder) / "killed", devices=2, callbacks=[fault])


def _check_rewinding(make: Callable[[], Logger], read: Callable[[Path], Iterable[Row]], run_dir: Path) -> None:
    run_dir.mkdir()
    first, resumed = make(), make()
    first.open(run_dir)
    first.open(run_dir)  # does nothing
    first.log_hyperparams(PARAMS)
    first.log_text("configuration", "lr: 0.1")
    for step in (1, 2, 3, 4):
        first.log_metrics(_row(step), step)
    first.close("failed")
    resumed.open(run_dir)
    resumed.rewind(2)
    resumed.flush()
    resumed.log_metrics({"loss": 8.0}, 3)
    resumed.close("success")
    rows = {1: _row(1), 2: _row(2), 3: {"loss": 8.0}}
    _compare("after rewind(2)", read(run_dir), rows, "Does rewind delete rows of later steps?")


def _row(step: int) -> dict[str, float]:
    return {"loss": step / 2, "accuracy": step / 8, "nan": math.nan, "infinite": -math.inf}


def _check_params(logged: Mapping[str, Any]) -> None:
    """Compare a number and a text; a destination may flatten the other hyperparameters, or write them as text."""
    for name in ("lr", "optimizer"):
        if name not in logged:
            raise BrokenContract(f"the destination has no hyperparameter {name!r} after log_hyperparams({PARAMS})")
        if str(logged[name]) != str(PARAMS[name]):
            raise BrokenContract(f"the hyperparameter {name!r} is {logged[name]!r}, and was {PARAMS[name]!r}")


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
    wanted: dict[int, dict[str, float]] = {}
    for line in lines:
        of_step = wanted.setdefault(line["step"], {})
        of_step |= {metric: value for metric, value in line.items() if metric not in ("step", "time")}
    _compare(name, read(trainer.run_dir), wanted, "Does it write to the same place in each process of the run?")


def _compare(name: str, rows: Iterable[Row], wanted: Mapping[int, Mapping[str, float]], hint: str) -> None:
    # A set: a row of the step to which a run returns may be written twice, with the same value.
    found: dict[str, set[tuple[int, float]]] = {}
    for step, metric, value in rows:
        found.setdefault(metric, set()).add((step, value))
    for metric in dict.fromkeys(metric for of_step in wanted.values() for metric in of_step):
        values = {step: of_step[metric] for step, of_step in wanted.items() if metric in of_step}
        _compare_metric(name, metric, sorted(found.get(metric, ())), values, hint)


def _compare_metric(
    name: str, metric: str, rows: list[tuple[int, float]], wanted: Mapping[int, float], hint: str
) -> None:  # fmt: skip
    finite = all(math.isfinite(value) for value in wanted.values())
    steps = [step for step, _ in rows]
    if finite and not rows:
        raise BrokenContract(f"{name}: the destination has no {metric!r}. Does log_metrics write every metric?")
    if rows and steps != sorted(wanted):
        raise BrokenContract(
            f"{name}: the destination has {metric!r} of the steps {steps}, not {sorted(wanted)}. {hint}"
        )
    for step, value in rows:
        nan = math.isnan(value) and math.isnan(wanted[step])
        if not nan and not math.isclose(value, wanted[step], rel_tol=1e-5):
            raise BrokenContract(f"{name}: {metric!r} of step {step} is {value}, and was {wanted[step]}")
