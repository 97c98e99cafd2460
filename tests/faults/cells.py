"""The cells of the fault matrix: a strategy, and a fault of a process at a moment of the run."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from allpairspy import AllPairs

from fabricx import Strategy
from fabricx.core.strategy_parts import HasServers, as_part
from fabricx.strategies import DDP, FSDP, AsyncSGD, LocalSGD, ParameterServer, Reproducible

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": DDP,
    "fsdp": FSDP,
    "reproducible": Reproducible,
    "local_sgd": lambda: LocalSGD(every=2),
    "ps0": lambda: ParameterServer(servers=0),
    "ps0-server": lambda: ParameterServer(servers=0, optimizer="server"),
    "ps1": ParameterServer,
    "ps2": lambda: ParameterServer(servers=2),
    "ps1-server": lambda: ParameterServer(optimizer="server"),
    "ps2-server": lambda: ParameterServer(servers=2, optimizer="server"),
    "bounded": lambda: ParameterServer(mode="bounded", servers=2),
    "async_sgd": lambda: AsyncSGD(damp=False),
    "async_sgd-2": lambda: AsyncSGD(damp=False, servers=2),
    "rounds": lambda: AsyncSGD(every=3, outer="sum"),
}
ASYNCHRONOUS = {"bounded", "async_sgd", "async_sgd-2", "rounds"}
EARLY = ("setup", "on_fit_start", "on_train_start")
MOMENTS = (
    *EARLY, "on_train_epoch_start", "on_train_batch_start", "on_before_backward", "reducing", "on_after_backward",
    "on_before_optimizer_step", "on_train_batch_end", "on_validation_start", "on_validation_batch_start",
    "on_validation_end", "on_train_epoch_end", "on_save_checkpoint", "writing", "committed", "on_train_end",
    "on_fit_end", "teardown",
)  # fmt: skip
AFTER = ("on_fit_end", "teardown")  # after training
NOT_HOOKS = ("reducing", "writing", "committed")
EXCEPTIONS = {"error": RuntimeError, "memory": MemoryError}
FEATURES: dict[str, tuple[Any, ...]] = {
    "strategy": tuple(STRATEGIES),
    "moment": MOMENTS,
    "process": (
        "worker 0", "worker 1", "both workers", "server 0", "server 1", "loader", "supervisor", "all",
    ),
    "fault": ("kill", "freeze", "term", "int", "error", "memory", "cut", "again", "exit"),
    "disk": ("fast", "slow", "full", "failing"),
    "step": (4, 0, 7),
    "draws": ("forward", "hooks"),
}  # fmt: skip
FAULTS_OF = {  # possible faults of each kind of process
    "worker": ("kill", "freeze", "term", "int", "error", "memory", "cut", "again"),
    "both": ("kill", "freeze", "term", "error", "cut"),
    "server": ("kill", "freeze"),  # servers ignore SIGTERM, and run no user code
    "loader": ("kill", "exit", "error"),
    "supervisor": ("kill", "freeze", "term", "int"),
    "all": ("kill", "term", "int"),
}


@dataclass(frozen=True)
class Cell:
    """A run and its fault.

    Attributes:
        strategy: name of the strategy.
        moment: hook in which the fault happens; or "reducing" (during a backward), "writing" (while a part of a
            checkpoint is written) and "committed" (a checkpoint is complete).
        process: the affected process or processes; "all" are the supervisor and its descendants.
        fault: SIGKILL, SIGSTOP, SIGTERM, SIGINT; an exception, or MemoryError; "cut" network links; "again" kills a
            worker, and its replacement while it joins; "exit" ends a loader process. A stopped supervisor is
            continued after a second; other stopped processes are not.
        disk: a "slow" disk writes nothing until training waits for it; the first write to a "full" or "failing" disk
            raises ENOSPC or EIO.
        step: weight updates before the fault.
        draws: where random numbers are drawn: in the forward, or also in hooks.
    """

    strategy: str = "ddp"
    moment: str = "on_train_batch_start"
    process: str = "worker 1"
    fault: str = "kill"
    disk: str = "fast"
    step: int = 4
    draws: str = "forward"

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Return the cell with this printed form; omitted features have their defaults."""
        features = dict(part.split("=", 1) for part in text.split(","))
        features = {name.strip(): value.strip() for name, value in features.items()}
        return cls(**{**features, **({"step": int(features["step"])} if "step" in features else {})})  # type: ignore[arg-type]

    def __str__(self) -> str:
        return ", ".join(f"{field.name}={getattr(self, field.name)}" for field in dataclasses.fields(self))

    @property
    def number(self) -> int:
        """Return the number of the process among processes of its kind."""
        return int(self.process[-1]) if self.process[-1].isdigit() else 1

    @property
    def outside(self) -> bool:
        """Return whether the fault affects the process that calls `fit`, so that it has to be a separate process."""
        return self.process in ("supervisor", "all")

    def possible(self) -> bool:
        """Return whether this process exists, and the fault can happen to it at this moment."""
        kind = self.process.split()[0]
        if self.fault not in FAULTS_OF[kind]:
            return False
        if kind == "server" and self.number >= as_part(STRATEGIES[self.strategy](), HasServers).servers:
            return False
        if kind == "loader" and self.moment != "on_train_batch_start":
            return False
        if self.moment in EARLY and self.step:
            return False
        if self.fault in EXCEPTIONS and self.moment in (*NOT_HOOKS, "teardown"):
            return False
        if kind == "both" and self.moment == "committed":  # "committed" is a moment of the main rank
            return False
        if self.strategy in ASYNCHRONOUS and self.moment == "on_before_optimizer_step" and kind == "server":
            return False
        stops = self.fault == "term" and not self.outside
        return not (stops and (self.moment in AFTER or self.step == 0))


def pairwise(seed: int) -> Iterator[Cell]:
    """Yield cells until each possible pair of values has occurred; deterministic for a seed."""
    rng = random.Random(seed)
    values = [rng.sample(options, len(options)) for options in FEATURES.values()]

    def admits(row: list[Any]) -> bool:
        features = dict(zip(FEATURES, row, strict=False))
        if features.keys() == FEATURES.keys():
            return Cell(**features).possible()
        return True

    for row in AllPairs(values, filter_func=admits):
        yield Cell(**dict(zip(FEATURES, row, strict=True)))
