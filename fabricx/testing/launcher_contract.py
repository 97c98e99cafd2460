"""The contract suite of launchers: whole programs, which a command starts on all ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from fabricx.testing.broken import BrokenContract

VARIABLES: Final = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
TRAINS: Final = """
import json, os
from pathlib import Path
from fabricx import Trainer
from fabricx.testing import QUIET, TinyModule, tiny_loader

module, variables = TinyModule(), {name: os.environ.get(name) for name in VARIABLES}
if None not in variables.values():
    trainer = Trainer(max_epochs=2, **QUIET)
    trainer.fit(module, tiny_loader(24, 12 // int(variables["WORLD_SIZE"])))
    variables["weights"] = [p.detach().flatten().tolist() for p in module.parameters()]
Path(f"{os.getpid()}.json").write_text(json.dumps(variables))
"""
FAILS: Final = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(7)
time.sleep(3600)
"""


def check_launcher(command: Sequence[str], *, ranks: int = 2, timeout_s: float = 300.0) -> None:
    """Check that a launcher starts ranks that train together, and ends all of them when one fails.

    It runs two programs in a temporary folder, which all ranks share, as `[*command, PROGRAM]`. The first trains
    `TinyModule` on all ranks, which must end with equal weights. In the second, rank 1 exits with status 7,
    and the other ranks wait for an hour.

    Args:
        command: program and arguments of the launcher, such as `["python", "launch.py"]`, with absolute paths; the
            path of a Python program is appended.
        ranks: number of ranks that it starts, 2 or more, a divisor of 12.
        timeout_s: seconds for each of the programs.

    Raises:
        BrokenContract: the launcher breaks the contract.
        ValueError: `ranks` is not a divisor of 12, or less than 2.
    """
    if ranks < 2 or 12 % ranks:
        raise ValueError(f"ranks={ranks}: must be 2 or more, and divide 12")
    with tempfile.TemporaryDirectory() as folder:
        _check_training(command, ranks, Path(folder), timeout_s)
        _check_failing(command, Path(folder), timeout_s)


def _run(command: Sequence[str], program: str, folder: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    path = folder / "program.py"
    path.write_text(program)
    paths = os.pathsep.join(path for path in (os.environ.get("PYTHONPATH"), *sys.path) if path)
    return subprocess.run(
        [*command, str(path)], cwd=folder, timeout=timeout_s, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip


def _check_training(command: Sequence[str], ranks: int, folder: Path, timeout_s: float) -> None:
    try:
        ended = _run(command, f"VARIABLES = {VARIABLES}{TRAINS}", folder, timeout_s)
    except subprocess.TimeoutExpired as error:
        raise BrokenContract(f"the ranks did not end a training within {timeout_s:g} s: {error.stderr!r}") from error
    by_rank: list[dict[str, Any]] = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    if ended.returncode != 0 or len(by_rank) != ranks:
        output = (ended.stdout + ended.stderr)[-2000:]
        raise BrokenContract(f"{len(by_rank)} of {ranks} ranks ended a training; status {ended.returncode}\n{output}")
    for variables in by_rank:
        missing = [name for name in VARIABLES if variables[name] is None]
        if missing:
            raise BrokenContract(f"a process has no {', '.join(missing)}")
    _check_numbers(by_rank, ranks)
    wanted = by_rank[0]["weights"]
    if any(variables["weights"] != wanted for variables in by_rank):
        raise BrokenContract("ranks have different weights after the training: they did not train together")


def _check_numbers(by_rank: Sequence[dict[str, Any]], ranks: int) -> None:
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        values = {variables[name] for variables in by_rank}
        if len(values) > 1 or (name == "WORLD_SIZE" and values != {str(ranks)}):
            raise BrokenContract(f"{name} is {', '.join(sorted(values))} on {ranks} ranks; it must be the same on all")
    numbers = sorted(int(variables["RANK"]) for variables in by_rank)
    if numbers != list(range(ranks)):
        raise BrokenContract(f"RANK is {numbers}, and must be {list(range(ranks))}")
    machines: dict[str, list[dict[str, Any]]] = {}
    for variables in by_rank:
        machines.setdefault(variables["GROUP_RANK"], []).append(variables)
    for machine, there in machines.items():
        local = sorted(int(variables["LOCAL_RANK"]) for variables in there)
        sizes = {int(variables["LOCAL_WORLD_SIZE"]) for variables in there}
        if local != list(range(len(there))) or sizes != {len(there)}:
            raise BrokenContract(
                f"machine {machine} has {len(there)} ranks: LOCAL_RANK is {local}, LOCAL_WORLD_SIZE {sorted(sizes)}"
            )


def _check_failing(command: Sequence[str], folder: Path, timeout_s: float) -> None:
    began = time.monotonic()
    try:
        ended = _run(command, FAILS, folder, timeout_s)
    except subprocess.TimeoutExpired as error:
        raise BrokenContract(
            f"rank 1 exited with status 7, and the others still ran after {time.monotonic() - began:.0f} s: a launcher "
            "ends all ranks when one fails"
        ) from error
    if ended.returncode == 0:
        raise BrokenContract("rank 1 exited with status 7, and the launcher with status 0")
